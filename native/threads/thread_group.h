// Threads that end together: those of one queue, pool or server, joined within a time.
//
// What it is: a count of the threads that have not ended, and a wait for the last of them. What it is not: their work, or the notice
// that has them end: the owner gives both. In a forked child, which has none of the threads, nothing waits for them.
// Threads: `add` and `join` one at a time; the rest any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/process_life.h"

namespace kvpool {

class ThreadGroup {
 public:
  static constexpr std::chrono::milliseconds FOR_GOOD = std::chrono::milliseconds::max();

  // `name`: of each thread, for who looks at the process; 15 characters at most.
  explicit ThreadGroup(const char* name) noexcept : name_(name) {}
  // REQUIRES: all have ended, and were joined.
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // Throws std::system_error where there is no further thread to be had; those before go on.
  void add(std::function<void()> work);
  // False where one has not ended within the time; another call goes on waiting.
  [[nodiscard]] bool join(std::chrono::milliseconds timeout);
  // Gives up waiting: each thread frees what is its own when it ends. REQUIRES: the group and all that they use stay for ever.
  void detach();

  [[nodiscard]] bool is_inherited() const noexcept { return process_life() != life_; }
  // CPU time that the threads have used, also after they were joined.
  [[nodiscard]] double cpu_seconds() const;

 private:
  [[nodiscard]] double count_cpu_seconds() const;

  const uint32_t life_ = process_life();
  const char* const name_;
  mutable std::mutex lock_;
  std::condition_variable ended_;
  size_t running_ = 0;                // guarded by lock_
  double joined_cpu_seconds_ = 0;     // guarded by lock_
  std::vector<std::thread> threads_;  // guarded by lock_
};

}  // namespace kvpool
