#include "kvpool/ssd_queue.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "kvpool/check.h"

namespace kvpool {
namespace {

constexpr std::chrono::milliseconds FOR_GOOD = std::chrono::milliseconds::max();

int new_event_fd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return fd;
}

}  // namespace

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
      {
        const std::lock_guard guard(lock_);
        ++running_;
      }
      try {
        threads_.emplace_back([this, number, wants_rings] { run(number, wants_rings); });
      } catch (...) {
        const std::lock_guard guard(lock_);
        --running_;
        throw;
      }
      pthread_setname_np(threads_.back().native_handle(), "kvpool-ssd");
    }
    std::unique_lock guard(lock_);
    wake_.wait(guard, [this, threads] { return io_.threads == threads; });
  } catch (...) {
    stop(FOR_GOOD);
    close(event_fd_);
    throw;
  }
}

SsdQueue::~SsdQueue() {
  stop(FOR_GOOD);
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

// What to do next. A job is the most urgent one; it stays queued until it has no pieces left.
SsdQueue::Turn SsdQueue::next(size_t thread, std::shared_ptr<SsdJob>& job, SsdUrgency& urgency, bool may_register) {
  std::unique_lock guard(lock_);
  const auto can_register = [&] { return may_register && may_register_ && !is_registering_; };
  wake_.wait(guard, [&] { return is_stopped_ || has_work() || can_register(); });
  if (is_stopped_) {
    return Turn::STOP;
  }
  if (can_register() && queues_[static_cast<size_t>(SsdUrgency::DEMAND)].empty()) {
    is_registering_ = true;
    return Turn::REGISTER;
  }
  size_t which = 0;
  while (queues_[which].empty()) {
    ++which;
  }
  urgency = static_cast<SsdUrgency>(which);
  writers_ += urgency >= SsdUrgency::WRITE_BACK ? 1U : 0U;
  job = queues_[which].front();
  begun_[thread] = Clock::now();
  return Turn::PIECE;
}

std::unique_ptr<SsdIo> SsdQueue::make_io(bool wants_ring) {
  SsdRingResult ring;
  if (wants_ring) {
    ring = make_ring_io(files_, arena_);
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
  const std::unique_ptr<SsdIo> io = make_io(wants_ring);
  bool may_register = io->is_ring();
  std::vector<SsdOutcome> ended;
  std::shared_ptr<SsdJob> job;
  SsdUrgency urgency = SsdUrgency::DEMAND;
  while (true) {
    const Turn turn = next(thread, job, urgency, may_register);
    if (turn == Turn::STOP) {
      break;
    }
    if (turn == Turn::REGISTER) {
      may_register = register_slice(*io);
    } else {
      run_piece(thread, *io, *job, urgency, ended);
      job.reset();
    }
  }
  {
    const std::lock_guard guard(lock_);
    --running_;
  }
  wake_.notify_all();
}

void SsdQueue::run_piece(size_t thread, SsdIo& io, SsdJob& job, SsdUrgency urgency, std::vector<SsdOutcome>& ended) {
  ended.clear();
  static_cast<void>(job.run_piece(io, ended));
  const bool is_in_background = urgency >= SsdUrgency::WRITE_BACK;
  {
    const std::lock_guard guard(lock_);
    begun_[thread] = NEVER;
    auto& queue = queues_[static_cast<size_t>(urgency)];
    if (!queue.empty() && queue.front().get() == &job && !job.has_pieces()) {
      queue.pop_front();
    }
    writers_ -= is_in_background ? 1U : 0U;
  }
  if (is_in_background) {
    wake_.notify_all();
  }
  report(ended, urgency != SsdUrgency::WRITE_BACK);
}

// Whether this thread has more to register.
bool SsdQueue::register_slice(SsdIo& io) {
  const bool has_more = io.register_next();
  {
    const std::lock_guard guard(lock_);
    is_registering_ = false;
    io_.registered += io.has_registered_all() ? 1U : 0U;
    io_.register_error = io.register_error() != 0 ? io.register_error() : io_.register_error;
  }
  wake_.notify_all();
  return has_more;
}

void SsdQueue::register_arena() {
  {
    const std::lock_guard guard(lock_);
    may_register_ = true;
  }
  wake_.notify_all();
}

void SsdQueue::report(const std::vector<SsdOutcome>& ended, bool is_read) {
  if (ended.empty()) {
    return;
  }
  {
    const std::lock_guard guard(lock_);
    for (const SsdOutcome& outcome : ended) {
      (is_read ? stats_.read_bytes : stats_.written_bytes) += outcome.bytes;
      stats_.failed_chunks += outcome.status == SsdStatus::OK ? 0U : 1U;
      outcomes_.push_back(outcome);
    }
  }
  const uint64_t one = 1;
  // It can only fail by being full, and then it is readable.
  static_cast<void>(!::write(event_fd_, &one, sizeof(one)));
}

std::vector<SsdOutcome> SsdQueue::take_outcomes() {
  uint64_t count = 0;
  static_cast<void>(!::read(event_fd_, &count, sizeof(count)));
  std::vector<SsdOutcome> taken;
  const std::lock_guard guard(lock_);
  taken.swap(outcomes_);
  return taken;
}

bool SsdQueue::stop(std::chrono::milliseconds timeout) {
  cancel_waiting();
  {
    std::unique_lock guard(lock_);
    const auto has_ended = [this] { return running_ == 0; };
    if (timeout == FOR_GOOD) {
      wake_.wait(guard, has_ended);
    } else if (!wake_.wait_for(guard, timeout, has_ended)) {
      return false;
    }
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
  return true;
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
      report(ended, which != static_cast<size_t>(SsdUrgency::WRITE_BACK));
    }
  }
}

std::chrono::nanoseconds SsdQueue::longest_piece() const {
  const std::lock_guard guard(lock_);
  const Clock::time_point first = *std::min_element(begun_.begin(), begun_.end());
  return first == NEVER ? std::chrono::nanoseconds(0) : std::max(std::chrono::nanoseconds(1), Clock::now() - first);
}

SsdQueueIo SsdQueue::io() const {
  const std::lock_guard guard(lock_);
  return io_;
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
