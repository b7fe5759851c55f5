// The threads that pull chunks from peers, and the line before them.
//
// Guarantees, beside those of a JobLine:
// 1. Every chunk is reported by the job's deadline at the latest; after that nothing is written to its slot.
// 2. A job takes a thread for each of its connections. One peer takes at most half of the threads: one that stalls delays its own
//    jobs alone.
// 3. A connection that was made ahead is used by one job of its peer at most, and ends when none has taken it in time.
// 4. `cancel` and `stop` cut the connections; no byte is received when `stop` has returned true.
//
// Threads: any. The lock is held neither while bytes move nor while a connection is made.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "net/extent_receiver.h"
#include "net/peer_shares.h"
#include "net/pull_line.h"
#include "net/tls_stream.h"

namespace kvpool {

struct PullQueueStats {
  uint64_t waiting = 0;  // connections to be made
  uint64_t running = 0;
  uint64_t received_bytes = 0;
  uint64_t pulled_chunks = 0;
  uint64_t failed_chunks = 0;
};

struct PullJob : PlannedPull<PullPlan> {
  using PlannedPull::PlannedPull;
  // REQUIRES: the line's lock is held.
  void end() noexcept;

  const std::string peer = plan.peer();
  std::vector<std::shared_ptr<TcpStream>> streams{};  // guarded by the line's lock
};

class PullQueue final : public PullLine<PullJob> {
 public:
  // REQUIRES: threads > 0. Throws std::system_error where there are no threads or descriptors to be had.
  PullQueue(std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board, unsigned threads, size_t jobs_max);
  ~PullQueue() { stop(ThreadGroup::FOR_GOOD); }

  // A job's number; 0 where the line is full or the queue stopped. REQUIRES: as PullLine; STREAM_CONNECTIONS_MAX connections at most.
  [[nodiscard]] uint64_t pull(PullPlan plan);

  // Begins to make so many connections to a peer that has been asked for chunks: they are made while its offer is on its way. Those
  // that are there already count. Never waits; what cannot be connected is seen by the job.
  void connect_ahead(const std::string& address, uint16_t port, uint32_t connections);

  [[nodiscard]] PullQueueStats stats() const;

 private:
  // Of all peers: more are made by their jobs.
  static constexpr size_t AHEAD_MAX = 64;
  // Less than a peer waits for the hello of a connection.
  static constexpr std::chrono::milliseconds AHEAD_LIFE{1500};
  struct Ahead {
    [[nodiscard]] bool is_to(const std::string& other, uint16_t its_port) const { return port == its_port && address == other; }

    std::string address;
    uint16_t port;
    std::shared_ptr<TcpStream> stream;
    StreamClock::time_point until;
  };

  [[nodiscard]] std::shared_ptr<TcpStream> take_ahead(const PullPlan& plan);
  void pull_tasks();
  void end_late_ones();
  void receive(const Task& task, SlotLanding& landing);
  [[nodiscard]] bool begin_stream(PullJob& job, const std::shared_ptr<TcpStream>& stream);
  void receive_from(const Task& task, const std::shared_ptr<TcpStream>& tcp, SlotLanding& landing);

  PeerShares<std::string> shares_;  // guarded by the line's lock
  uint64_t running_ = 0;            // guarded by the line's lock
  std::deque<Ahead> ahead_;         // oldest first; guarded by the line's lock
};

}  // namespace kvpool
