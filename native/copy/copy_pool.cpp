#include "copy/copy_pool.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

// How long a thread waits for bytes on their way before it looks whether other work has come.
constexpr double BLOCKED_WAIT_S = 1e-3;
// Turns of other loads after which one that had nothing to hand out is tried again. A try looks at each of its chunks, and so many
// pieces take about a millisecond. A guess.
constexpr uint64_t BLOCKED_TURNS = 16;

uint64_t thread_cpu_ns() noexcept {
  timespec used{};
  return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0
             ? static_cast<uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(used.tv_nsec)
             : 0;
}

}  // namespace

bool CopyQueue::add(std::shared_ptr<CopyJob> job) {
  {
    const std::lock_guard guard(lock_);
    if (stopped_) {
      return false;
    }
    const auto& queue = job->is_load() ? loads_ : saves_;
    if (std::find(queue.begin(), queue.end(), job) == queue.end()) {
      enqueue(std::move(job));
    }
    count_waiting();
  }
  wake_.notify_all();
  return true;
}

bool CopyQueue::copy_here(CopyJob& job) {
  {
    const std::lock_guard guard(lock_);
    if (stopped_) {
      return false;
    }
  }
  const uint64_t begun_ns = thread_cpu_ns();
  while (const uint64_t copied = job.run_piece()) {
    bytes_copied_.fetch_add(copied, std::memory_order_relaxed);
  }
  here_cpu_ns_.fetch_add(thread_cpu_ns() - begun_ns, std::memory_order_relaxed);
  return true;
}

void CopyQueue::enqueue(std::shared_ptr<CopyJob> job) {
  if (job->is_load()) {
    loads_.insert(loads_.end() - static_cast<std::ptrdiff_t>(blocked_), std::move(job));
  } else {
    saves_.push_back(std::move(job));
  }
}

void CopyQueue::count_waiting() { waiting_.store(loads_.size() + saves_.size(), std::memory_order_relaxed); }

// The job whose turn it is, which stays queued until it has nothing more to hand out; nothing when stopped. A save's turn comes
// when no load is queued, or none had anything to hand out yet.
std::shared_ptr<CopyJob> CopyQueue::next() {
  std::unique_lock guard(lock_);
  wake_.wait(guard, [this] { return stopped_ || !loads_.empty() || !saves_.empty(); });
  if (stopped_) {
    return nullptr;
  }
  const bool has_ready_load = blocked_ < loads_.size();
  return has_ready_load || saves_.empty() ? loads_.front() : saves_.front();
}

void CopyQueue::run() {
  LandingWait wait;
  while (const std::shared_ptr<CopyJob> job = next()) {
    uint64_t copied = 0;
    do {
      copied = job->run_piece();
      bytes_copied_.fetch_add(copied, std::memory_order_relaxed);
    } while (copied > 0 && is_alone());
    if (end_turn(job, copied > 0) && name_awaited(wait)) {
      wait.wait(BLOCKED_WAIT_S);
    }
    wait.clear();
  }
}

// What all the loads wait for. False where one of them need not, or there is none.
bool CopyQueue::name_awaited(LandingWait& wait) {
  const std::lock_guard guard(lock_);
  return !loads_.empty() &&
         std::all_of(loads_.begin(), loads_.end(), [&](const auto& job) { return wait.is_full() || job->name_awaited(wait); });
}

// The next job's turn comes; a job that has nothing more to hand out is taken out. True when there is nothing to do but wait.
bool CopyQueue::end_turn(const std::shared_ptr<CopyJob>& job, bool has_copied) {
  const std::lock_guard guard(lock_);
  if (has_copied && (!job->is_load() || ++turns_ % BLOCKED_TURNS == 0)) {
    blocked_ = 0;
  }
  auto& queue = job->is_load() ? loads_ : saves_;
  // Another thread may have ended the turn, or taken the job out.
  if (!queue.empty() && queue.front() == job) {
    queue.pop_front();
    blocked_ = std::min(blocked_, loads_.size());
    if (!job->has_pieces()) {  // a piece that was announced meanwhile keeps it in
      count_waiting();
    } else if (has_copied) {
      enqueue(job);
    } else {
      queue.push_back(job);
      blocked_ += size_t{job->is_load()};
    }
  }
  return !has_copied && job->is_load() && blocked_ >= loads_.size() && saves_.empty();
}

std::deque<std::shared_ptr<CopyJob>> CopyQueue::stop() {
  std::deque<std::shared_ptr<CopyJob>> dropped;
  {
    const std::lock_guard guard(lock_);
    stopped_ = true;
    dropped.swap(loads_);
    dropped.insert(dropped.end(), saves_.begin(), saves_.end());
    saves_.clear();
  }
  wake_.notify_all();
  return dropped;
}

CopyPool::CopyPool(unsigned threads) : queue_(std::make_shared<CopyQueue>()) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned i = 0; i < threads; ++i) {
      threads_.add([queue = queue_] { queue->run(); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

void CopyPool::stop() {
  if (threads_.is_inherited()) {
    return;
  }
  for (const auto& job : queue_->stop()) {
    job->cancel();
  }
  static_cast<void>(threads_.join(ThreadGroup::FOR_GOOD));
}

}  // namespace kvpool
