// A byte stream between two nodes: sends all or receives exactly what it is asked to, or names what prevented it.
//
// What it is: the boundary behind which bytes may be plain (`tcp_stream.h`) or encrypted (`tls_stream.h`). What it is not: a format, or
// trust: who sends on it may send anything.
// Each call has two times: `stall`, for which no byte may pass, and `deadline`, at which it ends whatever passes.
// Threads: one sends, one receives; `end` from any thread.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvpool {

enum class StreamFault : uint8_t {
  NONE,
  CLOSED,   // by the other side
  BROKEN,   // an error of the connection
  STALLED,  // no byte passed
  LATE,     // the deadline is over
  ENDED,    // by `end`
};

using StreamClock = std::chrono::steady_clock;

struct StreamTimes {
  StreamClock::time_point deadline;
  std::chrono::milliseconds stall;
};

class ByteStream {
 public:
  ByteStream() = default;
  virtual ~ByteStream() = default;
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  // Sends all parts, one behind the other; `parts` are used up on the way.
  [[nodiscard]] StreamFault send_all(std::span<iovec> parts, const StreamTimes& times);
  // Receives so many bytes. On a fault some of them may have been stored.
  [[nodiscard]] StreamFault receive_all(uint8_t* target, size_t size, const StreamTimes& times);
  // Receives `least` bytes, and more of what the parts have room for where they are there already; `parts` are used up on the way.
  [[nodiscard]] StreamFault receive(std::span<iovec> parts, size_t least, size_t& received, const StreamTimes& times);

  // Has the calls under way, and all later ones, return ENDED.
  virtual void end() noexcept = 0;

 protected:
  // What one step has moved, or a fault. Nothing within the time: STALLED. No byte and no fault: something passed, and it goes on.
  struct Step {
    size_t bytes = 0;
    StreamFault fault = StreamFault::NONE;
  };
  virtual Step send_some(std::span<const iovec> parts, std::chrono::nanoseconds timeout) = 0;
  // `waits_for_all`: it may wait for all of the bytes while the time lasts.
  virtual Step receive_some(std::span<const iovec> parts, bool waits_for_all, std::chrono::nanoseconds timeout) = 0;
};

}  // namespace kvpool
