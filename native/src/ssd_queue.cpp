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

int new_event_fd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return fd;
}

}  // namespace

SsdQueue::SsdQueue(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena,
                   std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max)
    : files_(std::move(files)),
      arena_(std::move(arena)),
      board_(std::move(board)),
      jobs_max_(jobs_max),
      writers_max_(std::max(1U, threads / 2)),
      event_fd_(new_event_fd()) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned number = 0; number < threads; ++number) {
      threads_.emplace_back([this] { run(); });
      pthread_setname_np(threads_.back().native_handle(), "kvpool-ssd");
    }
  } catch (...) {
    stop();
    close(event_fd_);
    throw;
  }
}

SsdQueue::~SsdQueue() {
  stop();
  close(event_fd_);
}

uint64_t SsdQueue::read(std::vector<SsdRead> chunks, SsdUrgency urgency) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdReadJob>(id, std::move(chunks), files_, arena_, board_), urgency);
}

uint64_t SsdQueue::write(std::vector<SsdWrite> chunks) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdWriteJob>(id, std::move(chunks), files_, arena_), SsdUrgency::WRITE_BACK);
}

uint64_t SsdQueue::verify(std::vector<SsdVerify> chunks) {
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    id = ++last_job_;
  }
  return add(std::make_shared<SsdVerifyJob>(id, std::move(chunks), files_), SsdUrgency::CHECK);
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

// The most urgent job, which stays queued until it has no pieces left; nothing when stopped.
std::shared_ptr<SsdJob> SsdQueue::next(SsdUrgency& urgency) {
  std::unique_lock guard(lock_);
  wake_.wait(guard, [this] { return is_stopped_ || has_work(); });
  if (is_stopped_) {
    return nullptr;
  }
  size_t which = 0;
  while (queues_[which].empty()) {
    ++which;
  }
  urgency = static_cast<SsdUrgency>(which);
  writers_ += urgency >= SsdUrgency::WRITE_BACK ? 1U : 0U;
  return queues_[which].front();
}

void SsdQueue::run() {
  std::vector<SsdOutcome> ended;
  SsdUrgency urgency = SsdUrgency::DEMAND;
  while (const std::shared_ptr<SsdJob> job = next(urgency)) {
    ended.clear();
    static_cast<void>(job->run_piece(ended));
    const bool is_in_background = urgency >= SsdUrgency::WRITE_BACK;
    {
      const std::lock_guard guard(lock_);
      auto& queue = queues_[static_cast<size_t>(urgency)];
      if (!queue.empty() && queue.front() == job && !job->has_pieces()) {
        queue.pop_front();
      }
      writers_ -= is_in_background ? 1U : 0U;
    }
    if (is_in_background) {
      wake_.notify_all();
    }
    report(ended, urgency != SsdUrgency::WRITE_BACK);
  }
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

void SsdQueue::stop() {
  std::array<std::deque<std::shared_ptr<SsdJob>>, SSD_URGENCIES> dropped;
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
    dropped.swap(queues_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
  for (size_t which = 0; which < SSD_URGENCIES; ++which) {
    for (const auto& job : dropped[which]) {
      std::vector<SsdOutcome> ended;
      job->cancel(ended);
      report(ended, which != static_cast<size_t>(SsdUrgency::WRITE_BACK));
    }
  }
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
