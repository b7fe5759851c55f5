#include "copy/save_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/wait.h"

namespace kvpool {

SaveJob::SaveJob(SavePlan plan)
    : plan_(std::move(plan)),
      chunk_count_(plan_.offsets.size()),
      chunk_blocks_(chunk_count_ == 0 ? 0 : plan_.block_ids.size() / chunk_count_),
      piece_chunks_(std::max<uint64_t>(1, PIECE_BYTES / plan_.layer_bytes)),
      extent_bytes_(plan_.extents.bytes_for(plan_.layer_bytes)),
      is_announced_(plan_.layers, false),
      settled_chunks_(plan_.layers),
      checksums_(chunk_count_ * plan_.layers) {
  KVPOOL_CHECK(plan_.block_ids.size() == chunk_blocks_ * chunk_count_);
  KVPOOL_CHECK(chunk_count_ == 0 || plan_.view.layer_bytes(chunk_blocks_) == plan_.layer_bytes);
  announced_.reserve(plan_.layers);
}

uint64_t SaveJob::run_piece() {
  uint32_t layer = 0;
  uint64_t first = 0;
  uint64_t count = 0;
  {
    const std::lock_guard guard(lock_);
    if (cancelled_ || next_announced_ == announced_.size() || chunk_count_ == 0) {
      return 0;
    }
    layer = announced_[next_announced_];
    first = next_chunk_;
    count = std::min(piece_chunks_, chunk_count_ - first);
    next_chunk_ += count;
    if (next_chunk_ == chunk_count_) {
      next_chunk_ = 0;
      ++next_announced_;
    }
    ++running_;
  }
  for (uint64_t chunk = first; chunk < first + count; ++chunk) {
    uint8_t* extent = plan_.arena->data() + plan_.offsets[chunk] + plan_.extents.of(layer) * extent_bytes_;
    const std::span<const int64_t> ids(plan_.block_ids.data() + chunk * chunk_blocks_, chunk_blocks_);
    checksums_[chunk * plan_.layers + layer] =
        gather_extent(plan_.view, plan_.first_layer + layer, ids, extent, extent_bytes_);
  }
  const std::lock_guard guard(lock_);
  KVPOOL_CHECK(running_ > 0);
  --running_;
  settled_ += count;
  settled_chunks_[layer] += count;
  while (copied_layers_ < plan_.layers && settled_chunks_[copied_layers_] == chunk_count_) {
    ++copied_layers_;
  }
  if (is_at_rest()) {
    changed_.notify_all();
  }
  return count * plan_.layer_bytes;
}

bool SaveJob::has_pieces() const {
  const std::lock_guard guard(lock_);
  return !cancelled_ && next_announced_ < announced_.size() && chunk_count_ > 0;
}

void SaveJob::cancel() {
  if (is_inherited()) {
    return;
  }
  std::unique_lock guard(lock_);
  cancelled_ = true;
  changed_.notify_all();
  changed_.wait(guard, [this] { return running_ == 0; });
}

bool SaveJob::announce(uint32_t layer) {
  KVPOOL_CHECK(layer < plan_.layers);
  const std::lock_guard guard(lock_);
  if (is_announced_[layer]) {
    return false;
  }
  is_announced_[layer] = true;
  announced_.push_back(layer);
  return true;
}

bool SaveJob::wait(double timeout_s) const {
  std::unique_lock guard(lock_);
  return wait_for(changed_, guard, timeout_s, [this] { return is_at_rest(); });
}

bool SaveJob::is_cancelled() const {
  const std::lock_guard guard(lock_);
  return cancelled_;
}

uint64_t SaveJob::progress() const {
  const std::lock_guard guard(lock_);
  return settled_;
}

std::vector<uint32_t> SaveJob::checksums() const {
  const std::lock_guard guard(lock_);
  const bool is_whole = announced_.size() == plan_.layers && running_ == 0 && has_copied_announced();
  return is_whole ? checksums_ : std::vector<uint32_t>();
}

uint32_t SaveJob::copied_layers() const {
  const std::lock_guard guard(lock_);
  return copied_layers_;
}

std::vector<uint32_t> SaveJob::checksums_from(uint32_t first) const {
  const std::lock_guard guard(lock_);
  std::vector<uint32_t> found;
  for (uint64_t chunk = 0; chunk < chunk_count_ && first < copied_layers_; ++chunk) {
    const auto start = checksums_.begin() + static_cast<std::ptrdiff_t>(chunk * plan_.layers);
    found.insert(found.end(), start + first, start + copied_layers_);
  }
  return found;
}

}  // namespace kvpool
