#include "net/tcp_stream.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>

namespace kvpool {
namespace {

constexpr int BACKLOG = 128;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  [[nodiscard]] const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::optional<SocketAddress> numeric_address(const std::string& address, uint16_t port) {
  SocketAddress found;
  auto* const four = reinterpret_cast<sockaddr_in*>(&found.storage);
  auto* const six = reinterpret_cast<sockaddr_in6*>(&found.storage);
  if (inet_pton(AF_INET, address.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    found.size = sizeof(sockaddr_in);
    return found;
  }
  if (inet_pton(AF_INET6, address.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    found.size = sizeof(sockaddr_in6);
    return found;
  }
  return std::nullopt;
}

// Extents are sent whole: waiting for more to send would only delay the last segment of each.
void send_at_once(int fd) noexcept {
  const int one = 1;
  static_cast<void>(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
}

msghdr message_of(std::span<const iovec> parts) noexcept {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  return message;
}

void set_timeout(int fd, int option, std::chrono::nanoseconds timeout, std::chrono::nanoseconds& current) noexcept {
  if (timeout == current) {
    return;
  }
  // Zero would mean for ever.
  const auto whole = std::max<int64_t>(1, std::chrono::ceil<std::chrono::microseconds>(timeout).count());
  const timeval value{whole / 1'000'000, whole % 1'000'000};
  if (setsockopt(fd, SOL_SOCKET, option, &value, sizeof(value)) == 0) {
    current = timeout;
  }
}

}  // namespace

TcpStream::TcpStream(int fd) noexcept : fd_(fd) {
  const int flags = fcntl(fd_, F_GETFL);
  static_cast<void>(fcntl(fd_, F_SETFL, flags & ~O_NONBLOCK));
  send_at_once(fd_);
}

TcpStream::~TcpStream() { close(fd_); }

std::shared_ptr<TcpStream> TcpStream::open(const std::string& address, int& error) {
  const auto found = numeric_address(address, 0);
  const int fd = found ? socket(found->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
  error = found ? errno : EINVAL;
  return fd < 0 ? nullptr : std::make_shared<TcpStream>(fd);
}

bool TcpStream::begin_connect(const std::string& address, uint16_t port) noexcept {
  const auto found = numeric_address(address, port);
  has_begun_ = found && fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK) == 0 &&
               (::connect(fd_, found->get(), found->size) == 0 || errno == EINPROGRESS);
  return has_begun_;
}

bool TcpStream::is_silent() const noexcept {
  pollfd state{fd_, POLLIN, 0};
  return poll(&state, 1, 0) == 0;
}

StreamFault TcpStream::finish_connect(StreamClock::time_point until) noexcept {
  pollfd waiting{fd_, POLLOUT, 0};
  int ready = 0;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - StreamClock::now()).count();
    ready = poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
  } while (ready < 0 && errno == EINTR);
  int error = ready == 0 ? EAGAIN : errno;
  socklen_t size = sizeof(error);
  if (ready > 0 && getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) {
    static_cast<void>(fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_NONBLOCK));
    return is_ended_ ? StreamFault::ENDED : StreamFault::NONE;
  }
  return fault_of(error);
}

StreamFault TcpStream::connect(const std::string& address, uint16_t port, const StreamTimes& times) {
  const auto found = numeric_address(address, port);
  const auto left = std::min<std::chrono::nanoseconds>(times.stall, times.deadline - StreamClock::now());
  if (!found || left.count() <= 0) {
    return found ? StreamFault::LATE : StreamFault::BROKEN;
  }
  if (has_begun_) {
    return finish_connect(StreamClock::now() + std::chrono::duration_cast<StreamClock::duration>(left));
  }
  set_timeout(fd_, SO_SNDTIMEO, left, send_timeout_);
  if (is_ended_) {
    return StreamFault::ENDED;
  }
  if (::connect(fd_, found->get(), found->size) == 0) {
    return is_ended_ ? StreamFault::ENDED : StreamFault::NONE;
  }
  return fault_of(errno == EINPROGRESS ? EAGAIN : errno);
}

void TcpStream::end() noexcept {
  is_ended_ = true;
  shutdown(fd_, SHUT_RDWR);
}

StreamFault TcpStream::fault_of(int error) const noexcept {
  if (is_ended_) {
    return StreamFault::ENDED;
  }
  return error == EAGAIN || error == EWOULDBLOCK ? StreamFault::STALLED : StreamFault::BROKEN;
}

ByteStream::Step TcpStream::send_some(std::span<const iovec> parts, std::chrono::nanoseconds timeout) {
  set_timeout(fd_, SO_SNDTIMEO, timeout, send_timeout_);
  const msghdr message = message_of(parts);
  while (!is_ended_) {
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent > 0) {
      return {static_cast<size_t>(sent), StreamFault::NONE};
    }
    if (sent < 0 && errno != EINTR) {
      return {0, fault_of(errno)};
    }
  }
  return {0, StreamFault::ENDED};
}

ByteStream::Step TcpStream::receive_some(std::span<const iovec> parts, bool waits_for_all, std::chrono::nanoseconds timeout) {
  msghdr message = message_of(parts);
  set_timeout(fd_, SO_RCVTIMEO, timeout, receive_timeout_);
  while (!is_ended_) {
    const ssize_t received = recvmsg(fd_, &message, waits_for_all ? MSG_WAITALL : 0);
    if (received > 0) {
      return {static_cast<size_t>(received), StreamFault::NONE};
    }
    if (received == 0) {
      return {0, is_ended_ ? StreamFault::ENDED : StreamFault::CLOSED};
    }
    if (errno != EINTR) {
      return {0, fault_of(errno)};
    }
  }
  return {0, StreamFault::ENDED};
}

TcpListener::TcpListener(const std::string& address, uint16_t port) {
  const auto wanted = numeric_address(address, port);
  if (!wanted) {
    throw std::system_error(EINVAL, std::generic_category(), "cannot listen on " + address + ": it is no numeric address");
  }
  fd_ = socket(wanted->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int one = 1;
  SocketAddress found;
  found.size = sizeof(found.storage);
  if (fd_ < 0 || setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
      bind(fd_, wanted->get(), wanted->size) != 0 || listen(fd_, BACKLOG) != 0 ||
      getsockname(fd_, reinterpret_cast<sockaddr*>(&found.storage), &found.size) != 0) {
    const int error = errno;
    if (fd_ >= 0) {
      close(fd_);
    }
    throw std::system_error(error, std::generic_category(), "cannot listen on " + address + " port " + std::to_string(port));
  }
  // Both families have the port at the same place.
  port_ = ntohs(reinterpret_cast<const sockaddr_in*>(&found.storage)->sin_port);
}

TcpListener::~TcpListener() { close(fd_); }

int TcpListener::accept() const noexcept {
  const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  return fd < 0 ? -errno : fd;
}

}  // namespace kvpool
