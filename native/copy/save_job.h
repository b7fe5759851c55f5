// One save: engine memory on its way into reserved slots, extent by extent as the engine announces them.
//
// The checksum of each extent of each chunk is computed while it is copied. Nothing is visible to any reader before the
// commit.
// Threads: any; see PieceJob.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "copy/extent_copy.h"
#include "copy/piece_job.h"
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

class SaveJob final : public PieceJob {
 public:
  // REQUIRES: every extent lies in the arena, every block id in the view, and the extent's bytes agree.
  explicit SaveJob(SavePlan plan);

  [[nodiscard]] bool is_load() const noexcept override { return false; }

  // The extent, counted from the plan's first one, may be copied from now on; false if it was announced before. The caller adds the
  // job to the queue.
  [[nodiscard]] bool announce(uint32_t extent);

  // All extents may be copied from now on. Returns how many bytes have still to be copied.
  [[nodiscard]] uint64_t announce_rest();

  [[nodiscard]] uint32_t extents() const noexcept { return plan_.extents; }
  // CRC-32C by [chunk][extent]; empty unless every extent has been copied.
  [[nodiscard]] std::vector<uint32_t> checksums() const;
  // How many extents have been copied, counted from the first one up to one that has not.
  [[nodiscard]] uint32_t copied_extents() const;
  // CRC-32C by [chunk][extent] of the extents from `first` on that `copied_extents` counts.
  [[nodiscard]] std::vector<uint32_t> checksums_from(uint32_t first) const;

 private:
  bool claim(Piece& piece) override;
  uint64_t copy(const Piece& piece) override;
  bool settle(const Piece& piece) override;
  [[nodiscard]] bool has_next() const override { return next_announced_ < announced_.size() && chunk_count_ > 0; }

  const SavePlan plan_;
  const uint64_t chunk_count_;
  const uint64_t chunk_blocks_;
  const uint64_t piece_chunks_;
  const uint64_t extent_bytes_;

  // All guarded by lock_, but for the checksums.
  std::vector<uint32_t> announced_;  // extents in the order they came
  std::vector<bool> is_announced_;
  size_t next_announced_ = 0;  // position in announced_
  uint64_t next_chunk_ = 0;
  std::vector<uint64_t> settled_chunks_;  // by extent
  uint32_t copied_extents_ = 0;
  std::vector<uint32_t> checksums_;  // written by the threads, each its own words
};

// Has all of a save copied: by the queue's threads, or here and now where little is left.
void copy_rest(const std::shared_ptr<SaveJob>& job, CopyQueue& queue);

}  // namespace kvpool
