#include "copy/piece_job.h"

#include "base/check.h"
#include "base/wait.h"

namespace kvpool {

uint64_t PieceJob::run_piece() {
  Piece piece{};
  {
    const std::lock_guard guard(lock_);
    if (cancelled_ || !claim(piece)) {
      return 0;
    }
    ++running_;
  }
  const uint64_t bytes = copy(piece);
  const std::lock_guard guard(lock_);
  KVPOOL_CHECK(running_ > 0);
  --running_;
  settled_ += piece.extents * piece.count;
  if (settle(piece) || is_at_rest()) {
    changed_.notify_all();
  }
  return bytes;
}

bool PieceJob::has_pieces() const {
  const std::lock_guard guard(lock_);
  return !cancelled_ && has_next();
}

void PieceJob::cancel() {
  if (is_inherited()) {
    return;
  }
  std::unique_lock guard(lock_);
  cancelled_ = true;
  changed_.notify_all();
  changed_.wait(guard, [this] { return running_ == 0; });
}

bool PieceJob::wait(double timeout_s) const {
  std::unique_lock guard(lock_);
  return wait_for(changed_, guard, timeout_s, [this] { return is_at_rest(); });
}

bool PieceJob::is_done() const {
  const std::lock_guard guard(lock_);
  return is_at_rest();
}

bool PieceJob::is_cancelled() const {
  const std::lock_guard guard(lock_);
  return cancelled_;
}

uint64_t PieceJob::progress() const {
  const std::lock_guard guard(lock_);
  return settled_;
}

}  // namespace kvpool
