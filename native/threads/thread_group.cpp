#include "threads/thread_group.h"

#include <pthread.h>
#include <time.h>

#include <utility>

#include "base/check.h"

namespace kvpool {

ThreadGroup::~ThreadGroup() {
  if (is_inherited()) {
    // The threads stayed in the parent, so their handles name nothing and are left alone.
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
  }
  for (const std::thread& thread : threads_) {
    KVPOOL_CHECK(!thread.joinable());
  }
}

void ThreadGroup::add(std::function<void()> work) {
  const std::lock_guard guard(lock_);
  threads_.emplace_back([this, work = std::move(work)] {
    work();
    const std::lock_guard ending(lock_);
    --running_;
    ended_.notify_all();
  });
  ++running_;
  pthread_setname_np(threads_.back().native_handle(), name_);
}

bool ThreadGroup::join(std::chrono::milliseconds timeout) {
  if (is_inherited()) {
    return true;
  }
  std::vector<std::thread> ended;
  {
    std::unique_lock guard(lock_);
    const auto have_ended = [this] { return running_ == 0; };
    if (timeout == FOR_GOOD) {
      ended_.wait(guard, have_ended);
    } else if (!ended_.wait_for(guard, timeout, have_ended)) {
      return false;
    }
    joined_cpu_seconds_ = count_cpu_seconds();
    ended.swap(threads_);
  }
  for (std::thread& thread : ended) {
    thread.join();
  }
  return true;
}

void ThreadGroup::detach() {
  const std::lock_guard guard(lock_);
  for (std::thread& thread : threads_) {
    thread.detach();
  }
}

double ThreadGroup::cpu_seconds() const {
  const std::lock_guard guard(lock_);
  return count_cpu_seconds();
}

// REQUIRES: `lock_` is held.
double ThreadGroup::count_cpu_seconds() const {
  double total = joined_cpu_seconds_;
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
