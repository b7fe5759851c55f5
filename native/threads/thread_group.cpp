#include "threads/thread_group.h"

#include <pthread.h>

#include <utility>

#include "base/check.h"

namespace kvpool {

ThreadGroup::~ThreadGroup() {
  for (const std::thread& thread : threads_) {
    KVPOOL_CHECK(!thread.joinable());
  }
}

void ThreadGroup::add(std::function<void()> work) {
  {
    const std::lock_guard guard(lock_);
    ++running_;
  }
  const auto end = [this] {
    const std::lock_guard guard(lock_);
    --running_;
    ended_.notify_all();
  };
  try {
    threads_.emplace_back([end, work = std::move(work)] {
      work();
      end();
    });
  } catch (...) {
    end();
    throw;
  }
  pthread_setname_np(threads_.back().native_handle(), name_);
}

bool ThreadGroup::join(std::chrono::milliseconds timeout) {
  {
    std::unique_lock guard(lock_);
    const auto have_ended = [this] { return running_ == 0; };
    if (timeout == FOR_GOOD) {
      ended_.wait(guard, have_ended);
    } else if (!ended_.wait_for(guard, timeout, have_ended)) {
      return false;
    }
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
  return true;
}

void ThreadGroup::detach() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.detach();
    }
  }
}

}  // namespace kvpool
