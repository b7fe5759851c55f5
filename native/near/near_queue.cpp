#include "near/near_queue.h"

#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "threads/event_descriptor.h"

namespace kvpool {

NearQueue::NearQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads,
                     size_t jobs_max)
    : arena_(std::move(arena)), board_(std::move(board)), jobs_max_(jobs_max), event_fd_(new_event_fd()) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned number = 0; number < threads; ++number) {
      threads_.add([this] { run_tasks(); });
    }
  } catch (...) {
    stop(ThreadGroup::FOR_GOOD);
    close(event_fd_);
    throw;
  }
}

NearQueue::~NearQueue() {
  stop(ThreadGroup::FOR_GOOD);
  close(event_fd_);
}

uint64_t NearQueue::pull(NearPlan plan) {
  KVPOOL_CHECK(plan.parts > 0 && plan.parts <= plan.chunks.size());
  KVPOOL_CHECK(plan.extents > 0 && plan.extent_bytes > 0);
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    if (is_stopped_ || jobs_.size() >= jobs_max_) {
      return 0;
    }
    id = ++last_job_;
    const uint32_t parts = plan.parts;
    const size_t chunks = plan.chunks.size();
    const auto job = std::make_shared<Job>(id, std::move(plan), chunks);
    jobs_.emplace(id, job);
    for (uint32_t part = 0; part < parts; ++part) {
      line_.push_back({job, part});
    }
  }
  wake_.notify_all();
  return id;
}

// What waits ends in its turn, which no part of an ended job delays.
bool NearQueue::cancel(uint64_t id) {
  const std::lock_guard guard(lock_);
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) {
    return false;
  }
  found->second->has_ended = true;
  return true;
}

// A stopped queue still ends what is in its line.
void NearQueue::run_tasks() {
  std::unique_lock guard(lock_);
  while (true) {
    if (line_.empty()) {
      if (is_stopped_) {
        return;
      }
      wake_.wait(guard);
      continue;
    }
    const Task task = std::move(line_.front());
    line_.pop_front();
    guard.unlock();
    run(task);
    guard.lock();
  }
}

void NearQueue::run(const Task& task) {
  Job& job = *task.job;
  const auto waited = std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - job.begun);
  NearCopier(job.plan, task.part, *arena_, *board_, job.has_ended, [this, waited, &job](const PullOutcome& outcome) {
    report(job, outcome, waited);
  }).run();
}

void NearQueue::report(Job& job, PullOutcome outcome, std::chrono::microseconds waited) {
  outcome.job = job.id;
  outcome.waited = waited;
  {
    const std::lock_guard guard(lock_);
    copied_bytes_ += outcome.bytes;
    outcomes_.push_back(outcome);
    if (--job.chunks_left == 0) {
      jobs_.erase(job.id);  // before anybody sees its last end
    }
  }
  notify(event_fd_);
}

std::vector<PullOutcome> NearQueue::take_outcomes(size_t limit) {
  const std::lock_guard guard(lock_);
  return take_front(outcomes_, limit, event_fd_);
}

bool NearQueue::stop(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
    for (const auto& [id, job] : jobs_) {
      job->has_ended = true;
    }
  }
  wake_.notify_all();
  return threads_.join(timeout);
}

NearQueueStats NearQueue::stats() const {
  const std::lock_guard guard(lock_);
  return {jobs_.size(), copied_bytes_};
}

}  // namespace kvpool
