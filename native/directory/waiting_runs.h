// Waiting runs: chunks that are committed behind one that another reservation still writes.
//
// What it is: the runs, by their first chunk, each with the hold that keeps it and its checksums; and how many chunks follow others'
// at all. What it is not: who publishes a run when the chunk before it can be found, or gives it up with that (the Directory).
//
// Invariants (recounted by `verify`): the runs' holds name exactly the chunks that wait, each of a run the parent of the next;
// `is_following` of a record says that it was reserved behind a chunk which another reservation was writing, and is not published yet.
// Threads: the control thread only. O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "holds/hold_table.h"
#include "records/chunk_records.h"

namespace kvpool {

class WaitingRuns {
 public:
  struct Run {
    HoldId hold = 0;
    std::vector<uint32_t> checksums;
  };

  // All that follow are published, or given up, in one call: so many of all reservations together.
  [[nodiscard]] bool is_full() const noexcept { return following_ >= FOLLOWING_MAX; }
  void begin_following(ChunkRecord& record) noexcept {
    record.is_following = true;
    ++following_;
  }
  // The chunk can be found, or is given up.
  void end_following(ChunkRecord& record) noexcept {
    following_ -= record.is_following ? 1U : 0U;
    record.is_following = false;
  }

  void add_run(RecordId leading, Run run) { runs_.emplace(leading.value(), std::move(run)); }
  // Nothing where no run begins with the chunk.
  [[nodiscard]] std::optional<Run> take_run(RecordId leading) noexcept {
    auto found = runs_.extract(leading.value());
    return found.empty() ? std::nullopt : std::optional(std::move(found.mapped()));
  }
  [[nodiscard]] size_t count() const noexcept { return runs_.size(); }
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify(const ChunkRecords& records, const HoldTable& holds) const;

 private:
  static constexpr size_t FOLLOWING_MAX = 2048;

  std::unordered_map<uint32_t, Run> runs_;  // by the first record
  size_t following_ = 0;
};

}  // namespace kvpool
