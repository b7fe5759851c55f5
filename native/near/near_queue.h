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

#include <cstdint>
#include <memory>
#include <utility>

#include "near/near_copier.h"
#include "net/pull_line.h"

namespace kvpool {

struct NearQueueStats {
  uint64_t jobs = 0;
  uint64_t copied_bytes = 0;
};

class NearQueue final : public PullLine<PlannedPull<NearPlan>> {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where there are no threads or descriptors to be had.
  NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max);
  ~NearQueue() { stop(ThreadGroup::FOR_GOOD); }

  // A job's number; 0 where the line is full or the queue stopped. REQUIRES: as PullLine and NearCopier.
  [[nodiscard]] uint64_t pull(NearPlan plan) { return add(std::make_shared<PlannedPull<NearPlan>>(std::move(plan))); }

  [[nodiscard]] NearQueueStats stats() const { return {jobs(), landed_bytes_.load(std::memory_order_relaxed)}; }
};

}  // namespace kvpool
