// One load: chunks of the arena on their way into engine memory, extent by extent.
//
// Pieces go extent by extent: extent 0 of every chunk, then extent 1. After an extent of a chunk was copied its slot's generation
// is read again and then its checksum compared; a chunk that fails takes the chunks behind it along. A chunk without a verdict
// is not good: it counts only when all of its extents were checked. Of a set each chunk is alone: one that fails takes nothing along. A chunk that is still being promoted is
// copied as its extents land, before its turn where the chunk whose turn it is has not landed; while nothing has, the job is
// blocked, and its thread serves others.
//
// Invariant: `chunk_left_[c]` extents of chunk c and `extent_left_[e]` chunks of extent e are neither checked nor skipped.
// Threads: any; see PieceJob.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shared_index/chunk_table.h"
#include "copy/extent_copy.h"
#include "copy/piece_job.h"
#include "shared_index/landing_wait.h"
#include "base/memory.h"

namespace kvpool {

// Why a load ended; the wire codes of kvpool.states.LoadReason.
enum class LoadReason : uint8_t { COMPLETE = 0, GONE = 1, CHECKSUM = 2, CANCELLED = 3, IO = 5 };

enum class ExtentState : int8_t { TIMED_OUT = -1, ENDED = 0, IN_PLACE = 1 };

// What to load: `extents` extents of the view, of `payload_bytes` each, out of those of the chunks that `map` names. `offsets`,
// `slots` and `generations`: one for each chunk; `block_ids`: blocks_per_chunk for each.
struct LoadPlan {
  CacheView view;
  std::shared_ptr<const Mapping> arena;
  std::shared_ptr<const IndexView> index;
  std::vector<uint64_t> offsets;
  std::vector<SlotAddress> slots;
  std::vector<uint64_t> generations;
  std::vector<int64_t> block_ids;
  uint32_t extents = 0;
  uint64_t payload_bytes = 0;
  bool verifies = true;
  ExtentMap map = {};
  bool is_set = false;
};

class LoadJob final : public PieceJob {
 public:
  // REQUIRES: every extent lies in the arena and in the index, every block id in the view or SKIP_BLOCK,
  // view.payload_bytes(blocks per chunk) == payload_bytes, and the numbers of the extents rise.
  explicit LoadJob(LoadPlan plan);

  [[nodiscard]] bool is_load() const noexcept override { return true; }
  [[nodiscard]] bool name_awaited(LandingWait& wait) const override;

  [[nodiscard]] uint32_t extents() const noexcept { return plan_.extents; }

  // Until the extent of the first chunks() chunks is in place, the load has ended before that, or time is over.
  // REQUIRES: extent < extents().
  [[nodiscard]] ExtentState wait_extent(uint32_t extent, double timeout_s) const;
  // Leading chunks that have not failed; of an ended load, those that are good.
  [[nodiscard]] uint64_t chunks() const;
  [[nodiscard]] LoadReason reason() const;
  // Of a set, each chunk's own; CANCELLED for one without a verdict.
  [[nodiscard]] std::vector<LoadReason> reasons() const;

 private:
  bool claim(Piece& piece) override;
  uint64_t copy(const Piece& piece) override;
  bool settle(const Piece& piece) override;
  [[nodiscard]] bool has_next() const override { return next_extent_ < plan_.extents && chunk_count_ > 0; }

  bool claim_ahead(Piece& piece);
  void end_extent();
  [[nodiscard]] uint32_t landed(uint64_t chunk) const noexcept { return plan_.index->landed_at(plan_.slots[chunk]); }
  [[nodiscard]] bool is_landed(uint32_t extent, uint64_t chunk, uint32_t landed) const;
  LoadReason copy_extent(uint32_t extent, uint64_t chunk) const;
  uint64_t copy_alone(const Piece& piece);
  [[nodiscard]] uint64_t complete_chunks() const;

  const LoadPlan plan_;
  const uint64_t chunk_count_;
  const uint64_t chunk_blocks_;
  const uint64_t piece_chunks_;
  const uint64_t extent_bytes_;

  // All guarded by lock_.
  uint32_t next_extent_ = 0;
  uint64_t next_chunk_ = 0;
  uint64_t fail_at_;
  LoadReason failure_ = LoadReason::COMPLETE;
  std::vector<uint32_t> claimed_;  // extents of each chunk that have been handed out, from extent 0 on
  std::vector<uint64_t> extent_left_;
  std::vector<uint32_t> chunk_left_;
  std::vector<LoadReason> failed_;  // of a set, why each chunk has
};

}  // namespace kvpool
