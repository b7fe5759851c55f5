#include "mover/move_jobs.h"

#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "threads/event_descriptor.h"

namespace kvpool {

MoveJobs::MoveJobs() : event_fd_(new_event_fd()) {}

MoveJobs::~MoveJobs() { close(event_fd_); }

uint64_t MoveJobs::add(MoveKind kind, const std::vector<DeviceMoveRow>& rows) {
  KVPOOL_CHECK(!rows.empty());
  {
    const std::lock_guard guard(lock_);
    const auto of_kind = std::count_if(jobs_.begin(), jobs_.end(), [kind](const auto& job) { return job.second.kind == kind; });
    if (is_stopped_ || static_cast<size_t>(of_kind) >= JOBS_MAX) {
      return 0;
    }
    jobs_.emplace(++last_job_, Job{kind, rows.size()});
    for (uint32_t number = 0; number < rows.size(); ++number) {
      auto chunk = std::make_shared<MovedChunk>();
      chunk->job = last_job_;
      chunk->number = number;
      chunk->row = rows[number];
      unreported_.insert(chunk);
      line(kind).push_back(std::move(chunk));
    }
    wake_.notify_all();
    return last_job_;
  }
}

std::vector<MoveEnd> MoveJobs::take_ends() {
  const std::lock_guard guard(lock_);
  return take_front(ends_, SIZE_MAX, event_fd_);
}

size_t MoveJobs::jobs(MoveKind kind) const {
  const std::lock_guard guard(lock_);
  return static_cast<size_t>(
      std::count_if(jobs_.begin(), jobs_.end(), [kind](const auto& job) { return job.second.kind == kind; }));
}

void MoveJobs::stop() {
  const std::lock_guard guard(lock_);
  is_stopped_.store(true, std::memory_order_release);
  for (auto& waiting : lines_) {
    for (const auto& chunk : waiting) {
      end_locked(chunk, MoveOutcome::CANCELLED);
    }
    waiting.clear();
  }
  wake_.notify_all();
}

void MoveJobs::abandon() {
  const std::lock_guard guard(lock_);
  is_abandoned_.store(true, std::memory_order_release);
  while (!unreported_.empty()) {
    end_locked(*unreported_.begin(), MoveOutcome::CANCELLED);
  }
  wake_.notify_all();
}

std::shared_ptr<MovedChunk> MoveJobs::next(MoveKind kind) {
  const std::lock_guard guard(lock_);
  if (line(kind).empty()) {
    return nullptr;
  }
  auto chunk = std::move(line(kind).front());
  line(kind).pop_front();
  return chunk;
}

bool MoveJobs::has_next(MoveKind kind) const {
  const std::lock_guard guard(lock_);
  return !line(kind).empty();
}

void MoveJobs::end(const std::shared_ptr<MovedChunk>& chunk, MoveOutcome outcome) {
  const std::lock_guard guard(lock_);
  end_locked(chunk, outcome);
}

void MoveJobs::end_locked(const std::shared_ptr<MovedChunk>& given, MoveOutcome outcome) {
  const std::shared_ptr<MovedChunk> chunk = given;  // it may be the set's own
  if (unreported_.erase(chunk) == 0) {
    return;
  }
  ends_.push_back({chunk->job, chunk->number, outcome});
  const auto job = jobs_.find(chunk->job);
  KVPOOL_CHECK(job != jobs_.end());
  if (--job->second.left == 0) {
    jobs_.erase(job);
  }
  notify(event_fd_);
}

void MoveJobs::wait(MoveKind kind, std::chrono::microseconds nap) const {
  std::unique_lock guard(lock_);
  wake_.wait_for(guard, nap, [&] { return !line(kind).empty() || is_stopped_ || is_abandoned_; });
}

}  // namespace kvpool
