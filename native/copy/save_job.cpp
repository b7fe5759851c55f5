#include "copy/save_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

// What is copied in about the time that it takes to wake a thread and to be woken by it: 40 us and more.
constexpr uint64_t HERE_BYTES_MAX = 256 << 10;

}  // namespace

SaveJob::SaveJob(SavePlan plan)
    : PieceJob(0),  // nothing is announced
      plan_(std::move(plan)),
      chunk_count_(plan_.offsets.size()),
      chunk_blocks_(chunk_count_ == 0 ? 0 : plan_.block_ids.size() / chunk_count_),
      piece_chunks_(std::max<uint64_t>(1, PIECE_BYTES / plan_.payload_bytes)),
      extent_bytes_(plan_.map.bytes_for(plan_.payload_bytes)),
      is_announced_(plan_.extents, false),
      settled_chunks_(plan_.extents),
      checksums_(chunk_count_ * plan_.extents) {
  KVPOOL_CHECK(plan_.block_ids.size() == chunk_blocks_ * chunk_count_);
  KVPOOL_CHECK(chunk_count_ == 0 || plan_.view.payload_bytes(chunk_blocks_) == plan_.payload_bytes);
  announced_.reserve(plan_.extents);
}

bool SaveJob::claim(Piece& piece) {
  if (!has_next()) {
    return false;
  }
  piece = {announced_[next_announced_], 1, next_chunk_, std::min(piece_chunks_, chunk_count_ - next_chunk_)};
  next_chunk_ += piece.count;
  if (next_chunk_ == chunk_count_) {
    next_chunk_ = 0;
    ++next_announced_;
  }
  return true;
}

uint64_t SaveJob::copy(const Piece& piece) {
  const uint32_t own = piece.extent;
  for (uint64_t chunk = piece.first; chunk < piece.first + piece.count; ++chunk) {
    uint8_t* extent = plan_.arena->data() + plan_.offsets[chunk] + plan_.map.of(own) * extent_bytes_;
    const std::span<const int64_t> ids(plan_.block_ids.data() + chunk * chunk_blocks_, chunk_blocks_);
    checksums_[chunk * plan_.extents + own] =
        gather_extent(plan_.view, plan_.first_extent + own, ids, extent, extent_bytes_);
  }
  return piece.count * plan_.payload_bytes;
}

bool SaveJob::settle(const Piece& piece) {
  settled_chunks_[piece.extent] += piece.count;
  while (copied_extents_ < plan_.extents && settled_chunks_[copied_extents_] == chunk_count_) {
    ++copied_extents_;
  }
  return false;
}

bool SaveJob::announce(uint32_t extent) {
  KVPOOL_CHECK(extent < plan_.extents);
  const std::lock_guard guard(lock_);
  if (is_announced_[extent]) {
    return false;
  }
  is_announced_[extent] = true;
  announced_.push_back(extent);
  wanted_ += chunk_count_;
  return true;
}

uint64_t SaveJob::announce_rest() {
  const std::lock_guard guard(lock_);
  for (uint32_t extent = 0; extent < plan_.extents; ++extent) {
    if (!is_announced_[extent]) {
      is_announced_[extent] = true;
      announced_.push_back(extent);
      wanted_ += chunk_count_;
    }
  }
  return (wanted_ - settled_) * plan_.payload_bytes;
}

void copy_rest(const std::shared_ptr<SaveJob>& job, CopyQueue& queue) {
  const uint64_t bytes = job->announce_rest();
  if (bytes == 0) {
    return;
  }
  if (!(bytes <= HERE_BYTES_MAX ? queue.copy_here(*job) : queue.add(job))) {
    job->cancel();
  }
}

std::vector<uint32_t> SaveJob::checksums() const {
  const std::lock_guard guard(lock_);
  const bool is_saved = announced_.size() == plan_.extents && running_ == 0 && is_whole();
  return is_saved ? checksums_ : std::vector<uint32_t>();
}

uint32_t SaveJob::copied_extents() const {
  const std::lock_guard guard(lock_);
  return copied_extents_;
}

std::vector<uint32_t> SaveJob::checksums_from(uint32_t first) const {
  const std::lock_guard guard(lock_);
  std::vector<uint32_t> found;
  for (uint64_t chunk = 0; chunk < chunk_count_ && first < copied_extents_; ++chunk) {
    const auto start = checksums_.begin() + static_cast<std::ptrdiff_t>(chunk * plan_.extents);
    found.insert(found.end(), start + first, start + copied_extents_);
  }
  return found;
}

}  // namespace kvpool
