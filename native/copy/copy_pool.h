// Threads that copy for one client, and the queue they share with their jobs.
//
// Guarantees:
// 1. Load jobs go before save jobs; a save under way yields between pieces. Equals take turns of a piece for each thread, in the
//    order in which they came, so that a small job is not behind all of a big one. A load whose bytes are still on their way to
//    the arena lets others through.
// 2. Several threads may work on one job; a job hands out each of its pieces once.
// 3. `stop` lets running pieces finish, cancels queued jobs and joins the threads. What comes later is cancelled at once,
//    so nobody waits for a job that no thread will run.
// 4. A queued job is kept alive by the queue, a running one by its thread.
// 5. In a forked child, which has none of the threads, `stop` and a job's `cancel` return at once.
// 6. Who has little to copy may copy it itself (`copy_here`): to wake a thread, and be woken, takes longer.
//
// Threads: any. Lock order: the queue's lock, then a job's; a job never calls the queue with its own lock held.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "shared_index/landing_wait.h"
#include "threads/thread_group.h"

namespace kvpool {

// Something with pieces to copy.
class CopyJob {
 public:
  virtual ~CopyJob() = default;

  // Copies one piece and returns its bytes; 0 when there is none to hand out now.
  virtual uint64_t run_piece() = 0;
  // Whether there are more to hand out, now or later.
  [[nodiscard]] virtual bool has_pieces() const = 0;
  // Adds the landings after which there is a piece to hand out. False where there may be one already, or never will be.
  [[nodiscard]] virtual bool name_awaited(LandingWait&) const { return false; }
  virtual void cancel() = 0;
  [[nodiscard]] virtual bool is_load() const noexcept = 0;
};

class CopyQueue {
 public:
  // Has the threads look at the job; one that is queued keeps its turn. False when stopped; then the caller cancels it.
  [[nodiscard]] bool add(std::shared_ptr<CopyJob> job);

  // Copies what the job has to hand out now, on this thread. False when stopped; then the caller cancels it.
  [[nodiscard]] bool copy_here(CopyJob& job);

 private:
  friend class CopyPool;

  std::shared_ptr<CopyJob> next();
  void run();
  // Returns the jobs that were queued.
  std::deque<std::shared_ptr<CopyJob>> stop();
  bool end_turn(const std::shared_ptr<CopyJob>& job, bool has_copied);
  [[nodiscard]] bool name_awaited(LandingWait& wait);
  void enqueue(std::shared_ptr<CopyJob> job);
  void count_waiting();
  [[nodiscard]] bool is_alone() const noexcept { return waiting_.load(std::memory_order_relaxed) <= 1; }

  std::mutex lock_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<CopyJob>> loads_;  // guarded by lock_; each once, the one whose turn it is in front
  std::deque<std::shared_ptr<CopyJob>> saves_;  // guarded by lock_; as loads_
  // The last so many of loads_ had nothing to hand out when they were tried; the others' turns come before theirs.
  size_t blocked_ = 0;  // guarded by lock_
  uint64_t turns_ = 0;  // guarded by lock_; of loads that have copied
  std::atomic<size_t> waiting_ = 0;
  bool stopped_ = false;  // guarded by lock_
  std::atomic<uint64_t> bytes_copied_ = 0;
  std::atomic<uint64_t> here_cpu_ns_ = 0;  // of what `copy_here` has copied
};

class CopyPool {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where the system has no more threads to give.
  explicit CopyPool(unsigned threads);
  ~CopyPool() { stop(); }
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  void stop();

  [[nodiscard]] const std::shared_ptr<CopyQueue>& queue() const noexcept { return queue_; }
  [[nodiscard]] uint64_t bytes_copied() const noexcept { return queue_->bytes_copied_.load(std::memory_order_relaxed); }
  // CPU time that the threads have used, also after `stop`, and others for what they copied themselves.
  [[nodiscard]] double cpu_seconds() const {
    return threads_.cpu_seconds() + static_cast<double>(queue_->here_cpu_ns_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  const std::shared_ptr<CopyQueue> queue_;
  ThreadGroup threads_{"kvpool-copy"};
};

}  // namespace kvpool
