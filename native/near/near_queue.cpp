#include "near/near_queue.h"

#include <utility>

#include "base/check.h"

namespace kvpool {

NearQueue::NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads,
                     size_t jobs_max)
    : JobLine("kvpool-near", 1, jobs_max), arena_(std::move(arena)), board_(std::move(board)) {
  KVPOOL_CHECK(threads > 0);
  start(threads, [this](unsigned) {
    while (const auto task = next([](const NearJob&) { return true; })) {
      copier_of(*task).run();
    }
  });
}

uint64_t NearQueue::pull(NearPlan plan) {
  KVPOOL_CHECK(plan.parts > 0 && plan.parts <= plan.chunks.size());
  KVPOOL_CHECK(plan.extents > 0 && plan.extent_bytes > 0);
  const uint32_t parts = plan.parts;
  const size_t chunks = plan.chunks.size();
  return add(std::make_shared<NearJob>(std::move(plan)), 0, parts, chunks);
}

void NearQueue::drop(const Rest& rest) {
  for (uint32_t part = rest.next; part < rest.parts; ++part) {
    copier_of({rest.job, part}).end_all(PullStatus::CANCELLED, PullFault::CANCELLED);
  }
}

NearCopier NearQueue::copier_of(const Task& task) {
  const auto waited = std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - task.job->begun);
  return {task.job->plan, task.part, *arena_, *board_, *task.job, [this, waited, job = task.job](PullOutcome outcome) {
            outcome.job = job->number();
            outcome.waited = waited;
            copied_bytes_.fetch_add(outcome.bytes, std::memory_order_relaxed);
            report(*job, outcome.chunk, outcome);
          }};
}

}  // namespace kvpool
