// One save: engine memory on its way into reserved slots, extent by extent as the engine announces them.
//
//   WAITING --announce(extent)--> RUNNING --its pieces done--> WAITING … all extents done
//       \------cancel, last running piece done--> ENDED
//
// The checksum of each extent of each chunk is computed while it is copied. Nothing is visible to any reader before the
// commit.
// Threads: any. All mutable state is guarded by `lock_`, which is not held while bytes are copied.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "copy/copy_pool.h"
#include "copy/extent_copy.h"
#include "base/memory.h"

namespace kvpool {

// What to save: `extents` extents of the view from `first_extent` on, all of them into reserved slots, some of them into
// staging. `offsets`: where extent 0 begins, for each chunk; `block_ids`: blocks_per_chunk for each. `map` counts
// from `first_extent` on.
struct SavePlan {
  CacheView view;
  std::shared_ptr<const Mapping> arena;
  std::vector<uint64_t> offsets;
  std::vector<int64_t> block_ids;
  uint32_t extents = 0;
  uint64_t payload_bytes = 0;
  uint32_t first_extent = 0;
  ExtentMap map = {};
};

class SaveJob final : public CopyJob {
 public:
  // REQUIRES: every extent lies in the arena, every block id in the view, and the extent's bytes agree.
  explicit SaveJob(SavePlan plan);

  uint64_t run_piece() override;
  [[nodiscard]] bool has_pieces() const override;
  // When it returns no byte of the slots is written any more.
  void cancel() override;
  [[nodiscard]] bool is_load() const noexcept override { return false; }

  // The extent, counted from the plan's first one, may be copied from now on; false if it was announced before. The caller adds the
  // job to the queue.
  [[nodiscard]] bool announce(uint32_t extent);

  // Whether every announced extent has been copied, or the job was cancelled, within the time.
  [[nodiscard]] bool wait(double timeout_s) const;
  [[nodiscard]] bool is_cancelled() const;
  [[nodiscard]] uint64_t progress() const;
  [[nodiscard]] uint32_t extents() const noexcept { return plan_.extents; }
  // CRC-32C by [chunk][extent]; empty unless every extent has been copied.
  [[nodiscard]] std::vector<uint32_t> checksums() const;
  // How many extents have been copied, counted from the first one up to one that has not.
  [[nodiscard]] uint32_t copied_extents() const;
  // CRC-32C by [chunk][extent] of the extents from `first` on that `copied_extents` counts.
  [[nodiscard]] std::vector<uint32_t> checksums_from(uint32_t first) const;

 private:
  [[nodiscard]] bool has_copied_announced() const { return settled_ == announced_.size() * chunk_count_; }
  // What anybody waits for. Whoever waits is woken for that alone: a wake for each piece costs a small chunk a third of its time.
  [[nodiscard]] bool is_at_rest() const { return running_ == 0 && (cancelled_ || has_copied_announced()); }

  const SavePlan plan_;
  const uint64_t chunk_count_;
  const uint64_t chunk_blocks_;
  const uint64_t piece_chunks_;
  const uint64_t extent_bytes_;

  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  std::vector<uint32_t> announced_;  // extents in the order they came
  std::vector<bool> is_announced_;
  size_t next_announced_ = 0;  // position in announced_
  uint64_t next_chunk_ = 0;
  uint64_t running_ = 0;  // pieces
  uint64_t settled_ = 0;  // extents of chunks
  std::vector<uint64_t> settled_chunks_;  // by extent
  uint32_t copied_extents_ = 0;
  bool cancelled_ = false;
  std::vector<uint32_t> checksums_;  // written by the threads, each its own words
};

}  // namespace kvpool
