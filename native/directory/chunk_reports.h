// Chunk reports: what a directory says of its chunks, to the change feed as they come and go, and to a caller who lists them.
//
// A row names the tiers that have the chunk after the change, and its priority: that of the uppermost tier that has it, but for copies.
// What it is not: a count of anything, or what clients read.
// Threads: the control thread only. O(tiers) for a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "records/change_feed.h"
#include "records/chunk_records.h"

namespace kvpool {

class Directory;

class ChunkReports {
 public:
  // REQUIRES: the directory lives as long as this.
  explicit ChunkReports(const Directory& directory) : directory_(directory) {}
  ChunkReports(const ChunkReports&) = delete;
  ChunkReports& operator=(const ChunkReports&) = delete;

  // From now on every chunk that comes to this tier or leaves it is reported to the feed; restored ones as a gap alone.
  void report_to(std::shared_ptr<ChangeFeed> feed) noexcept { feed_ = std::move(feed); }
  [[nodiscard]] bool are_waiting() const noexcept { return feed_ != nullptr && feed_->waiting() > 0; }
  // A chunk comes or leaves. REQUIRES: an arrival has been entered in the table, and a departure has not yet been taken out of it.
  void report(const ChunkRecord& record, ChangeKind kind, Cause cause) noexcept;
  // A chunk has another priority than before.
  void report_priority(const ChunkRecord& record, uint8_t before) noexcept;
  // Much has come at once: who reads along has to look at what there is.
  void report_gap() noexcept;

  // READY chunks from the cursor (0 = start) on, `limit` at most, as changes; returns the cursor to go on from, 0 at the end.
  [[nodiscard]] uint32_t list(uint32_t cursor, size_t limit, std::vector<Change>& rows) const;
  [[nodiscard]] std::optional<Change> find(const ChunkKey& key) const noexcept;

 private:
  [[nodiscard]] Change describe(const ChunkRecord& record) const noexcept;

  const Directory& directory_;
  std::shared_ptr<ChangeFeed> feed_;
};

}  // namespace kvpool
