#include "ssd/ssd_queue.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "threads/event_descriptor.h"
#include "ssd/ssd_stamped_io.h"

namespace kvpool {

SsdQueue::SsdQueue(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena,
                   std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max, bool wants_rings)
    : files_(std::move(files)),
      arena_(std::move(arena)),
      board_(std::move(board)),
      jobs_max_(jobs_max),
      writers_max_(std::max(1U, threads / 2)),
      event_fd_(new_event_fd()),
      begun_(threads, NEVER) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (size_t number = 0; number < threads; ++number) {
      bounces_.push_back(std::make_unique<SsdBounce>());
    }
    for (size_t number = 0; number < threads; ++number) {
      threads_.add([this, number, wants_rings] { run(number, wants_rings); });
    }
    std::unique_lock guard(lock_);
    wake_.wait(guard, [this, threads] { return io_.threads == threads; });
  } catch (...) {
    stop(ThreadGroup::FOR_GOOD);
    close(event_fd_);
    throw;
  }
}

SsdQueue::~SsdQueue() {
  stop(ThreadGroup::FOR_GOOD);
  close(event_fd_);
}

uint64_t SsdQueue::read(std::vector<SsdRead> chunks, SsdUrgency urgency) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdReadJob>(id, std::move(chunks), arena_, board_), urgency);
}

uint64_t SsdQueue::write(std::vector<SsdWrite> chunks) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdWriteJob>(id, std::move(chunks), arena_), SsdUrgency::WRITE_BACK);
}

uint64_t SsdQueue::verify(std::vector<SsdVerify> chunks) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdVerifyJob>(id, std::move(chunks)), SsdUrgency::CHECK);
}

uint64_t SsdQueue::add(std::shared_ptr<SsdJob> job, SsdUrgency urgency) {
  const uint64_t id = job->id();
  {
    const std::lock_guard guard(lock_);
    auto& queue = queues_[static_cast<size_t>(urgency)];
    if (is_stopped_ || queue.size() >= jobs_max_) {
      return 0;
    }
    queue.push_back(std::move(job));
  }
  wake_.notify_all();
  return id;
}

bool SsdQueue::has_work() const noexcept {
  return !queues_[0].empty() || !queues_[1].empty() ||
         ((!queues_[2].empty() || !queues_[3].empty()) && writers_ < writers_max_);
}

// What to do next: the most urgent job, which stays queued until it has no pieces left, or the chunk that this thread has begun,
// before anything else of its kind. False when the queue has stopped.
bool SsdQueue::next(size_t thread, Task& task, const std::shared_ptr<SsdJob>& unfinished) {
  std::unique_lock guard(lock_);
  wake_.wait(guard, [&] { return is_stopped_ || unfinished != nullptr || has_work(); });
  if (is_stopped_) {
    return false;
  }
  size_t which = 0;
  while (which < SSD_URGENCIES && queues_[which].empty()) {
    ++which;
  }
  const bool goes_on = unfinished != nullptr && which >= static_cast<size_t>(SsdUrgency::WRITE_BACK);
  if (goes_on) {
    task = {unfinished, SsdUrgency::WRITE_BACK};
  } else {
    task = {queues_[which].front(), static_cast<SsdUrgency>(which)};
    writers_ += task.urgency >= SsdUrgency::WRITE_BACK ? 1U : 0U;
  }
  begun_[thread] = Clock::now();
  return true;
}

std::unique_ptr<SsdIo> SsdQueue::make_io(bool wants_ring) {
  SsdRingResult ring;
  if (wants_ring) {
    ring = make_ring_io(files_);
  }
  {
    const std::lock_guard guard(lock_);
    ++io_.threads;
    io_.rings += ring.io != nullptr ? 1U : 0U;
    io_.ring_error = ring.error != 0 ? ring.error : io_.ring_error;
  }
  wake_.notify_all();
  return ring.io != nullptr ? std::move(ring.io) : make_call_io(files_);
}

void SsdQueue::run(size_t thread, bool wants_ring) {
  const auto stamp_this = [this, thread] { stamp(thread); };
  const auto note_fault = [this](const SsdFault& fault) {
    const std::lock_guard guard(lock_);
    io_.fault = fault;
  };
  SsdStampedIo io(make_io(wants_ring), stamp_this, note_fault);
  SsdStampedIo calls(make_call_io(files_), stamp_this, note_fault);
  SsdWorker worker{io, calls, *bounces_[thread]};
  std::vector<SsdOutcome> ended;
  Task task{};
  std::shared_ptr<SsdJob> unfinished;  // whose chunk the worker has begun
  while (next(thread, task, unfinished)) {
    if (io.is_ring() && is_distrusted()) {
      io.replace(make_call_io(files_));
    }
    run_piece(thread, worker, task, ended);
    if (task.urgency == SsdUrgency::WRITE_BACK) {
      unfinished = worker.chunk ? task.job : nullptr;
    }
    task.job.reset();
  }
  if (unfinished != nullptr) {
    ended = {{unfinished->id(), static_cast<uint32_t>(*worker.chunk), SsdStatus::CANCELLED, 0}};
    report(*unfinished, ended, false);
  }
}

void SsdQueue::run_piece(size_t thread, SsdWorker& worker, const Task& task, std::vector<SsdOutcome>& ended) {
  ended.clear();
  static_cast<void>(task.job->run_piece(worker, ended));
  const bool is_in_background = task.urgency >= SsdUrgency::WRITE_BACK;
  {
    const std::lock_guard guard(lock_);
    begun_[thread] = NEVER;
    auto& queue = queues_[static_cast<size_t>(task.urgency)];
    if (!queue.empty() && queue.front() == task.job && !task.job->has_pieces()) {
      queue.pop_front();
    }
    writers_ -= is_in_background && !worker.chunk ? 1U : 0U;
    stats_.second_reads += std::exchange(worker.second_reads, 0);
    if (worker.has_found_bad_path) {
      read_backs_.distrust();
    }
  }
  if (is_in_background) {
    wake_.notify_all();
  }
  report(*task.job, ended, task.urgency != SsdUrgency::WRITE_BACK);
}

void SsdQueue::stamp(size_t thread) {
  const std::lock_guard guard(lock_);
  begun_[thread] = Clock::now();
}

bool SsdQueue::is_distrusted() const {
  const std::lock_guard guard(lock_);
  return read_backs_.is_distrusted();
}

// Counts the chunks that have ended and notifies the taker, except of those that are read back first.
void SsdQueue::report(const SsdJob& job, std::vector<SsdOutcome>& ended, bool is_read) {
  if (ended.empty()) {
    return;
  }
  bool has_new_job = false;
  {
    const std::lock_guard guard(lock_);
    for (SsdOutcome& outcome : ended) {
      const uint64_t bytes = outcome.bytes;
      const std::optional<SsdOutcome> written = read_backs_.end(outcome);
      (is_read || written ? stats_.read_bytes : stats_.written_bytes) += bytes;
      if (written) {
        outcome = *written;
      } else if (!is_read && read_back(job, outcome)) {
        has_new_job = true;
        continue;
      }
      stats_.failed_chunks += outcome.status == SsdStatus::OK ? 0U : 1U;
      outcomes_.push_back(std::move(outcome));
    }
  }
  if (has_new_job) {
    wake_.notify_all();
  }
  notify(event_fd_);
}

// True if a written chunk is read back before it counts. If it can no longer be read back, and the disk is not trusted, the chunk
// counts as not written. REQUIRES: `lock_` is held.
bool SsdQueue::read_back(const SsdJob& job, SsdOutcome& outcome) {
  if (outcome.status != SsdStatus::OK || !read_backs_.wants_next()) {
    return false;
  }
  if (is_stopped_) {
    outcome.status = read_backs_.is_distrusted() ? SsdStatus::CANCELLED : SsdStatus::OK;
    return false;
  }
  const std::optional<SsdVerify> expected = job.written(outcome.chunk);
  KVPOOL_CHECK(expected.has_value());
  const uint64_t id = ++last_job_;
  read_backs_.begin(id, outcome);
  ++stats_.read_back_chunks;
  queues_[static_cast<size_t>(SsdUrgency::WRITE_BACK)].push_front(
      std::make_shared<SsdVerifyJob>(id, std::vector<SsdVerify>{*expected}));
  return true;
}

std::vector<SsdOutcome> SsdQueue::take_outcomes(size_t limit) {
  const std::lock_guard guard(lock_);
  return take_front(outcomes_, limit, event_fd_);
}

bool SsdQueue::stop(std::chrono::milliseconds timeout) {
  cancel_waiting();
  return threads_.join(timeout);
}

void SsdQueue::cancel_waiting() {
  std::array<std::deque<std::shared_ptr<SsdJob>>, SSD_URGENCIES> dropped;
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
    dropped.swap(queues_);
  }
  wake_.notify_all();
  for (size_t which = 0; which < SSD_URGENCIES; ++which) {
    for (const auto& job : dropped[which]) {
      std::vector<SsdOutcome> ended;
      job->cancel(ended);
      report(*job, ended, which != static_cast<size_t>(SsdUrgency::WRITE_BACK));
    }
  }
}

std::chrono::nanoseconds SsdQueue::longest_transfer() const {
  const std::lock_guard guard(lock_);
  const Clock::time_point first = *std::min_element(begun_.begin(), begun_.end());
  return first == NEVER ? std::chrono::nanoseconds(0) : std::max(std::chrono::nanoseconds(1), Clock::now() - first);
}

SsdQueueIo SsdQueue::io() const {
  const std::lock_guard guard(lock_);
  SsdQueueIo io = io_;
  io.is_distrusted = read_backs_.is_distrusted();
  return io;
}

SsdQueueStats SsdQueue::stats() const {
  const std::lock_guard guard(lock_);
  SsdQueueStats stats = stats_;
  for (size_t which = 0; which < SSD_URGENCIES; ++which) {
    stats.waiting[which] = queues_[which].size();
  }
  return stats;
}

}  // namespace kvpool
