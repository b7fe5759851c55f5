// The threads that copy chunks of other daemons of this host into the arena, and the line before them.
//
// Guarantees, beside those of a JobLine:
// 1. Nothing is written to the slot of a chunk that was reported. A job that waits beyond its deadline ends when its turn comes: those
//    before it wait for nothing but memory.
// 2. A job takes a thread for each of its parts, in the order of jobs.
// 3. The owner's memory stays mapped until the last thread has left it, whatever becomes of the owner.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "near/near_copier.h"
#include "threads/job_line.h"

namespace kvpool {

struct NearQueueStats {
  uint64_t jobs = 0;
  uint64_t copied_bytes = 0;
};

struct NearJob : LineJob {
  explicit NearJob(NearPlan planned) : plan(std::move(planned)) {}
  const NearPlan plan;
  const StreamClock::time_point begun = StreamClock::now();
};

class NearQueue final : public JobLine<NearJob, PullOutcome> {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where there are no threads or descriptors to be had.
  NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max);
  ~NearQueue() { stop(ThreadGroup::FOR_GOOD); }

  // A job's number; 0 where the line is full or the queue stopped. REQUIRES: 1 part at least, at most one a chunk; see NearCopier;
  // every chunk into a slot of its own where no extent has landed.
  [[nodiscard]] uint64_t pull(NearPlan plan);

  [[nodiscard]] NearQueueStats stats() const { return {jobs(), copied_bytes_.load(std::memory_order_relaxed)}; }
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 private:
  void drop(const Rest& rest) override;
  [[nodiscard]] NearCopier copier_of(const Task& task);

  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  std::atomic<uint64_t> copied_bytes_ = 0;
};

}  // namespace kvpool
