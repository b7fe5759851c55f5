#include "net/tls_stream.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvpool {

TlsStream::TlsStream(std::shared_ptr<TcpStream> tcp, std::unique_ptr<TlsSession> session)
    : tcp_(std::move(tcp)), session_(std::move(session)) {}

void TlsStream::end() noexcept { tcp_->end(); }

StreamFault TlsStream::fault_of(TlsState state) const noexcept {
  if (tcp_->is_ended()) {
    return StreamFault::ENDED;
  }
  return state == TlsState::CLOSED ? StreamFault::CLOSED : StreamFault::BROKEN;
}

// Until the session can go on. What is no wait is a fault.
StreamFault TlsStream::wait(TlsState state, StreamClock::time_point until) const {
  if (tcp_->is_ended() || (state != TlsState::WAITS_TO_READ && state != TlsState::WAITS_TO_WRITE)) {
    return fault_of(state);
  }
  pollfd waiting{tcp_->fd(), static_cast<short>(state == TlsState::WAITS_TO_READ ? POLLIN : POLLOUT), 0};
  while (true) {
    const auto left = std::max(StreamClock::duration::zero(), until - StreamClock::now());
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec timeout{whole.count(), std::chrono::nanoseconds(left - whole).count()};
    const int ready = ppoll(&waiting, 1, &timeout, nullptr);
    if (ready > 0) {
      return StreamFault::NONE;
    }
    if (ready == 0) {
      return tcp_->is_ended() ? StreamFault::ENDED : StreamFault::STALLED;
    }
    if (errno != EINTR) {
      return fault_of(TlsState::BROKEN);
    }
  }
}

StreamFault TlsStream::handshake(const StreamTimes& times) {
  const auto stalled = StreamClock::now() + times.stall;
  while (true) {
    const TlsState state = session_->handshake();
    if (state == TlsState::DONE) {
      return tcp_->is_ended() ? StreamFault::ENDED : StreamFault::NONE;
    }
    const StreamFault fault = wait(state, std::min(stalled, times.deadline));
    if (fault != StreamFault::NONE) {
      return fault == StreamFault::STALLED && times.deadline < stalled ? StreamFault::LATE : fault;
    }
  }
}

// Bytes count as sent once their records are: a step that sends a part of them has moved none yet.
ByteStream::Step TlsStream::send_some(std::span<const iovec> parts, std::chrono::nanoseconds timeout) {
  const auto until = StreamClock::now() + timeout;
  if (sealed_ == 0) {
    sealed_ = session_->seal(parts);
    if (sealed_ == 0) {
      return {0, fault_of(TlsState::BROKEN)};
    }
  }
  size_t sent = 0;
  const TlsState state = session_->flush(sent);
  if (state == TlsState::DONE) {
    return {std::exchange(sealed_, 0), StreamFault::NONE};
  }
  return {0, sent > 0 && state == TlsState::WAITS_TO_WRITE ? StreamFault::NONE : wait(state, until)};
}

ByteStream::Step TlsStream::receive_some(std::span<const iovec> parts, bool waits_for_all, std::chrono::nanoseconds timeout) {
  const auto until = StreamClock::now() + timeout;
  size_t total = 0;
  for (const iovec& part : parts) {
    for (size_t at = 0; at < part.iov_len;) {
      size_t received = 0;
      const TlsState state = session_->read(static_cast<uint8_t*>(part.iov_base) + at, part.iov_len - at, received);
      at += received;
      total += received;
      if (received > 0) {
        continue;
      }
      const bool waits = total == 0 || waits_for_all;
      const StreamFault fault = waits ? wait(state, until) : StreamFault::STALLED;
      if (fault != StreamFault::NONE) {
        return {total, total > 0 ? StreamFault::NONE : fault};
      }
    }
  }
  return {total, StreamFault::NONE};
}

}  // namespace kvpool
