#include "copy/copy_pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

// How long a thread waits for bytes on their way before it looks whether other work has come.
constexpr double BLOCKED_WAIT_S = 1e-3;

}  // namespace

bool CopyQueue::add(std::shared_ptr<CopyJob> job) {
  const bool is_load = job->is_load();
  {
    const std::lock_guard guard(lock_);
    if (stopped_) {
      return false;
    }
    (is_load ? loads_ : saves_).push_back(std::move(job));
    waiting_loads_.store(loads_.size(), std::memory_order_relaxed);
  }
  wake_.notify_all();
  return true;
}

// The job to work on, which stays queued until it has nothing more to hand out; nothing when stopped. `blocked`: how many
// loads in a row had nothing to hand out yet; when that is all of them a save may go first.
std::shared_ptr<CopyJob> CopyQueue::next(size_t blocked) {
  std::unique_lock guard(lock_);
  wake_.wait(guard, [this] { return stopped_ || !loads_.empty() || !saves_.empty(); });
  if (stopped_) {
    return nullptr;
  }
  const bool has_ready_load = blocked < loads_.size();
  return has_ready_load || saves_.empty() ? loads_.front() : saves_.front();
}

void CopyQueue::run() {
  size_t blocked = 0;
  LandingWait wait;
  while (const std::shared_ptr<CopyJob> job = next(blocked)) {
    uint64_t copied = 0;
    do {
      copied = job->run_piece();
      bytes_copied_.fetch_add(copied, std::memory_order_relaxed);
    } while (copied > 0 && (job->is_load() || !has_load()));
    if (copied > 0) {
      blocked = 0;
    } else if (retire_or_rotate(job, blocked) && name_awaited(wait)) {
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

// Takes a job out that has nothing more to hand out, or lets the next load try. True when there is nothing to do but wait.
bool CopyQueue::retire_or_rotate(const std::shared_ptr<CopyJob>& job, size_t& blocked) {
  const std::lock_guard guard(lock_);
  auto& queue = job->is_load() ? loads_ : saves_;
  // Another thread may have taken it out. A piece that was announced meanwhile keeps it in.
  const bool is_front = !queue.empty() && queue.front() == job;
  if (is_front && !job->has_pieces()) {
    queue.pop_front();
    waiting_loads_.store(loads_.size(), std::memory_order_relaxed);
    blocked = 0;
    return false;
  }
  if (is_front && job->is_load()) {
    queue.pop_front();
    queue.push_back(job);
    ++blocked;
  }
  return job->is_load() && blocked >= loads_.size() && saves_.empty();
}

CopyPool::CopyPool(unsigned threads) : queue_(std::make_shared<CopyQueue>()) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned i = 0; i < threads; ++i) {
      threads_.emplace_back([queue = queue_] { queue->run(); });
      pthread_setname_np(threads_.back().native_handle(), "kvpool-copy");
    }
  } catch (...) {
    stop();
    throw;
  }
}

CopyPool::~CopyPool() { stop(); }

void CopyPool::stop() {
  if (process_life() != life_) {
    // The threads stayed in the parent, so their handles name nothing and are left alone.
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    threads_.clear();
    return;
  }
  std::deque<std::shared_ptr<CopyJob>> dropped;
  {
    const std::lock_guard guard(queue_->lock_);
    queue_->stopped_ = true;
    dropped.swap(queue_->loads_);
    dropped.insert(dropped.end(), queue_->saves_.begin(), queue_->saves_.end());
    queue_->saves_.clear();
  }
  queue_->wake_.notify_all();
  for (const auto& job : dropped) {
    job->cancel();
  }
  const double seconds = cpu_seconds();
  std::vector<std::thread> ended;
  {
    const std::lock_guard guard(threads_lock_);
    ended.swap(threads_);
    stopped_cpu_seconds_ = seconds;
  }
  for (std::thread& thread : ended) {
    thread.join();
  }
}

double CopyPool::cpu_seconds() const {
  const std::lock_guard guard(threads_lock_);
  double total = stopped_cpu_seconds_;
  for (const std::thread& thread : threads_) {
    clockid_t clock;
    timespec used;
    // The handle is only read: the library declares it writable.
    if (pthread_getcpuclockid(const_cast<std::thread&>(thread).native_handle(), &clock) == 0 &&
        clock_gettime(clock, &used) == 0) {
      total += static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
    }
  }
  return total;
}

}  // namespace kvpool
