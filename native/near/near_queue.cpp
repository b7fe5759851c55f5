#include "near/near_queue.h"

#include "base/check.h"

namespace kvpool {

NearQueue::NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads,
                     size_t jobs_max)
    : PullLine("kvpool-near", jobs_max, std::move(arena), std::move(board)) {
  KVPOOL_CHECK(threads > 0);
  start(threads, [this](unsigned) {
    while (const auto task = next([](const LineJob&) { return true; })) {
      SlotLanding landing = landing_of(*task);
      NearCopier(task->job->plan, *task->job, landing).run();
    }
  });
}

}  // namespace kvpool
