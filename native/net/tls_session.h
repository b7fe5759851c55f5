// TLS 1.3 on one connection, by a library: nothing here is cryptography of our own.
//
// What it is: the two sides of a pull prove to one another that they have its ticket, and from then on bytes are encrypted and whole.
// The ticket is a key that both had before (an external PSK, RFC 8446), always with an ephemeral exchange beside it: no certificates,
// and who learns a ticket later cannot read what passed. Its first half names it in clear, its second half is the secret.
// One version, one cipher, no tickets, no early data: nothing is negotiated that could be talked down.
// What it is not: a stream: it never waits. It reads and writes a socket as far as that goes at once; the socket is its user's.
// Threads: one at a time.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/stream_format.h"

namespace kvpool {

inline constexpr size_t TLS_IDENTITY_BYTES = TICKET_BYTES / 2;

enum class TlsState : uint8_t {
  DONE,
  WAITS_TO_READ,
  WAITS_TO_WRITE,
  CLOSED,  // by the other side
  BROKEN,  // no TLS, another key, other bytes than were sent, or an error of the connection
};

class TlsSession {
 public:
  TlsSession() = default;
  virtual ~TlsSession() = default;
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Goes on with the handshake. DONE: the other side has the ticket too.
  [[nodiscard]] virtual TlsState handshake() = 0;
  // Stores up to `size` bytes of what is there. DONE: `received` of them, at least one. REQUIRES: size > 0.
  [[nodiscard]] virtual TlsState read(uint8_t* target, size_t size, size_t& received) = 0;
  // Encrypts the front of the parts, and says how many bytes: what `flush` sends. 0: it is broken. REQUIRES: `flush` was DONE.
  [[nodiscard]] virtual size_t seal(std::span<const iovec> parts) = 0;
  // Sends what was encrypted. DONE: all of it. `sent`: what went out, on the wire.
  [[nodiscard]] virtual TlsState flush(size_t& sent) = 0;
};

// The library that TLS is by, with its version, as it says itself; empty: this build or this machine has none. Any thread.
[[nodiscard]] std::string tls_library();

// The puller's side. nullptr without TLS, or without memory.
[[nodiscard]] std::unique_ptr<TlsSession> make_tls_client(int fd, const StreamTicket& ticket);

// The owner's sides. Any thread.
class TlsAcceptor {
 public:
  // The ticket whose first half that is; called within `handshake`.
  using Find = std::function<std::optional<StreamTicket>(const uint8_t* identity)>;

  TlsAcceptor() = default;
  virtual ~TlsAcceptor() = default;
  TlsAcceptor(const TlsAcceptor&) = delete;
  TlsAcceptor& operator=(const TlsAcceptor&) = delete;

  // REQUIRES: the acceptor outlives its sessions' handshakes. nullptr without memory.
  [[nodiscard]] virtual std::unique_ptr<TlsSession> accept(int fd) = 0;
};

// Throws std::system_error, with ENOTSUP where this build or this machine has no TLS.
[[nodiscard]] std::unique_ptr<TlsAcceptor> make_tls_acceptor(TlsAcceptor::Find find);

}  // namespace kvpool
