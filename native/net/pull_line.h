// A line of pulls into one arena, wherever the chunks come from: each part of a job lands in slots of its own.
//
// What it is: what the queues of pulls from peers and from other daemons of this host have in common. Threads: as JobLine.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "base/check.h"
#include "net/slot_landing.h"
#include "threads/job_line.h"

namespace kvpool {

// `Plan`: a PullTarget, and where its chunks come from.
template <typename Plan>
struct PlannedPull : LineJob {
  explicit PlannedPull(Plan planned) : plan(std::move(planned)) {}
  const Plan plan;
  const StreamClock::time_point begun = StreamClock::now();
};

template <typename Job>
class PullLine : public JobLine<Job, PullOutcome> {
 public:
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 protected:
  using Line = JobLine<Job, PullOutcome>;
  using typename Line::Rest;
  using typename Line::Task;

  PullLine(const char* name, size_t jobs_max, std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board)
      : Line(name, 1, jobs_max), arena_(std::move(arena)), board_(std::move(board)) {}

  // A job's number; 0 where the line is full or stopped. REQUIRES: 1 part at least, at most one a row; see SlotLanding; every row in a
  // slot of its own where no extent has landed.
  [[nodiscard]] uint64_t add(std::shared_ptr<Job> job) {
    const PullTarget& target = job->plan;
    KVPOOL_CHECK(target.parts > 0 && target.parts <= target.rows.size());
    KVPOOL_CHECK(target.extents > 0 && target.extent_bytes > 0);
    return Line::add(std::move(job), 0, target.parts, target.rows.size());
  }

  // Where a part lands, and is reported.
  [[nodiscard]] SlotLanding landing_of(const Task& task) {
    const auto waited = std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - task.job->begun);
    return {task.job->plan, task.part, *arena_, *board_, [this, waited, job = task.job](std::span<PullOutcome> outcomes) {
              for (PullOutcome& outcome : outcomes) {
                outcome.job = job->number();
                outcome.waited = waited;
                landed_bytes_.fetch_add(outcome.bytes, std::memory_order_relaxed);
                (outcome.status == PullStatus::DONE ? pulled_chunks_ : failed_chunks_).fetch_add(1, std::memory_order_relaxed);
              }
              this->report_all(*job, outcomes);
            }};
  }
  void end_rest(const Rest& rest, PullStatus status, PullFault fault) {
    for (uint32_t part = rest.next; part < rest.parts; ++part) {
      landing_of({rest.job, part}).end_all(status, fault);
    }
  }
  void drop(const Rest& rest) override { end_rest(rest, PullStatus::CANCELLED, PullFault::CANCELLED); }

  std::atomic<uint64_t> landed_bytes_ = 0;
  std::atomic<uint64_t> pulled_chunks_ = 0;
  std::atomic<uint64_t> failed_chunks_ = 0;

 private:
  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
};

}  // namespace kvpool
