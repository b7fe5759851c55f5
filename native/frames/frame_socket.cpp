#include "frames/frame_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvpool {
namespace {

// Of a kernel's timeout: zero would mean for ever.
constexpr std::chrono::microseconds TIMEOUT_MIN(1000);
constexpr size_t DESCRIPTORS_MAX = 8;

// As `poll` takes them.
int milliseconds_of(std::chrono::nanoseconds time) noexcept {
  return static_cast<int>(std::min<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(time).count(), INT32_MAX));
}

msghdr message_of(std::span<iovec> pieces) noexcept {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  return message;
}

}  // namespace

void FrameSocket::begin(std::chrono::nanoseconds timeout, size_t descriptors) {
  close_descriptors();
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
  descriptors_max_ = std::min(descriptors, DESCRIPTORS_MAX);
  descriptors_.reserve(descriptors_max_ == 0 ? 0 : DESCRIPTORS_MAX);
  unsent_ = {};
  frame_bytes_ = sent_ = 0;
  is_delayed_ = false;
  got_ = needed_ = 0;
}

void FrameSocket::take_bytes(std::span<const uint8_t> frames) {
  bytes_ = {const_cast<uint8_t*>(frames.data()), frames.size()};
  take_pieces({&bytes_, 1});
}

void FrameSocket::take_pieces(std::span<iovec> pieces) {
  unsent_ = pieces;
  frame_bytes_ = sent_ = 0;
  for (const iovec& piece : pieces) {
    frame_bytes_ += piece.iov_len;
  }
}

FrameStatus FrameSocket::send() noexcept {
  while (!unsent_.empty()) {
    const int fd = fd_.load(std::memory_order_relaxed);
    const msghdr message = message_of(unsent_);
    const ssize_t taken = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken < 0 && errno != EAGAIN) {
      return failed();
    }
    if (taken > 0) {
      note_sent(static_cast<size_t>(taken));
    }
    if (unsent_.empty()) {
      break;
    }
    is_delayed_ = true;
    pollfd writable{fd, POLLOUT, 0};
    const int ready = ::poll(&writable, 1, milliseconds_of(time_left()));
    if (ready < 0) {
      return failed();
    }
    if (ready == 0) {
      return FrameStatus::UNREAD;
    }
  }
  return FrameStatus::DONE;
}

FrameStatus FrameSocket::receive() {
  for (;;) {
    if (needed_ == 0 && got_ >= FRAME_LENGTH_BYTES) {
      std::memcpy(&announced_, buffer_.data(), sizeof(announced_));
      if (announced_ < FRAME_BODY_BYTES_MIN || announced_ > FRAME_BODY_BYTES_MAX) {
        return FrameStatus::BAD_LENGTH;
      }
      needed_ = FRAME_LENGTH_BYTES + announced_;
      if (buffer_.size() < needed_) {
        buffer_.resize(needed_);
      }
    }
    if (needed_ != 0 && got_ >= needed_) {
      return got_ == needed_ ? FrameStatus::DONE : FrameStatus::EXCESS;
    }
    const bool is_first = got_ == 0;
    // The whole time again where nothing has passed: the socket has it already.
    if (!wait_at_most(is_first && !is_delayed_ ? timeout_ : time_left())) {
      return failed();
    }
    const ssize_t received = receive_some();
    if (received < 0 && errno == EAGAIN && time_left().count() > 0) {
      // The kernel's time is over a little early, or the process has made the socket one that does not wait.
      pollfd readable{fd_.load(std::memory_order_relaxed), POLLIN, 0};
      if (::poll(&readable, 1, milliseconds_of(time_left())) < 0) {
        return failed();
      }
      is_delayed_ = true;
      continue;
    }
    if (received < 0) {
      return errno == EAGAIN ? FrameStatus::LATE : failed();
    }
    if (received == 0) {
      return FrameStatus::CLOSED;
    }
    got_ += static_cast<size_t>(received);
    if (!is_first && time_left().count() == 0) {
      return FrameStatus::LATE;
    }
  }
}

FrameStatus FrameSocket::post(std::span<const uint8_t> frames) noexcept {
  const ssize_t taken =
      ::send(fd_.load(std::memory_order_relaxed), frames.data(), frames.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (taken < 0) {
    return errno == EAGAIN ? FrameStatus::UNREAD : failed();
  }
  frame_bytes_ = frames.size();
  sent_ = static_cast<size_t>(taken);
  return sent_ == frame_bytes_ ? FrameStatus::DONE : FrameStatus::CLOSED;
}

void FrameSocket::note_sent(size_t bytes) noexcept {
  sent_ += bytes;
  while (!unsent_.empty() && bytes >= unsent_.front().iov_len) {
    bytes -= unsent_.front().iov_len;
    unsent_ = unsent_.subspan(1);
  }
  if (!unsent_.empty()) {
    iovec& next = unsent_.front();
    next.iov_base = static_cast<uint8_t*>(next.iov_base) + bytes;
    next.iov_len -= bytes;
  }
}

std::chrono::nanoseconds FrameSocket::time_left() const noexcept {
  return std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(deadline_ - Clock::now()));
}

bool FrameSocket::wait_at_most(std::chrono::nanoseconds timeout) noexcept {
  if (timeout == kernel_timeout_) {
    return true;
  }
  const int64_t whole = std::max(TIMEOUT_MIN, std::chrono::ceil<std::chrono::microseconds>(timeout)).count();
  const timeval bound{whole / 1'000'000, whole % 1'000'000};
  if (::setsockopt(fd_.load(std::memory_order_relaxed), SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof(bound)) != 0) {
    return false;
  }
  kernel_timeout_ = timeout;
  return true;
}

// Descriptors come with the first byte of a frame. Where none are expected, the kernel drops those that come.
ssize_t FrameSocket::receive_some() noexcept {
  const int fd = fd_.load(std::memory_order_relaxed);
  iovec room{buffer_.data() + got_, buffer_.size() - got_};
  if (descriptors_max_ == 0 || got_ > 0) {
    return ::recv(fd, room.iov_base, room.iov_len, 0);
  }
  alignas(cmsghdr) char control[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
  msghdr message = message_of({&room, 1});
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(descriptors_max_ * sizeof(int));
  const ssize_t received = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (received < 0) {
    return received;
  }
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t place = 0; place < count; ++place) {
        int descriptor = -1;
        std::memcpy(&descriptor, CMSG_DATA(part) + place * sizeof(int), sizeof(descriptor));
        descriptors_.push_back(descriptor);
      }
    }
  }
  return received;
}

FrameStatus FrameSocket::failed() noexcept {
  error_ = errno;
  is_delayed_ = true;  // what is left of the time does not begin anew
  return error_ == EINTR ? FrameStatus::INTERRUPTED : FrameStatus::FAILED;
}

void FrameSocket::close_descriptors() noexcept {
  for (const int descriptor : std::exchange(descriptors_, {})) {
    ::close(descriptor);
  }
}

}  // namespace kvpool
