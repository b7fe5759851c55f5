// The owner's side of pulls: listens, recognises tickets, and sends what was offered for them.
//
//   offer ──► waits for its connections ──► SENT        all of them have sent everything, or marked it as gone
//                                       ├──► FAILED     one of them broke, or its reader stalled
//                                       ├──► EXPIRED    its deadline passed before
//                                       └──► CANCELLED  by `withdraw` or `stop`
//
// Guarantees:
// 1. Every accepted offer ends exactly once, by its deadline at the latest; after that nobody reads its slots, so that the lease on
//    them may be released.
// 2. A ticket is good for each connection of its offer once. A stranger costs a descriptor for a bounded time, never a thread.
// 3. A peer takes at most half of the threads, so many bytes per second and so many offered bytes at once.
//
// Threads: any. The lock is not held while bytes move.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "threads/thread_group.h"
#include "net/extent_sender.h"
#include "net/hello_desk.h"
#include "net/peer_shares.h"
#include "net/tls_stream.h"

namespace kvpool {

enum class OfferEnd : uint8_t { SENT = 0, FAILED = 1, EXPIRED = 2, CANCELLED = 3 };

struct OfferOutcome {
  uint64_t offer;
  OfferEnd end;
  uint64_t bytes;        // sent
  uint32_t gone_chunks;  // that could not be sent
};

enum class OfferRefusal : uint8_t { NONE = 0, FULL = 1, REPEATED_TICKET = 2, STOPPED = 3 };

// The number of an offer, or why there is none.
struct OfferAnswer {
  uint64_t offer = 0;
  OfferRefusal refusal = OfferRefusal::NONE;
};

struct ExtentServerOptions {
  std::string address;  // numeric
  uint16_t port = 0;    // 0: any that is free
  unsigned threads = 4;
  size_t offers_max = 256;
  size_t strangers_max = 64;
  size_t connections_max = 256;            // with a ticket, sending or waiting for a thread
  std::chrono::milliseconds hello_timeout{2000};
  std::chrono::milliseconds stall{2000};   // the longest time in which a reader takes no byte
  uint64_t peer_bytes_per_s = 0;           // 0: no bound
  bool is_encrypted = false;               // all streams; plain ones are refused
};

struct ExtentServerStats {
  StrangerCounts strangers;
  uint64_t offers = 0;       // that have not ended
  uint64_t running = 0;      // connections
  uint64_t waiting = 0;      // connections, for a thread
  uint64_t connections = 0;  // with a ticket, ever
  uint64_t sent_bytes = 0;
  uint64_t gone_chunks = 0;
  uint64_t stalled = 0;          // connections whose reader took no byte
  uint64_t broken = 0;           // connections that ended before all was sent
  uint64_t accept_failures = 0;  // no descriptor, mostly
};

class ExtentServer {
 public:
  // Listens when it returns. REQUIRES: threads, offers_max, strangers_max, connections_max > 0. Throws std::system_error.
  ExtentServer(std::shared_ptr<const Mapping> arena, std::shared_ptr<const IndexView> index, const ExtentServerOptions& options);
  ~ExtentServer();
  ExtentServer(const ExtentServer&) = delete;
  ExtentServer& operator=(const ExtentServer&) = delete;

  [[nodiscard]] uint16_t port() const noexcept { return listener_.port(); }

  // REQUIRES: 1 to STREAM_CONNECTIONS_MAX connections, at most one a chunk; every chunk inside arena and index.
  [[nodiscard]] OfferAnswer offer(const StreamTicket& ticket, OfferPlan plan);
  // Ends an offer; reported like any end. False where no offer has the ticket.
  bool withdraw(const StreamTicket& ticket);

  // What has ended since the last call, the first `limit` of it. The descriptor is readable while there is something.
  [[nodiscard]] std::vector<OfferOutcome> take_outcomes(size_t limit = SIZE_MAX);
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }

  // Ends everything. False where a thread has not ended within the time; another call goes on waiting.
  bool stop(std::chrono::milliseconds timeout);

  [[nodiscard]] ExtentServerStats stats() const;
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 private:
  struct Offer {
    uint64_t id;
    StreamTicket ticket;
    std::shared_ptr<const OfferPlan> plan;
    std::shared_ptr<SendPace> pace;
    std::vector<bool> is_claimed;  // by connection
    uint32_t connections_left;
    uint32_t running = 0;
    bool is_over = false;  // no connection is to begin any more
    OfferEnd end = OfferEnd::SENT;
    uint64_t bytes = 0;
    uint32_t gone_chunks = 0;
    OfferStop stop{};
    std::vector<std::shared_ptr<ByteStream>> streams{};  // that run
  };
  struct Task {
    std::shared_ptr<Offer> offer;
    uint32_t connection;
    std::shared_ptr<ByteStream> stream;
  };
  // A peer's offers that have not ended.
  struct PeerUse {
    std::shared_ptr<SendPace> pace;
    uint64_t offers = 0;
  };

  [[nodiscard]] std::unique_ptr<TlsAcceptor> make_acceptor();
  void watch();
  [[nodiscard]] bool accept_all(HelloDesk& desk);
  void send_tasks();
  void finish(const Task& task, const ExtentSender& sender, StreamFault fault);
  // All of these REQUIRE that `lock_` is held.
  void admit(HelloDesk::Presented& presented);
  [[nodiscard]] std::shared_ptr<Offer> find(const uint8_t* ticket) const;
  [[nodiscard]] std::optional<StreamTicket> ticket_named(const uint8_t* identity) const;
  void end_offer(const std::shared_ptr<Offer>& offer, OfferEnd end);
  void settle(const std::shared_ptr<Offer>& offer);
  void expire();
  [[nodiscard]] StreamClock::time_point next_deadline() const;

  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<const IndexView> index_;
  const ExtentServerOptions options_;
  const TcpListener listener_;
  const std::unique_ptr<TlsAcceptor> tls_;  // where streams are encrypted
  const int event_fd_;  // owned; of outcomes
  const int watch_fd_;  // owned; has `watch` look anew

  mutable std::mutex lock_;
  std::condition_variable wake_;
  std::deque<Task> waiting_;                           // for a thread; guarded by lock_
  PeerShares<uint64_t> shares_;                        // guarded by lock_
  std::map<uint64_t, std::shared_ptr<Offer>> offers_;  // guarded by lock_
  std::map<uint64_t, PeerUse> peers_;                  // guarded by lock_
  StreamClock::time_point watched_until_;              // guarded by lock_; when `watch` looks anew by itself
  uint64_t last_offer_ = 0;                            // guarded by lock_
  bool is_stopped_ = false;                            // guarded by lock_
  std::vector<OfferOutcome> outcomes_;                 // guarded by lock_
  ExtentServerStats stats_;                            // guarded by lock_
  ThreadGroup threads_{"kvpool-serve"};
};

}  // namespace kvpool
