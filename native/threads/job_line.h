// A bounded line of jobs before the threads that do them, and what has become of their chunks.
//
//   a job:   accepted ──the last of its chunks reported──► gone
//   a part:  waiting ──next──► under way       its thread reports chunks
//               └──cancel, stop──► dropped     the owner reports what nobody will do
//
// Guarantees:
// 1. Every chunk of an accepted job is reported once: what is reported of it again does not count.
// 2. Parts of more urgent jobs go first, among equals those of the older job, in their order; the owner may hold some back.
// 3. Each urgency is bounded in jobs that have not been reported: a full line refuses, and a stopped one refuses all.
// 4. `cancel` and `stop` have what waits reported when they return. What is under way is to end now, and reports itself.
// 5. No thread is left when `stop` has returned true.
//
// What it is not: the work, or threads that know how to do it. An owner derives its queue from the line and its jobs from LineJob,
// starts threads that do what `next` hands out, and stops them before its own fields go.
// Invariant: `jobs_` are the accepted jobs with a chunk that was not reported, `counts_` their numbers by urgency, and `waiting_` the
// parts that no thread has begun; `verify` recounts them.
// Threads: any. The lock is not held while a job is done; owners may guard fields of their own with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "threads/event_descriptor.h"
#include "threads/thread_group.h"

namespace kvpool {

// What a line has of a job.
class LineJob {
 public:
  // In its line, from 1 on; 0: it was not accepted.
  [[nodiscard]] uint64_t number() const noexcept { return number_; }
  [[nodiscard]] size_t urgency() const noexcept { return urgency_; }
  // What is left of it is to end now. An owner whose jobs wait for more than memory has an `end` of its own.
  void end() noexcept { has_ended_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool has_ended() const noexcept { return has_ended_.load(std::memory_order_relaxed); }

 private:
  template <typename Job, typename Outcome>
  friend class JobLine;

  uint64_t number_ = 0;
  size_t urgency_ = 0;
  std::vector<bool> is_reported_;  // by chunk; guarded by the line's lock
  size_t left_ = 0;                // chunks that were not reported; guarded by the line's lock
  std::atomic<bool> has_ended_ = false;
};

template <typename Job, typename Outcome>
class JobLine {
 public:
  JobLine(const JobLine&) = delete;
  JobLine& operator=(const JobLine&) = delete;

  // What was reported since the last call, the first `limit` of it. The descriptor is readable while there is something.
  [[nodiscard]] std::vector<Outcome> take_outcomes(size_t limit = SIZE_MAX) {
    const Guard guard = lock();
    return take_front(outcomes_, limit, event_fd_);
  }
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }

  // Ends what is left of a job, reported like any end. False where all of it was reported, or it never was.
  bool cancel(uint64_t number) {
    std::vector<Rest> dropped;
    {
      const Guard guard = lock();
      const auto found = jobs_.find(number);
      if (found == jobs_.end()) {
        return false;
      }
      found->second->end();
      dropped = take([number](const Job& job) { return job.number() == number; });
    }
    drop_all(dropped);
    return true;
  }

  // Ends all jobs. False where a thread has not ended within the time; another call goes on waiting.
  bool stop(std::chrono::milliseconds timeout) {
    std::vector<Rest> dropped;
    {
      const Guard guard = lock();
      is_stopped_.store(true, std::memory_order_release);
      for (const auto& [number, job] : jobs_) {
        job->end();
      }
      dropped = take([](const Job&) { return true; });
    }
    wake_.notify_all();
    drop_all(dropped);
    return threads_.join(timeout);
  }

  // Jobs that have not been reported.
  [[nodiscard]] size_t jobs(size_t urgency = 0) const {
    const Guard guard = lock();
    return counts_[urgency];
  }

  void verify() const {
    const Guard guard = lock();
    std::vector<size_t> counts(counts_.size());
    for (const auto& [number, job] : jobs_) {
      KVPOOL_CHECK(job->number_ == number && number <= last_job_);
      KVPOOL_CHECK(job->left_ > 0 && job->left_ == static_cast<size_t>(std::count(job->is_reported_.begin(), job->is_reported_.end(), false)));
      ++counts[job->urgency_];
    }
    KVPOOL_CHECK(counts == counts_);
    each_waiting([](const Rest& rest) { KVPOOL_CHECK(rest.next < rest.parts); });
  }

 protected:
  using Guard = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  // A part of a job, which its thread does.
  struct Task {
    std::shared_ptr<Job> job;
    uint32_t part;
  };
  // The parts of a job from `next` on, which no thread has begun.
  struct Rest {
    std::shared_ptr<Job> job;
    uint32_t next;
    uint32_t parts;
  };

  // `name`: of the threads. `jobs_max`: of each urgency. Throws std::system_error where there is no descriptor to be had.
  JobLine(const char* name, size_t urgencies, size_t jobs_max)
      : jobs_max_(jobs_max), event_fd_(new_event_fd()), waiting_(urgencies), counts_(urgencies), threads_(name) {
    KVPOOL_CHECK(urgencies > 0 && jobs_max > 0);
  }
  // REQUIRES: stopped, and all threads have ended.
  ~JobLine() { close(event_fd_); }

  // Reports what nobody will do of a job whose parts were dropped. Called once for each of them; the lock is not held.
  virtual void drop(const Rest& rest) = 0;

  // Starts threads that call work(number). Throws std::system_error where there are no more to be had, when those before have ended.
  template <typename Work>
  void start(unsigned threads, Work work) {
    try {
      for (unsigned number = 0; number < threads; ++number) {
        threads_.add([work, number] { work(number); });
      }
    } catch (...) {
      stop(ThreadGroup::FOR_GOOD);
      throw;
    }
  }

  // The job's number; 0 where the line is full or stopped. REQUIRES: one part and one chunk at least.
  [[nodiscard]] uint64_t add(std::shared_ptr<Job> job, size_t urgency, uint32_t parts, size_t chunks) {
    KVPOOL_CHECK(parts > 0 && chunks > 0);
    uint64_t number = 0;
    {
      const Guard guard = lock();
      if (is_stopped() || counts_[urgency] >= jobs_max_) {
        return 0;
      }
      number = ++last_job_;
      ++counts_[urgency];
      job->number_ = number;
      job->urgency_ = urgency;
      job->is_reported_.resize(chunks);
      job->left_ = chunks;
      jobs_.emplace(number, job);
      waiting_[urgency].push_back({std::move(job), 0, parts});
    }
    wake_.notify_all();
    return number;
  }
  // Has a job of the owner's own, which is not accepted and not reported, done before its equals. False where the line has stopped.
  [[nodiscard]] bool add_first(std::shared_ptr<Job> job, size_t urgency, uint32_t parts) {
    {
      const Guard guard = lock();
      if (is_stopped()) {
        return false;
      }
      job->urgency_ = urgency;
      waiting_[urgency].push_front({std::move(job), 0, parts});
    }
    wake_.notify_all();
    return true;
  }

  // The next part; nothing where the line has stopped. `begins`: called with the lock held; true: the job's next part is this
  // thread's, and counts as begun. It is asked again after each `change`.
  template <typename Begins>
  [[nodiscard]] std::optional<Task> next(Begins begins) {
    Guard guard = lock();
    while (!is_stopped()) {
      if (auto task = next_now(begins)) {
        return task;
      }
      wake_.wait(guard);
    }
    return std::nullopt;
  }
  // The same, nothing where none begins. REQUIRES: the lock is held.
  template <typename Begins>
  [[nodiscard]] std::optional<Task> next_now(Begins begins) {
    for (auto& waiting : waiting_) {
      const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const Rest& rest) { return begins(*rest.job); });
      if (found != waiting.end()) {
        Task task{found->job, found->next++};
        if (found->next == found->parts) {
          waiting.erase(found);
        }
        return task;
      }
    }
    return std::nullopt;
  }

  // Reports a chunk; false where it was before. The caller has the job.
  bool report(Job& job, size_t chunk, Outcome outcome) {
    bool had_some = false;
    {
      const Guard guard = lock();
      had_some = !outcomes_.empty();
      if (!add_outcome(job, chunk, std::move(outcome))) {
        return false;
      }
    }
    notify_unless(had_some);
    return true;
  }
  // Reports several, each of the chunk that it names, with one wake-up of who takes them; what was reported before does not count.
  void report_all(Job& job, std::span<const Outcome> outcomes) {
    bool had_some = false;
    {
      const Guard guard = lock();
      had_some = !outcomes_.empty();
      for (const Outcome& outcome : outcomes) {
        static_cast<void>(add_outcome(job, outcome.chunk, outcome));
      }
    }
    notify_unless(had_some);
  }

  [[nodiscard]] Guard lock() const { return Guard(lock_); }
  // Changes what a decision of the owner's depends on.
  template <typename Change>
  void change(Change apply) {
    {
      const Guard guard = lock();
      apply();
    }
    wake_.notify_all();
  }
  [[nodiscard]] bool is_stopped() const noexcept { return is_stopped_.load(std::memory_order_acquire); }

  // All of these REQUIRE that the lock is held. Until something changes, or the time has come; may return early.
  void wait(Guard& guard, Clock::time_point until = Clock::time_point::max()) const {
    if (until == Clock::time_point::max()) {
      wake_.wait(guard);
    } else {
      wake_.wait_until(guard, until);
    }
  }
  template <typename Visit>
  void each_waiting(Visit visit) const {
    for (const auto& waiting : waiting_) {
      std::for_each(waiting.begin(), waiting.end(), visit);
    }
  }
  [[nodiscard]] const std::map<uint64_t, std::shared_ptr<Job>>& accepted() const noexcept { return jobs_; }
  // Takes out what waits of the jobs that are wanted, for the owner to drop.
  template <typename Wanted>
  [[nodiscard]] std::vector<Rest> take(Wanted is_wanted) {
    std::vector<Rest> taken;
    for (auto& waiting : waiting_) {
      std::erase_if(waiting, [&](Rest& rest) {
        const bool is_taken = is_wanted(std::as_const(*rest.job));
        if (is_taken) {
          taken.push_back(rest);
        }
        return is_taken;
      });
    }
    return taken;
  }

  [[nodiscard]] ThreadGroup& threads() noexcept { return threads_; }

 private:
  // False where it was reported before. REQUIRES: the lock is held.
  [[nodiscard]] bool add_outcome(Job& job, size_t chunk, Outcome outcome) {
    if (job.is_reported_.at(chunk)) {
      return false;
    }
    job.is_reported_[chunk] = true;
    outcomes_.push_back(std::move(outcome));
    if (--job.left_ == 0) {
      --counts_[job.urgency_];
      jobs_.erase(job.number_);  // before anybody sees its last end
    }
    return true;
  }
  // Whoever added the first of those that were there has the descriptor readable.
  void notify_unless(bool had_some) {
    if (!had_some) {
      notify(event_fd_);
    }
  }
  void drop_all(const std::vector<Rest>& dropped) {
    std::for_each(dropped.begin(), dropped.end(), [this](const Rest& rest) { drop(rest); });
  }

  const size_t jobs_max_;
  const int event_fd_;  // owned

  mutable std::mutex lock_;
  mutable std::condition_variable wake_;
  std::vector<std::deque<Rest>> waiting_;          // by urgency; guarded by lock_
  std::map<uint64_t, std::shared_ptr<Job>> jobs_;  // guarded by lock_
  std::vector<size_t> counts_;                     // by urgency; guarded by lock_
  std::vector<Outcome> outcomes_;                  // guarded by lock_
  uint64_t last_job_ = 0;                          // guarded by lock_
  std::atomic<bool> is_stopped_ = false;           // written under lock_
  ThreadGroup threads_;
};

}  // namespace kvpool
