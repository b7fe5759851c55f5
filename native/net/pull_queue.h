// The threads that pull chunks from peers, and the line before them.
//
// Guarantees:
// 1. Every chunk of an accepted job is reported exactly once, by the job's deadline at the latest; after that nothing is written to
//    its slot.
// 2. A job takes a thread for each of its connections. One peer takes at most half of the threads: one that stalls delays its own
//    jobs alone.
// 3. The line is bounded: a full one refuses. `stop` cuts the connections; no byte is received when it returns true.
//
// Threads: any. A lock is held neither while bytes move nor while a connection is made.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "threads/thread_group.h"
#include "net/extent_receiver.h"
#include "net/peer_line.h"
#include "net/tls_stream.h"

namespace kvpool {

struct PullQueueStats {
  uint64_t waiting = 0;  // connections to be made
  uint64_t running = 0;
  uint64_t received_bytes = 0;
  uint64_t pulled_chunks = 0;
  uint64_t failed_chunks = 0;
};

class PullQueue {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where there are no threads or descriptors to be had.
  PullQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max);
  ~PullQueue();
  PullQueue(const PullQueue&) = delete;
  PullQueue& operator=(const PullQueue&) = delete;

  // A job's number; 0 where the line is full or the queue stopped. REQUIRES: 1 to STREAM_CONNECTIONS_MAX connections, at most one a
  // row; every row inside arena and index, in a slot of its own where no extent has landed.
  [[nodiscard]] uint64_t pull(PullPlan plan);
  // Ends what has not ended of a job as CANCELLED; reported like any end. False where it has ended, or never was.
  bool cancel(uint64_t job);

  // What has ended since the last call, the first `limit` of it. The descriptor is readable while there is something.
  [[nodiscard]] std::vector<PullOutcome> take_outcomes(size_t limit = SIZE_MAX);
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }

  // False where a thread has not ended within the time; another call goes on waiting. The destructor waits for good.
  bool stop(std::chrono::milliseconds timeout);

  [[nodiscard]] PullQueueStats stats() const;
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 private:
  struct Job {
    uint64_t id;
    PullPlan plan;
    StreamClock::time_point begun;
    uint32_t connections_left;                      // guarded by the queue's lock
    size_t chunks_left;                             // that were not reported; guarded by the queue's lock
    bool is_cancelled = false;                      // guarded by the queue's lock
    std::vector<std::shared_ptr<TcpStream>> streams{};  // guarded by the queue's lock
  };
  struct Task {
    std::shared_ptr<Job> job;
    uint32_t connection;
  };
  void pull_tasks();
  void expire_tasks();
  void run(const Task& task);
  void receive(const Task& task, ExtentReceiver& receiver);
  [[nodiscard]] bool begin_stream(Job& job, const std::shared_ptr<TcpStream>& stream);
  void receive_from(const PullPlan& plan, const std::shared_ptr<TcpStream>& tcp, ExtentReceiver& receiver);
  void end_tasks(const std::vector<Task>& tasks, PullStatus status, PullFault fault);
  [[nodiscard]] ExtentReceiver make_receiver(const Task& task);
  void report(Job& job, PullOutcome outcome, std::chrono::microseconds waited);
  void end_connection(Job& job);

  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  const size_t jobs_max_;
  const int event_fd_;  // owned

  mutable std::mutex lock_;
  std::condition_variable wake_;                   // of threads that pull
  std::condition_variable wake_expiry_;
  PeerLine<std::string, Task> line_;               // guarded by lock_
  std::map<uint64_t, std::shared_ptr<Job>> jobs_;  // guarded by lock_
  uint64_t last_job_ = 0;                          // guarded by lock_
  bool is_stopped_ = false;                        // guarded by lock_
  std::vector<PullOutcome> outcomes_;              // guarded by lock_
  PullQueueStats stats_;                           // guarded by lock_
  ThreadGroup threads_{"kvpool-pull"};
};

}  // namespace kvpool
