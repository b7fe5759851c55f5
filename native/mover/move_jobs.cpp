#include "mover/move_jobs.h"

namespace kvpool {

MoveJob::MoveJob(const std::vector<DeviceMoveRow>& rows) : chunks(rows.size()) {
  for (uint32_t number = 0; number < rows.size(); ++number) {
    chunks[number].job = this;
    chunks[number].number = number;
    chunks[number].row = rows[number];
  }
}

uint64_t MoveJobs::add(MoveKind kind, const std::vector<DeviceMoveRow>& rows) {
  return JobLine::add(std::make_shared<MoveJob>(rows), static_cast<size_t>(kind), static_cast<uint32_t>(rows.size()), rows.size());
}

void MoveJobs::abandon() {
  std::vector<std::shared_ptr<MoveJob>> left;
  change([&] {
    is_abandoned_.store(true, std::memory_order_release);
    for (const auto& [number, job] : accepted()) {
      left.push_back(job);
    }
  });
  for (const auto& job : left) {
    drop({job, 0, static_cast<uint32_t>(job->chunks.size())});
  }
}

void MoveJobs::drop(const Rest& rest) {
  for (uint32_t number = rest.next; number < rest.parts; ++number) {
    end(rest.job->chunks[number], MoveOutcome::CANCELLED);
  }
}

std::shared_ptr<MovedChunk> MoveJobs::next(MoveKind kind) {
  const Guard guard = lock();
  const auto task = next_now([kind](const MoveJob& job) { return job.urgency() == static_cast<size_t>(kind); });
  return task ? std::shared_ptr<MovedChunk>(task->job, &task->job->chunks[task->part]) : nullptr;
}

bool MoveJobs::has_next(MoveKind kind) const {
  const Guard guard = lock();
  return is_waiting(kind);
}

void MoveJobs::end(const MovedChunk& chunk, MoveOutcome outcome) {
  report(*chunk.job, chunk.number, {chunk.job->number(), chunk.number, outcome});
}

void MoveJobs::wait(MoveKind kind, std::chrono::microseconds nap) const {
  Guard guard = lock();
  if (!is_waiting(kind) && !is_stopped() && !is_abandoned()) {
    JobLine::wait(guard, Clock::now() + nap);
  }
}

// REQUIRES: the lock is held.
bool MoveJobs::is_waiting(MoveKind kind) const {
  bool is_there = false;
  each_waiting([&](const Rest& rest) { is_there = is_there || rest.job->urgency() == static_cast<size_t>(kind); });
  return is_there;
}

}  // namespace kvpool
