#include "ssd/ring_setup.h"

#include <cerrno>
#include <mutex>

namespace kvpool {
namespace {

// Rings are made and ended one at a time: memory that one gives back may be the next one's at once, in another thread, and
// the kernel's part in that is seen by no sanitizer.
std::mutex making;

}  // namespace

// Later kernels know that one thread alone submits, and do their part when it waits instead of interrupting it.
int open_ring(io_uring& ring, unsigned entries) noexcept {
  const std::lock_guard guard(making);
  int error = -EINVAL;
  for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
    if (error == -EINVAL) {
      error = io_uring_queue_init(entries, &ring, flags);
    }
  }
  if (error == 0 && (ring.features & IORING_FEAT_RW_CUR_POS) == 0) {  // as old as plain reads and writes, Linux 5.6
    io_uring_queue_exit(&ring);
    error = -ENOSYS;
  }
  return -error;
}

// Whether the ring really works: a filter may let it be made and refuse its use.
int try_ring(io_uring& ring) noexcept {
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  int submitted = -EINTR;
  while (submitted == -EINTR) {
    submitted = io_uring_submit_and_wait(&ring, 1);
  }
  io_uring_cqe* completed = nullptr;
  if (submitted < 0 || io_uring_peek_cqe(&ring, &completed) != 0) {
    return submitted < 0 ? -submitted : EIO;
  }
  const int error = -completed->res;
  io_uring_cqe_seen(&ring, completed);
  return error;
}

void close_ring(io_uring& ring) noexcept {
  const std::lock_guard guard(making);
  io_uring_queue_exit(&ring);
}

}  // namespace kvpool
