#include "net/byte_stream.h"

#include <algorithm>

namespace kvpool {
namespace {

// The time of a step, and the fault where nothing passes within it.
struct StepTime {
  std::chrono::nanoseconds timeout;
  StreamFault fault;
};

StepTime step_time(const StreamTimes& times) {
  const auto left = times.deadline - StreamClock::now();
  return left < times.stall ? StepTime{left, StreamFault::LATE} : StepTime{times.stall, StreamFault::STALLED};
}

// Cuts what was moved off the front of the parts.
std::span<iovec> rest_of(std::span<iovec> parts, size_t moved) {
  while (!parts.empty() && moved >= parts.front().iov_len) {
    moved -= parts.front().iov_len;
    parts = parts.subspan(1);
  }
  if (!parts.empty()) {
    parts.front().iov_base = static_cast<uint8_t*>(parts.front().iov_base) + moved;
    parts.front().iov_len -= moved;
  }
  return parts;
}

}  // namespace

StreamFault ByteStream::send_all(std::span<iovec> parts, const StreamTimes& times) {
  for (parts = rest_of(parts, 0); !parts.empty();) {
    const StepTime time = step_time(times);
    if (time.timeout.count() <= 0) {
      return StreamFault::LATE;
    }
    const Step step = send_some(parts, time.timeout);
    if (step.fault != StreamFault::NONE) {
      return step.fault == StreamFault::STALLED ? time.fault : step.fault;
    }
    parts = rest_of(parts, step.bytes);
  }
  return StreamFault::NONE;
}

StreamFault ByteStream::receive_all(uint8_t* target, size_t size, const StreamTimes& times) {
  iovec part{target, size};
  size_t received = 0;
  return receive({&part, 1}, size, received, times);
}

StreamFault ByteStream::receive(std::span<iovec> parts, size_t least, size_t& received, const StreamTimes& times) {
  size_t room = 0;
  for (const iovec& part : parts) {
    room += part.iov_len;
  }
  const bool waits_for_all = room == least;
  received = 0;
  while (received < least) {
    const StepTime time = step_time(times);
    if (time.timeout.count() <= 0) {
      return StreamFault::LATE;
    }
    const Step step = receive_some(parts, waits_for_all, time.timeout);
    if (step.fault != StreamFault::NONE) {
      return step.fault == StreamFault::STALLED ? time.fault : step.fault;
    }
    parts = rest_of(parts, step.bytes);
    received += step.bytes;
  }
  return StreamFault::NONE;
}

}  // namespace kvpool
