// Threads that end together: those of one queue or server, joined within a time.
//
// What it is: a count of the threads that have not ended, and a wait for the last of them. What it is not: their work, or the notice
// that has them end: the owner gives both.
// Threads: `add` and `join` one at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

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

 private:
  const char* const name_;
  std::mutex lock_;
  std::condition_variable ended_;
  size_t running_ = 0;  // guarded by lock_
  std::vector<std::thread> threads_;
};

}  // namespace kvpool
