// A client's end of the daemon's socket: sends a frame, and receives the one that answers it.
//
// What it is: one exchange at a time, by a deadline. What it is not: the owner of its descriptor, nor a reader of what is in a frame:
// only the length is checked here, before room is made for so many bytes.
//
// An exchange:
//   begin       the deadline; descriptors that nobody took are closed
//   send        what the writer holds; waits only where the daemon does not read
//   receive     a whole frame and nothing behind it; the kernel bounds each wait, so that an answer costs one call of it
// `send` and `receive` go on where they were after INTERRUPTED. After any other end but DONE the socket is of no use: an answer may
// still be on its way.
//
// Threads: one at a time; `forget` from any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "frames/frame_writer.h"

namespace kvpool {

enum class FrameStatus {
  DONE,
  INTERRUPTED,  // by a signal
  UNREAD,       // the daemon has not read all of the frame in time
  LATE,         // the daemon has not answered in time
  CLOSED,       // the daemon has closed the connection
  BAD_LENGTH,   // of the answer: no frame has it
  EXCESS,       // bytes behind the answer
  FAILED,       // see `error`
};

class FrameSocket {
 public:
  // REQUIRES: a stream socket, open until `forget`. One that blocks costs one call less where the answer is not there yet.
  explicit FrameSocket(int fd) : fd_(fd), buffer_(BUFFER_BYTES) {}
  ~FrameSocket() { close_descriptors(); }
  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;

  // The next frame to be sent.
  [[nodiscard]] FrameWriter& writer() noexcept { return writer_; }

  // Begins an exchange of the finished frame, or of bytes that are frames already, within a time. `descriptors`: at most so many may
  // come with the answer.
  void begin(std::chrono::nanoseconds timeout, size_t descriptors);
  void take_frame() { take_pieces(writer_.finish()); }
  void take_bytes(std::span<const uint8_t> frames);

  [[nodiscard]] FrameStatus send() noexcept;
  [[nodiscard]] FrameStatus receive();

  // Sends whole frames, or nothing where the socket is full: UNREAD. Does not wait. A part of them was sent: CLOSED.
  [[nodiscard]] FrameStatus post(std::span<const uint8_t> frames) noexcept;

  // The answer's, until the next exchange.
  [[nodiscard]] std::span<const uint8_t> body() const noexcept {
    return {buffer_.data() + FRAME_LENGTH_BYTES, needed_ - FRAME_LENGTH_BYTES};
  }
  // Of descriptors that came with the answer; the caller closes them.
  [[nodiscard]] std::vector<int> take_descriptors() noexcept { return std::exchange(descriptors_, {}); }
  // Those of an answer that is not taken.
  void close_descriptors() noexcept;

  // The descriptor is closed, or about to be.
  void forget() noexcept { fd_.store(-1, std::memory_order_relaxed); }

  // What there is to say about a status: bytes sent and of the frame, the length that the answer announces, bytes behind it, errno.
  [[nodiscard]] size_t sent() const noexcept { return sent_; }
  [[nodiscard]] size_t frame_bytes() const noexcept { return frame_bytes_; }
  [[nodiscard]] uint32_t announced() const noexcept { return announced_; }
  [[nodiscard]] size_t excess() const noexcept { return got_ - needed_; }
  [[nodiscard]] int error() const noexcept { return error_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t BUFFER_BYTES = size_t{64} << 10;

  void take_pieces(std::span<iovec> pieces);
  void note_sent(size_t bytes) noexcept;
  [[nodiscard]] std::chrono::nanoseconds time_left() const noexcept;
  [[nodiscard]] bool wait_at_most(std::chrono::nanoseconds timeout) noexcept;
  [[nodiscard]] ssize_t receive_some() noexcept;
  [[nodiscard]] FrameStatus failed() noexcept;

  std::atomic<int> fd_;
  FrameWriter writer_;
  iovec bytes_{};
  std::span<iovec> unsent_;  // of the writer's pieces, or `bytes_`
  size_t frame_bytes_ = 0;
  size_t sent_ = 0;
  bool is_delayed_ = false;  // some of the time has passed: the frame was not read at once, or a signal came

  // Invariant: `got_` bytes of the answer are at the beginning; `needed_` is its size with the length, 0 until that has arrived.
  std::vector<uint8_t> buffer_;
  size_t got_ = 0;
  size_t needed_ = 0;
  uint32_t announced_ = 0;
  size_t descriptors_max_ = 0;
  std::vector<int> descriptors_;

  std::chrono::nanoseconds timeout_{};
  Clock::time_point deadline_;
  std::chrono::nanoseconds kernel_timeout_{-1};  // that of the socket's receives; negative: none was set
  int error_ = 0;
};

}  // namespace kvpool
