// The threads that copy chunks of other daemons of this host into the arena, and the line before them.
//
// Guarantees:
// 1. Every chunk of an accepted job is reported exactly once; after that nothing is written to its slot. A job that waits beyond its
//    deadline ends when its turn comes: those before it wait for nothing but memory.
// 2. A job takes a thread for each of its parts, in the order of jobs.
// 3. The line is bounded: a full one refuses. `stop` ends the jobs; no byte is copied when it returns true.
// 4. The owner's memory stays mapped until the last thread has left it, whatever becomes of the owner.
//
// Threads: any. The lock is not held while bytes are copied.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "near/near_copier.h"
#include "threads/thread_group.h"

namespace kvpool {

struct NearQueueStats {
  uint64_t jobs = 0;
  uint64_t copied_bytes = 0;
};

class NearQueue {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where there are no threads or descriptors to be had.
  NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max);
  ~NearQueue();
  NearQueue(const NearQueue&) = delete;
  NearQueue& operator=(const NearQueue&) = delete;

  // A job's number; 0 where the line is full or the queue stopped. REQUIRES: 1 part at least, at most one a chunk; see NearCopier;
  // every chunk into a slot of its own where no extent has landed.
  [[nodiscard]] uint64_t pull(NearPlan plan);
  // Ends what has not ended of a job as CANCELLED; reported like any end. False where it has ended, or never was.
  bool cancel(uint64_t job);

  // What has ended since the last call, the first `limit` of it. The descriptor is readable while there is something.
  [[nodiscard]] std::vector<PullOutcome> take_outcomes(size_t limit = SIZE_MAX);
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }

  // False where a thread has not ended within the time; another call goes on waiting. The destructor waits for good.
  bool stop(std::chrono::milliseconds timeout);

  [[nodiscard]] NearQueueStats stats() const;
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 private:
  struct Job {
    Job(uint64_t number, NearPlan planned, size_t chunks) : id(number), plan(std::move(planned)), chunks_left(chunks) {}
    const uint64_t id;
    const NearPlan plan;
    const StreamClock::time_point begun = StreamClock::now();
    size_t chunks_left;  // that were not reported; guarded by the queue's lock
    std::atomic<bool> has_ended = false;
  };
  struct Task {
    std::shared_ptr<Job> job;
    uint32_t part;
  };
  void run_tasks();
  void run(const Task& task);
  void report(Job& job, PullOutcome outcome, std::chrono::microseconds waited);

  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  const size_t jobs_max_;
  const int event_fd_;  // owned

  mutable std::mutex lock_;
  std::condition_variable wake_;
  std::deque<Task> line_;                          // guarded by lock_
  std::map<uint64_t, std::shared_ptr<Job>> jobs_;  // those with ends to come; guarded by lock_
  uint64_t last_job_ = 0;                          // guarded by lock_
  bool is_stopped_ = false;                        // guarded by lock_
  std::vector<PullOutcome> outcomes_;              // guarded by lock_
  uint64_t copied_bytes_ = 0;                      // guarded by lock_
  ThreadGroup threads_{"kvpool-near"};
};

}  // namespace kvpool
