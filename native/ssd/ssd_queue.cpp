#include "ssd/ssd_queue.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "ssd/ssd_stamped_io.h"

namespace kvpool {
namespace {

bool is_in_background(const SsdJob& job) noexcept { return job.urgency() >= static_cast<size_t>(SsdUrgency::WRITE_BACK); }

}  // namespace

SsdQueue::SsdQueue(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena,
                   std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max, bool wants_rings)
    : JobLine("kvpool-ssd", SSD_URGENCIES, jobs_max),
      files_(std::move(files)),
      arena_(std::move(arena)),
      board_(std::move(board)),
      writers_max_(std::max(1U, threads / 2)),
      begun_(threads, NEVER) {
  KVPOOL_CHECK(threads > 0);
  for (size_t number = 0; number < threads; ++number) {
    bounces_.push_back(std::make_unique<SsdBounce>());
  }
  start(threads, [this, wants_rings](unsigned number) { run(number, wants_rings); });
  Guard guard = lock();
  while (io_.threads < threads) {
    wait(guard);
  }
}

uint64_t SsdQueue::read(std::vector<SsdRead> chunks, SsdUrgency urgency) {
  const size_t count = chunks.size();
  return add(std::make_shared<SsdReadJob>(std::move(chunks), arena_, board_), urgency, count);
}

uint64_t SsdQueue::write(std::vector<SsdWrite> chunks) {
  const size_t count = chunks.size();
  return add(std::make_shared<SsdWriteJob>(std::move(chunks), arena_), SsdUrgency::WRITE_BACK, count);
}

uint64_t SsdQueue::verify(std::vector<SsdVerify> chunks) {
  const size_t count = chunks.size();
  return add(std::make_shared<SsdVerifyJob>(std::move(chunks)), SsdUrgency::CHECK, count);
}

uint64_t SsdQueue::add(std::shared_ptr<SsdJob> job, SsdUrgency urgency, size_t chunks) {
  const uint32_t parts = job->parts();
  return JobLine::add(std::move(job), static_cast<size_t>(urgency), parts, chunks);
}

// What to do next: the most urgent piece, or the chunk that this thread has begun, before anything else of its kind.
std::optional<SsdQueue::Task> SsdQueue::next(const std::optional<Task>& unfinished) {
  if (unfinished) {
    const Guard guard = lock();
    const auto urgent = next_now([](const SsdJob& job) { return !is_in_background(job); });
    return urgent || is_stopped() ? urgent : unfinished;
  }
  return JobLine::next([this](const SsdJob& job) {
    const bool begins = !is_in_background(job) || writers_ < writers_max_;
    writers_ += begins && is_in_background(job) ? 1U : 0U;
    return begins;
  });
}

std::unique_ptr<SsdIo> SsdQueue::make_io(bool wants_ring) {
  SsdRingResult ring;
  if (wants_ring) {
    ring = make_ring_io(files_);
  }
  change([&] {
    ++io_.threads;
    io_.rings += ring.io != nullptr ? 1U : 0U;
    io_.ring_error = ring.error != 0 ? ring.error : io_.ring_error;
  });
  return ring.io != nullptr ? std::move(ring.io) : make_call_io(files_);
}

void SsdQueue::run(size_t thread, bool wants_ring) {
  const auto stamp_this = [this, thread] { stamp(thread); };
  const auto note_fault = [this](const SsdFault& fault) {
    const Guard guard = lock();
    io_.fault = fault;
  };
  SsdStampedIo io(make_io(wants_ring), stamp_this, note_fault);
  SsdStampedIo calls(make_call_io(files_), stamp_this, note_fault);
  SsdWorker worker{io, calls, *bounces_[thread]};
  std::optional<Task> unfinished;  // whose chunk this thread has begun
  while (const auto task = next(unfinished)) {
    if (io.is_ring() && is_distrusted()) {
      io.replace(make_call_io(files_));
    }
    const bool goes_on = run_piece(thread, worker, *task);
    if (is_in_background(*task->job)) {
      unfinished = goes_on ? task : std::nullopt;
    }
  }
  if (unfinished) {
    drop({unfinished->job, unfinished->part, unfinished->part + 1});
  }
}

// Whether the same part has more to do.
bool SsdQueue::run_piece(size_t thread, SsdWorker& worker, const Task& task) {
  stamp(thread);
  std::vector<SsdOutcome> ended;
  const bool goes_on = task.job->run_piece(worker, task.part, ended);
  const bool ends_writing = is_in_background(*task.job) && !goes_on;
  const auto end = [&] {
    begun_[thread] = NEVER;
    writers_ -= ends_writing ? 1U : 0U;
    stats_.second_reads += std::exchange(worker.second_reads, 0);
    if (worker.has_found_bad_path) {
      read_backs_.distrust();
    }
  };
  if (ends_writing) {
    change(end);
  } else {
    const Guard guard = lock();
    end();
  }
  report_all(task.job, ended);
  return goes_on;
}

void SsdQueue::stamp(size_t thread) {
  const Guard guard = lock();
  begun_[thread] = Clock::now();
}

bool SsdQueue::is_distrusted() const {
  const Guard guard = lock();
  return read_backs_.is_distrusted();
}

// Counts the chunks that have ended and reports them, except those that are read back first.
void SsdQueue::report_all(const std::shared_ptr<SsdJob>& job, std::vector<SsdOutcome>& ended) {
  const SsdWritten* const written = job->reads_back();
  const bool is_write = written == nullptr && job->urgency() == static_cast<size_t>(SsdUrgency::WRITE_BACK);
  for (SsdOutcome& outcome : ended) {
    {
      const Guard guard = lock();
      (is_write ? stats_.written_bytes : stats_.read_bytes) += outcome.bytes;
    }
    if (written != nullptr) {
      SsdOutcome whole = written->outcome;
      whole.status = verdict(outcome.status);
      end_chunk(*written->job, std::move(whole));
    } else if (!is_write || !read_back(job, outcome)) {
      end_chunk(*job, std::move(outcome));
    }
  }
}

SsdStatus SsdQueue::verdict(SsdStatus read) {
  const Guard guard = lock();
  return read_backs_.verdict(read);
}

void SsdQueue::end_chunk(SsdJob& job, SsdOutcome outcome) {
  {
    const Guard guard = lock();
    stats_.failed_chunks += outcome.status == SsdStatus::OK ? 0U : 1U;
  }
  const uint32_t chunk = outcome.chunk;
  report(job, chunk, std::move(outcome));
}

// True if a written chunk is read back before it counts. If it can no longer be read back, and the disk is not trusted, the chunk
// counts as not written.
bool SsdQueue::read_back(const std::shared_ptr<SsdJob>& job, SsdOutcome& outcome) {
  {
    const Guard guard = lock();
    if (outcome.status != SsdStatus::OK || !read_backs_.wants_next()) {
      return false;
    }
    ++stats_.read_back_chunks;
  }
  const std::optional<SsdVerify> expected = job->written(outcome.chunk);
  KVPOOL_CHECK(expected.has_value());
  auto check = std::make_shared<SsdVerifyJob>(std::vector<SsdVerify>{*expected}, SsdWritten{job, outcome});
  const uint32_t parts = check->parts();
  if (add_first(std::move(check), static_cast<size_t>(SsdUrgency::WRITE_BACK), parts)) {
    return true;
  }
  const Guard guard = lock();
  --stats_.read_back_chunks;
  outcome.status = read_backs_.is_distrusted() ? SsdStatus::CANCELLED : SsdStatus::OK;
  return false;
}

void SsdQueue::drop(const Rest& rest) {
  std::vector<SsdOutcome> ended;
  rest.job->cancel(rest.next, rest.parts, ended);
  report_all(rest.job, ended);
}

std::chrono::nanoseconds SsdQueue::longest_transfer() const {
  const Guard guard = lock();
  const Clock::time_point first = *std::min_element(begun_.begin(), begun_.end());
  return first == NEVER ? std::chrono::nanoseconds(0) : std::max(std::chrono::nanoseconds(1), Clock::now() - first);
}

SsdQueueIo SsdQueue::io() const {
  const Guard guard = lock();
  SsdQueueIo io = io_;
  io.is_distrusted = read_backs_.is_distrusted();
  return io;
}

SsdQueueStats SsdQueue::stats() const {
  const Guard guard = lock();
  SsdQueueStats stats = stats_;
  each_waiting([&](const Rest& rest) { ++stats.waiting[rest.job->urgency()]; });
  return stats;
}

}  // namespace kvpool
