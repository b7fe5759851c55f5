// Connections that have not presented a ticket yet: strangers.
//
// What it is: a bounded number of sockets from which a hello is read as it comes, each for a bounded time, without a thread for any of
// them; where streams are encrypted, their handshakes as well. What it is not: a judge of tickets. Where too many wait, the one is
// ended that has waited longest of the source (an IPv4 address, or the first half of an IPv6 address) that has most: who has a ticket
// presents it at once, and is not ended for others' sake.
// Threads: one.
#pragma once

#include <poll.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "net/byte_stream.h"
#include "net/stream_format.h"
#include "net/tls_session.h"

namespace kvpool {

// Why connections were ended without a byte of a chunk, counted.
struct StrangerCounts {
  uint64_t bad_hello = 0;    // other bytes
  uint64_t unencrypted = 0;  // a plain hello where streams are encrypted
  uint64_t untrusted = 0;    // a handshake that failed: with another ticket's secret, or none
  uint64_t bad_ticket = 0;   // of no offer
  uint64_t repeated = 0;     // a connection of an offer that was made before, or that the offer does not have
  uint64_t silent = 0;       // no whole hello in time
  uint64_t closed = 0;       // by the other side
  uint64_t crowded = 0;      // too many at once
};

class HelloDesk {
 public:
  // `tls`: for streams that are encrypted, else nullptr; it outlives the desk.
  HelloDesk(size_t most, std::chrono::milliseconds timeout, TlsAcceptor* tls) : most_(most), timeout_(timeout), tls_(tls) {}
  ~HelloDesk();
  HelloDesk(const HelloDesk&) = delete;
  HelloDesk& operator=(const HelloDesk&) = delete;

  // A connection with its whole hello: its socket is the taker's. `session`: where it is encrypted.
  struct Presented {
    int fd;
    StreamHello hello;
    std::unique_ptr<TlsSession> session;
  };

  // Takes over a socket that does not block.
  void add(int fd, StrangerCounts& counts);
  // Reads what has come and ends those whose time is over. REQUIRES: of `polls`, what `watch` appended begins at `first`.
  [[nodiscard]] std::vector<Presented> read(const std::vector<pollfd>& polls, size_t first, StrangerCounts& counts);
  void watch(std::vector<pollfd>& polls) const;
  // When the first of them has to end; the latest time there is where there are none.
  [[nodiscard]] StreamClock::time_point next_deadline() const;

 private:
  using Source = std::array<uint8_t, 8>;
  struct Stranger {
    int fd;  // owned
    Source source;
    StreamClock::time_point deadline;
    std::unique_ptr<TlsSession> session;
    bool is_trusted = false;  // it has shown that it has a ticket
    std::array<uint8_t, sizeof(StreamHello)> bytes{};
    size_t received = 0;
  };
  enum class State { WAITING, COMPLETE, CLOSED, BAD, UNENCRYPTED, UNTRUSTED };
  [[nodiscard]] static State read_one(Stranger& stranger);
  [[nodiscard]] static State read_plain(Stranger& stranger);
  [[nodiscard]] static State read_encrypted(Stranger& stranger);
  static void count(State state, StrangerCounts& counts);
  [[nodiscard]] static Source source_of(int fd) noexcept;
  void make_room(const Source& newcomer);

  const size_t most_;
  const std::chrono::milliseconds timeout_;
  TlsAcceptor* const tls_;
  std::deque<Stranger> strangers_;  // oldest first
};

}  // namespace kvpool
