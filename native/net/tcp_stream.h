// Plain TCP: a stream, and the socket that listens for them.
//
// What it is: sockets with deadlines. What it is not: names or routes: addresses are numeric, IPv4 or IPv6.
// Calls block in the kernel with its own timeouts (SO_RCVTIMEO, SO_SNDTIMEO): one system call moves up to a whole piece.
// Threads: as `ByteStream`. TcpListener: one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "net/byte_stream.h"

namespace kvpool {

class TcpStream final : public ByteStream {
 public:
  // Takes over a socket that is connected.
  explicit TcpStream(int fd) noexcept;
  // A socket that is not connected yet, so that `end` reaches `connect`; nullptr where the address is not numeric or there
  // is no descriptor: `error` is the errno.
  [[nodiscard]] static std::shared_ptr<TcpStream> open(const std::string& address, int& error);
  ~TcpStream() override;

  // Begins to connect, without waiting. False where that cannot be.
  [[nodiscard]] bool begin_connect(const std::string& address, uint16_t port) noexcept;
  // Whether the other side has neither ended nor sent anything.
  [[nodiscard]] bool is_silent() const noexcept;
  // Connects, or waits for what has begun.
  [[nodiscard]] StreamFault connect(const std::string& address, uint16_t port, const StreamTimes& times);
  void end() noexcept override;
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool is_ended() const noexcept { return is_ended_; }

 protected:
  Step send_some(std::span<const iovec> parts, std::chrono::nanoseconds timeout) override;
  Step receive_some(std::span<const iovec> parts, bool waits_for_all, std::chrono::nanoseconds timeout) override;

 private:
  [[nodiscard]] StreamFault fault_of(int error) const noexcept;
  [[nodiscard]] StreamFault finish_connect(StreamClock::time_point until) noexcept;

  const int fd_;  // owned
  bool has_begun_ = false;  // to connect, without waiting
  std::atomic<bool> is_ended_ = false;
  std::chrono::nanoseconds send_timeout_{0};  // of the socket; 0: none was set
  std::chrono::nanoseconds receive_timeout_{0};
};

class TcpListener {
 public:
  // Listens there; port 0: any that is free. Throws std::system_error, with EINVAL where the address is not numeric.
  TcpListener(const std::string& address, uint16_t port);
  ~TcpListener();
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  [[nodiscard]] uint16_t port() const noexcept { return port_; }
  // Readable while somebody waits to be accepted.
  [[nodiscard]] int fd() const noexcept { return fd_; }
  // A socket that is connected and does not block; negative: minus the errno, EAGAIN where nobody waits.
  [[nodiscard]] int accept() const noexcept;

 private:
  int fd_ = -1;  // owned
  uint16_t port_ = 0;
};

}  // namespace kvpool
