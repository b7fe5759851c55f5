#include "net/pull_queue.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

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

void PullJob::end() noexcept {
  LineJob::end();
  for (const auto& stream : streams) {
    stream->end();
  }
}

PullQueue::PullQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads,
                     size_t jobs_max)
    : PullLine("kvpool-pull", jobs_max, std::move(arena), std::move(board)), shares_(threads) {
  KVPOOL_CHECK(threads > 0);
  start(threads, [this](unsigned) { pull_tasks(); });
  start(1, [this](unsigned) { end_late_ones(); });
}

uint64_t PullQueue::pull(PullPlan plan) {
  KVPOOL_CHECK(plan.parts <= STREAM_CONNECTIONS_MAX);
  plan.may_come_again = true;
  return add(std::make_shared<PullJob>(std::move(plan)));
}

void PullQueue::connect_ahead(const std::string& address, uint16_t port, uint32_t connections) {
  const auto until = StreamClock::now() + AHEAD_LIFE;
  change([&] {
    const auto is_there = [&](const Ahead& one) { return one.is_to(address, port); };
    auto there = std::count_if(ahead_.begin(), ahead_.end(), is_there);
    for (; there < connections && ahead_.size() < AHEAD_MAX && !is_stopped(); ++there) {
      int error = 0;
      auto stream = TcpStream::open(address, error);
      if (stream == nullptr || !stream->begin_connect(address, port)) {
        return;
      }
      ahead_.push_back({address, port, std::move(stream), until});
    }
  });
}

// nullptr where there is none.
std::shared_ptr<TcpStream> PullQueue::take_ahead(const PullPlan& plan) {
  const Guard guard = lock();
  const auto found = std::find_if(ahead_.begin(), ahead_.end(), [&](const Ahead& one) {
    return one.is_to(plan.address, plan.port) && one.until > StreamClock::now() && one.stream->is_silent();
  });
  if (found == ahead_.end()) {
    return nullptr;
  }
  auto stream = std::move(found->stream);
  ahead_.erase(found);
  return stream;
}

void PullQueue::pull_tasks() {
  const auto begins = [this](const PullJob& job) {
    const bool has_thread = shares_.begin(job.peer);
    running_ += has_thread ? 1U : 0U;
    return has_thread;
  };
  while (const auto task = next(begins)) {
    SlotLanding landing = landing_of(*task);
    receive(*task, landing);
    change([&] {
      --running_;
      shares_.end(task->job->peer);
    });
  }
}

// Ends what waits for a thread beyond its deadline, and connections that nobody has taken.
void PullQueue::end_late_ones() {
  Guard guard = lock();
  while (!is_stopped()) {
    auto first = StreamClock::time_point::max();
    each_waiting([&](const Rest& rest) { first = std::min(first, rest.job->plan.deadline); });
    const auto now = StreamClock::now();
    while (!ahead_.empty() && ahead_.front().until <= now) {
      ahead_.pop_front();
    }
    first = ahead_.empty() ? first : std::min(first, ahead_.front().until);
    if (first > now) {
      wait(guard, first);
      continue;
    }
    const auto late = take([now](const PullJob& job) { return job.plan.deadline <= now; });
    guard.unlock();
    for (const Rest& rest : late) {
      end_rest(rest, PullStatus::FAILED, PullFault::LATE);
    }
    guard.lock();
  }
  ahead_.clear();
}

void PullQueue::receive(const Task& task, SlotLanding& landing) {
  PullJob& job = *task.job;
  int error = 0;
  auto stream = take_ahead(job.plan);
  stream = stream == nullptr ? TcpStream::open(job.plan.address, error) : stream;
  if (stream == nullptr) {
    landing.end_all(PullStatus::FAILED, PullFault::UNREACHABLE);
    return;
  }
  if (!begin_stream(job, stream)) {
    landing.end_all(PullStatus::CANCELLED, PullFault::CANCELLED);
    return;
  }
  receive_from(task, stream, landing);
  const Guard guard = lock();
  std::erase(job.streams, stream);
}

// `end` of the TCP stream, which the job has, reaches an encrypted one as well.
void PullQueue::receive_from(const Task& task, const std::shared_ptr<TcpStream>& tcp, SlotLanding& landing) {
  const PullPlan& plan = task.job->plan;
  ExtentReceiver receiver(plan, task.part, landing);
  const StreamTimes times{plan.deadline, plan.stall};
  const auto end = [&](StreamFault fault, PullFault reason) {
    landing.end_all(fault == StreamFault::ENDED ? PullStatus::CANCELLED : PullStatus::FAILED, reason);
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
bool PullQueue::begin_stream(PullJob& job, const std::shared_ptr<TcpStream>& stream) {
  const Guard guard = lock();
  if (!job.has_ended()) {
    job.streams.push_back(stream);
  }
  return !job.has_ended();
}

PullQueueStats PullQueue::stats() const {
  const Guard guard = lock();
  PullQueueStats stats{0, running_, landed_bytes_.load(std::memory_order_relaxed),
                       pulled_chunks_.load(std::memory_order_relaxed), failed_chunks_.load(std::memory_order_relaxed)};
  each_waiting([&](const Rest& rest) { stats.waiting += rest.parts - rest.next; });
  return stats;
}

}  // namespace kvpool
