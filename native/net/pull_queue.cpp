#include "net/pull_queue.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "threads/event_descriptor.h"

namespace kvpool {
namespace {

PullFault connect_fault_of(StreamFault fault) noexcept {
  switch (fault) {
    case StreamFault::ENDED:
      return PullFault::CANCELLED;
    case StreamFault::LATE:
      return PullFault::LATE;
    default:
      return PullFault::UNREACHABLE;
  }
}

PullFault handshake_fault_of(StreamFault fault) noexcept {
  switch (fault) {
    case StreamFault::ENDED:
      return PullFault::CANCELLED;
    case StreamFault::LATE:
      return PullFault::LATE;
    case StreamFault::STALLED:
      return PullFault::STALLED;
    case StreamFault::CLOSED:
      return PullFault::REFUSED;
    default:
      return PullFault::UNTRUSTED;
  }
}

}  // namespace

PullQueue::PullQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads,
                     size_t jobs_max)
    : arena_(std::move(arena)), board_(std::move(board)), jobs_max_(jobs_max), event_fd_(new_event_fd()), line_(threads) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned number = 0; number < threads; ++number) {
      threads_.add([this] { pull_tasks(); });
    }
    threads_.add([this] { expire_tasks(); });
  } catch (...) {
    stop(ThreadGroup::FOR_GOOD);
    close(event_fd_);
    throw;
  }
}

PullQueue::~PullQueue() {
  stop(ThreadGroup::FOR_GOOD);
  close(event_fd_);
}

uint64_t PullQueue::pull(PullPlan plan) {
  KVPOOL_CHECK(plan.connections > 0 && plan.connections <= STREAM_CONNECTIONS_MAX);
  KVPOOL_CHECK(plan.connections <= plan.rows.size());
  KVPOOL_CHECK(plan.extents > 0 && plan.extent_bytes > 0);
  uint64_t id = 0;
  {
    const std::lock_guard guard(lock_);
    if (is_stopped_ || jobs_.size() >= jobs_max_) {
      return 0;
    }
    id = ++last_job_;
    const uint32_t connections = plan.connections;
    const size_t chunks = plan.rows.size();
    const auto job = std::make_shared<Job>(Job{id, std::move(plan), StreamClock::now(), connections, chunks});
    jobs_.emplace(id, job);
    for (uint32_t connection = 0; connection < connections; ++connection) {
      line_.add(job->plan.peer(), {job, connection});
    }
  }
  wake_.notify_all();
  wake_expiry_.notify_all();
  return id;
}

bool PullQueue::cancel(uint64_t id) {
  std::vector<Task> waiting;
  {
    const std::lock_guard guard(lock_);
    const auto found = jobs_.find(id);
    if (found == jobs_.end() || found->second->chunks_left == 0) {
      return false;
    }
    found->second->is_cancelled = true;
    for (const auto& stream : found->second->streams) {
      stream->end();
    }
    waiting = line_.take([id](const Task& task) { return task.job->id == id; });
  }
  end_tasks(waiting, PullStatus::CANCELLED, PullFault::CANCELLED);
  return true;
}

void PullQueue::pull_tasks() {
  std::unique_lock guard(lock_);
  while (!is_stopped_) {
    const auto next = line_.next();
    if (!next) {
      wake_.wait(guard);
      continue;
    }
    ++stats_.running;
    guard.unlock();
    run(next->second);
    guard.lock();
    --stats_.running;
    line_.end(next->first);
    wake_.notify_all();
  }
}

// Ends what waits for a thread beyond its deadline.
void PullQueue::expire_tasks() {
  std::unique_lock guard(lock_);
  while (!is_stopped_) {
    auto first = StreamClock::time_point::max();
    line_.each([&](const Task& task) { first = std::min(first, task.job->plan.deadline); });
    if (first == StreamClock::time_point::max()) {
      wake_expiry_.wait(guard);
      continue;
    }
    const auto now = StreamClock::now();
    if (first > now) {
      wake_expiry_.wait_until(guard, first);
      continue;
    }
    const auto late = line_.take([now](const Task& task) { return task.job->plan.deadline <= now; });
    guard.unlock();
    end_tasks(late, PullStatus::FAILED, PullFault::LATE);
    guard.lock();
  }
}

ExtentReceiver PullQueue::make_receiver(const Task& task) {
  const auto waited = std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - task.job->begun);
  return {task.job->plan, task.connection, *arena_, *board_,
          [this, waited, job = task.job](const PullOutcome& outcome) { report(*job, outcome, waited); }};
}

void PullQueue::end_tasks(const std::vector<Task>& tasks, PullStatus status, PullFault fault) {
  for (const Task& task : tasks) {
    make_receiver(task).end_all(status, fault);
    end_connection(*task.job);
  }
}

void PullQueue::run(const Task& task) {
  ExtentReceiver receiver = make_receiver(task);
  receive(task, receiver);
  end_connection(*task.job);
}

void PullQueue::receive(const Task& task, ExtentReceiver& receiver) {
  const PullPlan& plan = task.job->plan;
  int error = 0;
  const auto stream = TcpStream::open(plan.address, error);
  if (stream == nullptr) {
    receiver.end_all(PullStatus::FAILED, PullFault::UNREACHABLE);
    return;
  }
  if (!begin_stream(*task.job, stream)) {
    receiver.end_all(PullStatus::CANCELLED, PullFault::CANCELLED);
    return;
  }
  receive_from(plan, stream, receiver);
  const std::lock_guard guard(lock_);
  std::erase(task.job->streams, stream);
}

// `end` of the TCP stream, which the job has, reaches an encrypted one as well.
void PullQueue::receive_from(const PullPlan& plan, const std::shared_ptr<TcpStream>& tcp, ExtentReceiver& receiver) {
  const StreamTimes times{plan.deadline, plan.stall};
  const auto end = [&](StreamFault fault, PullFault reason) {
    receiver.end_all(fault == StreamFault::ENDED ? PullStatus::CANCELLED : PullStatus::FAILED, reason);
  };
  StreamFault fault = tcp->connect(plan.address, plan.port, times);
  if (fault != StreamFault::NONE) {
    end(fault, connect_fault_of(fault));
    return;
  }
  if (!plan.is_encrypted) {
    receiver.run(*tcp);
    return;
  }
  auto session = make_tls_client(tcp->fd(), plan.ticket);
  if (session == nullptr) {
    end(StreamFault::BROKEN, PullFault::UNTRUSTED);
    return;
  }
  TlsStream tls(tcp, std::move(session));
  fault = tls.handshake(times);
  if (fault == StreamFault::NONE) {
    receiver.run(tls);
  } else {
    end(fault, handshake_fault_of(fault));
  }
}

// False where the job is to end: nobody would end a stream that is begun now.
bool PullQueue::begin_stream(Job& job, const std::shared_ptr<TcpStream>& stream) {
  const std::lock_guard guard(lock_);
  if (job.is_cancelled || is_stopped_) {
    return false;
  }
  job.streams.push_back(stream);
  return true;
}

void PullQueue::end_connection(Job& job) {
  const std::lock_guard guard(lock_);
  if (--job.connections_left == 0) {
    jobs_.erase(job.id);
  }
}

void PullQueue::report(Job& job, PullOutcome outcome, std::chrono::microseconds waited) {
  outcome.job = job.id;
  outcome.waited = waited;
  {
    const std::lock_guard guard(lock_);
    stats_.received_bytes += outcome.bytes;
    (outcome.status == PullStatus::DONE ? stats_.pulled_chunks : stats_.failed_chunks) += 1;
    outcomes_.push_back(outcome);
    --job.chunks_left;
  }
  notify(event_fd_);
}

std::vector<PullOutcome> PullQueue::take_outcomes(size_t limit) {
  const std::lock_guard guard(lock_);
  return take_front(outcomes_, limit, event_fd_);
}

bool PullQueue::stop(std::chrono::milliseconds timeout) {
  std::vector<Task> waiting;
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
    waiting = line_.take([](const Task&) { return true; });
    for (const auto& [id, job] : jobs_) {
      for (const auto& stream : job->streams) {
        stream->end();
      }
    }
  }
  wake_.notify_all();
  wake_expiry_.notify_all();
  end_tasks(waiting, PullStatus::CANCELLED, PullFault::CANCELLED);
  return threads_.join(timeout);
}

PullQueueStats PullQueue::stats() const {
  const std::lock_guard guard(lock_);
  PullQueueStats stats = stats_;
  stats.waiting = line_.waiting();
  return stats;
}

}  // namespace kvpool
