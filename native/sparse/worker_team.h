// A small team that works on one thing at a time: the caller and some threads, forked and joined in a microsecond or two.
//
// Guarantees:
// 1. `run` calls the function once for each part, on whichever threads come, and returns when all have returned.
// 2. It waits for nobody who has not begun: where the threads get no processor, the caller does all parts alone.
// 3. A thread without work spins briefly, then sleeps. The destructor stops and joins all.
// 4. In a forked child, which has none of the threads, the caller works alone.
// What it is not: a queue. Calls of `run` from several threads go one after the other.
//
// Threads: any, but for the destructor.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "threads/thread_group.h"

namespace kvpool {

class WorkerTeam {
 public:
  // `threads`: with the caller. REQUIRES: threads > 0. Throws std::system_error where the system has no more threads to give.
  explicit WorkerTeam(unsigned threads);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  [[nodiscard]] unsigned threads() const noexcept { return team_; }

  // Calls work(part) for part in 0..parts-1. REQUIRES: `work` does not throw, and does not call `run`.
  template <typename Work>
  void run(uint32_t parts, const Work& work) {
    run_parts(parts, [](const void* closure, uint32_t part) { (*static_cast<const Work*>(closure))(part); }, &work);
  }

 private:
  using Function = void (*)(const void* closure, uint32_t part);
  static constexpr uint32_t OPEN = 1U << 31;

  void run_parts(uint32_t parts, Function function, const void* closure);
  void work_on() noexcept;
  void serve() noexcept;
  void join_round() noexcept;
  void stop();

  const unsigned team_;  // with the caller
  std::mutex run_lock_;
  // The round under way: written while nobody is inside, read by those who are.
  Function function_ = nullptr;
  const void* closure_ = nullptr;
  uint32_t parts_ = 0;
  alignas(64) std::atomic<uint32_t> next_ = 0;
  alignas(64) std::atomic<uint32_t> inside_ = 0;  // threads that work on the round; OPEN while more may come
  alignas(64) std::atomic<uint32_t> round_ = 0;   // what idle threads watch
  std::atomic<bool> stops_ = false;
  ThreadGroup threads_{"kvpool-sparse"};
};

}  // namespace kvpool
