// A stream between two nodes that is encrypted: TLS over a TCP stream.
//
// What it is: a session that waits, with the deadlines of `ByteStream`. The end of the TCP stream is its end. Threads: `end` from any, all else from one.
#pragma once

#include <memory>

#include "net/tcp_stream.h"
#include "net/tls_session.h"

namespace kvpool {

class TlsStream final : public ByteStream {
 public:
  // REQUIRES: the session is of that stream's socket.
  TlsStream(std::shared_ptr<TcpStream> tcp, std::unique_ptr<TlsSession> session);

  // The puller's handshake, within the stall time as a whole. CLOSED: the other side does not know the ticket; BROKEN: it did not
  // show that it does.
  [[nodiscard]] StreamFault handshake(const StreamTimes& times);
  void end() noexcept override;

 protected:
  Step send_some(std::span<const iovec> parts, std::chrono::nanoseconds timeout) override;
  Step receive_some(std::span<const iovec> parts, bool waits_for_all, std::chrono::nanoseconds timeout) override;

 private:
  [[nodiscard]] StreamFault wait(TlsState state, StreamClock::time_point until) const;
  [[nodiscard]] StreamFault fault_of(TlsState state) const noexcept;

  const std::shared_ptr<TcpStream> tcp_;
  const std::unique_ptr<TlsSession> session_;
  size_t sealed_ = 0;  // bytes of the caller's that are encrypted and not sent
};

}  // namespace kvpool
