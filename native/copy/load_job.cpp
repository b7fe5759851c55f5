#include "copy/load_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/wait.h"

namespace kvpool {
namespace {

// Chunks awaited at once. The disk brings a load's chunks in their order but for what its threads, four by default, have under way.
constexpr size_t AWAITED_MAX = 8;

}  // namespace

LoadJob::LoadJob(LoadPlan plan)
    : PieceJob(plan.offsets.size() * plan.extents),
      plan_(std::move(plan)),
      chunk_count_(plan_.offsets.size()),
      chunk_blocks_(chunk_count_ == 0 ? 0 : plan_.block_ids.size() / chunk_count_),
      piece_chunks_(std::max<uint64_t>(1, PIECE_BYTES / plan_.payload_bytes)),
      extent_bytes_(plan_.map.bytes_for(plan_.payload_bytes)),
      fail_at_(chunk_count_),
      claimed_(chunk_count_),
      extent_left_(plan_.extents, chunk_count_),
      chunk_left_(chunk_count_, plan_.extents),
      failed_(plan_.is_set ? chunk_count_ : 0, LoadReason::COMPLETE) {
  KVPOOL_CHECK(plan_.generations.size() == chunk_count_);
  KVPOOL_CHECK(plan_.slots.size() == chunk_count_);
  KVPOOL_CHECK(plan_.block_ids.size() == chunk_blocks_ * chunk_count_);
  KVPOOL_CHECK(chunk_count_ == 0 || plan_.view.payload_bytes(chunk_blocks_) == plan_.payload_bytes);
}

// The next piece in the order of extents or, where that has not landed, one that has; settles on the way what lies behind a failed
// chunk.
bool LoadJob::claim(Piece& piece) {
  while (next_extent_ < plan_.extents) {
    while (next_chunk_ < fail_at_ && claimed_[next_chunk_] > next_extent_) {
      ++next_chunk_;
    }
    if (next_chunk_ >= fail_at_) {
      end_extent();
      continue;
    }
    const uint64_t wanted = std::min(next_chunk_ + piece_chunks_, fail_at_);
    uint64_t end = next_chunk_;
    while (end < wanted && claimed_[end] == next_extent_ && is_landed(next_extent_, end, landed(end))) {
      claimed_[end++] = next_extent_ + 1;
    }
    piece = {next_extent_, 1, next_chunk_, end - next_chunk_};
    next_chunk_ = end;
    return piece.count > 0 || claim_ahead(piece);  // false: blocked
  }
  changed_.notify_all();
  return false;
}

// Extents of a chunk that have landed while an earlier chunk's have not: memory works while the disk does.
bool LoadJob::claim_ahead(Piece& piece) {
  for (uint64_t chunk = 0; chunk < fail_at_; ++chunk) {
    const uint32_t extent = claimed_[chunk];
    uint32_t end = extent;
    while (end < plan_.extents && end - extent < piece_chunks_ && is_landed(end, chunk, landed(chunk))) {
      ++end;
    }
    if (end > extent) {
      claimed_[chunk] = end;
      piece = {extent, end - extent, chunk, 1};
      return true;
    }
  }
  return false;
}

// The rest of the next extent lies behind a failed chunk: nobody will copy it.
void LoadJob::end_extent() {
  for (uint64_t chunk = next_chunk_; chunk < chunk_count_; ++chunk) {
    if (claimed_[chunk] == next_extent_) {
      claimed_[chunk] = next_extent_ + 1;
      ++settled_;
      settle({next_extent_, 1, chunk, 1});
    }
  }
  if (extent_left_[next_extent_] == 0) {
    changed_.notify_all();
  }
  next_chunk_ = 0;
  ++next_extent_;
}

// Whether an extent of a chunk can be dealt with: it is there, or no more of the chunk will come. `landed`: the chunk's word.
bool LoadJob::is_landed(uint32_t extent, uint64_t chunk, uint32_t landed) const {
  return landed > plan_.map.of(extent) || plan_.index->generation_at(plan_.slots[chunk]) != plan_.generations[chunk];
}

// In the order in which the disk brings them: the chunk whose turn it is, and those behind it.
bool LoadJob::name_awaited(LandingWait& wait) const {
  const std::lock_guard guard(lock_);
  if (cancelled_) {
    return false;
  }
  size_t named = 0;
  for (uint64_t step = 0; step < fail_at_ && named < AWAITED_MAX; ++step) {
    const uint64_t chunk = (next_chunk_ + step) % fail_at_;
    const uint32_t extent = claimed_[chunk];
    if (extent == plan_.extents) {
      continue;
    }
    const uint32_t seen = landed(chunk);
    if (is_landed(extent, chunk, seen)) {
      return false;
    }
    wait.add(plan_.index, plan_.slots[chunk], seen);
    ++named;
  }
  return named > 0;
}

uint64_t LoadJob::copy(const Piece& piece) {
  if (plan_.is_set) {
    return copy_alone(piece);
  }
  const uint64_t units = piece.extents * piece.count;
  uint64_t good = 0;
  LoadReason failure = LoadReason::COMPLETE;
  while (good < units && failure == LoadReason::COMPLETE) {
    failure = piece.count > 1 ? copy_extent(piece.extent, piece.first + good)
                              : copy_extent(piece.extent + static_cast<uint32_t>(good), piece.first);
    good += failure == LoadReason::COMPLETE ? 1 : 0;
  }
  if (failure == LoadReason::COMPLETE) {
    return good * plan_.payload_bytes;
  }
  const std::lock_guard guard(lock_);
  const uint64_t failed = piece.count > 1 ? piece.first + good : piece.first;
  if (failed < fail_at_) {
    fail_at_ = failed;
    failure_ = failure;
  }
  return (good + 1) * plan_.payload_bytes;
}

uint64_t LoadJob::copy_alone(const Piece& piece) {
  for (uint64_t unit = 0; unit < piece.extents * piece.count; ++unit) {
    const uint64_t chunk = piece.count > 1 ? piece.first + unit : piece.first;
    const uint32_t extent = piece.extent + static_cast<uint32_t>(piece.count > 1 ? 0 : unit);
    const LoadReason failure = copy_extent(extent, chunk);
    if (failure != LoadReason::COMPLETE) {
      const std::lock_guard guard(lock_);
      failed_[chunk] = failed_[chunk] == LoadReason::COMPLETE ? failure : failed_[chunk];
    }
  }
  return piece.extents * piece.count * plan_.payload_bytes;
}

LoadReason LoadJob::copy_extent(uint32_t own, uint64_t chunk) const {
  const SlotAddress slot = plan_.slots[chunk];
  if (plan_.index->generation_at(slot) != plan_.generations[chunk]) {
    return LoadReason::GONE;  // before the engine's blocks are written to
  }
  const uint32_t number = plan_.map.of(own);
  const uint8_t* extent = plan_.arena->data() + plan_.offsets[chunk] + number * extent_bytes_;
  const std::span<const int64_t> ids(plan_.block_ids.data() + chunk * chunk_blocks_, chunk_blocks_);
  const uint32_t crc = scatter_extent(plan_.view, own, ids, extent, extent_bytes_);
  const uint32_t expected = plan_.index->checksum_at(slot, number);
  const uint32_t seen = landed(chunk);
  // The bytes were read before the checksum (scatter_extent ends in a fence) and the checksum, with acquire, before the
  // generation: if that still stands, all of them were this chunk's.
  if (plan_.index->generation_at(slot) != plan_.generations[chunk]) {
    return LoadReason::GONE;
  }
  if ((seen & LANDING_FAILED) != 0 || seen <= number) {
    return LoadReason::IO;
  }
  return !plan_.verifies || crc == expected ? LoadReason::COMPLETE : LoadReason::CHECKSUM;
}

// The end of an extent is waited for.
bool LoadJob::settle(const Piece& piece) {
  bool ends_extent = false;
  for (uint32_t extent = piece.extent; extent < piece.extent + piece.extents; ++extent) {
    extent_left_[extent] -= piece.count;
    ends_extent = ends_extent || extent_left_[extent] == 0;
  }
  for (uint64_t chunk = piece.first; chunk < piece.first + piece.count; ++chunk) {
    chunk_left_[chunk] -= piece.extents;
  }
  return ends_extent;
}

ExtentState LoadJob::wait_extent(uint32_t extent, double timeout_s) const {
  KVPOOL_CHECK(extent < plan_.extents);
  std::unique_lock guard(lock_);
  const bool settled = wait_for(changed_, guard, timeout_s, [&] { return extent_left_[extent] == 0 || is_at_rest(); });
  if (!settled) {
    return ExtentState::TIMED_OUT;
  }
  return extent_left_[extent] == 0 && fail_at_ > 0 ? ExtentState::IN_PLACE : ExtentState::ENDED;
}

uint64_t LoadJob::chunks() const {
  const std::lock_guard guard(lock_);
  return is_at_rest() ? complete_chunks() : fail_at_;
}

LoadReason LoadJob::reason() const {
  const std::lock_guard guard(lock_);
  return cancelled_ && complete_chunks() < fail_at_ ? LoadReason::CANCELLED : failure_;
}

std::vector<LoadReason> LoadJob::reasons() const {
  const std::lock_guard guard(lock_);
  std::vector<LoadReason> found = failed_;
  for (size_t chunk = 0; chunk < found.size(); ++chunk) {
    if (found[chunk] == LoadReason::COMPLETE && chunk_left_[chunk] > 0) {
      found[chunk] = LoadReason::CANCELLED;
    }
  }
  return found;
}

uint64_t LoadJob::complete_chunks() const {
  const auto unfinished = std::find_if(chunk_left_.begin(), chunk_left_.end(), [](uint32_t left) { return left > 0; });
  return std::min(fail_at_, static_cast<uint64_t>(unfinished - chunk_left_.begin()));
}

}  // namespace kvpool
