#include "net/extent_receiver.h"

#include <algorithm>
#include <cstring>

#include "checksum/crc32c.h"
#include "copy/copy_tuning.h"

namespace kvpool {
namespace {

PullFault fault_word_of(StreamFault fault, bool has_heard) noexcept {
  switch (fault) {
    case StreamFault::CLOSED:
      return has_heard ? PullFault::CLOSED : PullFault::REFUSED;
    case StreamFault::STALLED:
      return PullFault::STALLED;
    case StreamFault::LATE:
      return PullFault::LATE;
    case StreamFault::ENDED:
      return PullFault::CANCELLED;
    case StreamFault::NONE:
    case StreamFault::BROKEN:
      break;
  }
  return PullFault::BROKEN;
}

}  // namespace

ExtentReceiver::ExtentReceiver(const PullPlan& plan, uint32_t connection, SlotLanding& landing)
    : plan_(plan),
      connection_(connection),
      landing_(landing),
      times_{plan.deadline, plan.stall},
      chunks_(plan.rows.size() / plan.parts + 1),
      buffer_(is_direct() ? sizeof(StreamMark) : BUFFER_BYTES) {}

void ExtentReceiver::run(ByteStream& stream) {
  stream_ = &stream;
  StreamHello hello = make_hello(plan_.ticket, connection_, plan_.parts);
  iovec part{&hello, sizeof(hello)};
  StreamFault fault = stream.send_all({&part, 1}, times_);
  while (fault == StreamFault::NONE && landing_.left() > 0) {
    uint8_t bytes[sizeof(StreamMark)];
    fault = receive_mark(bytes);
    if (fault != StreamFault::NONE) {
      break;
    }
    const auto mark = read_mark(bytes);
    const bool is_good = mark && is_next(*mark);
    if (!is_good || mark->kind == MarkKind::GONE) {
      land_all();
    }
    if (!is_good) {
      landing_.end_all(PullStatus::BAD_SOURCE, PullFault::FORMAT);
      return;
    }
    has_heard_ = true;
    if (mark->kind == MarkKind::EXTENT) {
      fault = receive_extent(*mark);
    } else if (mark->kind == MarkKind::GONE) {
      of(mark->chunk).is_gone = true;
      landing_.end(mark->chunk, PullStatus::BAD_SOURCE, PullFault::GONE);
    }
    if (buffered_from_ == buffered_to_) {
      land_all();
    }
  }
  land_all();
  landing_.end_all(fault == StreamFault::ENDED ? PullStatus::CANCELLED : PullStatus::FAILED, fault_word_of(fault, has_heard_));
}

// Whether the other side may send this now. Everything behind it is trusted only as far as this reaches.
bool ExtentReceiver::is_next(const StreamMark& mark) const noexcept {
  if (mark.kind == MarkKind::WAITING) {
    return true;
  }
  if (!landing_.has(mark.chunk)) {
    return false;
  }
  const Chunk& chunk = of(mark.chunk);
  if (chunk.is_gone || chunk.next_extent == plan_.extents) {
    return false;
  }
  return mark.kind == MarkKind::GONE || (mark.extent == chunk.next_extent && mark.bytes == plan_.extent_bytes);
}

// Has at least a byte in the buffer. `missing`: of what is wanted now; behind a mark of a large extent come bytes that belong in its
// slot.
StreamFault ExtentReceiver::fill(size_t missing) {
  if (buffered_from_ < buffered_to_) {
    return StreamFault::NONE;
  }
  land_all();
  iovec part{buffer_.data(), is_direct() ? missing : buffer_.size()};
  buffered_from_ = 0;
  buffered_to_ = 0;
  return stream_->receive({&part, 1}, 1, buffered_to_, times_);
}

StreamFault ExtentReceiver::receive_mark(uint8_t* bytes) {
  for (size_t at = 0; at < sizeof(StreamMark);) {
    const StreamFault fault = fill(sizeof(StreamMark) - at);
    if (fault != StreamFault::NONE) {
      return fault;
    }
    const size_t count = std::min(sizeof(StreamMark) - at, buffered_to_ - buffered_from_);
    std::memcpy(bytes + at, buffer_.data() + buffered_from_, count);
    buffered_from_ += count;
    at += count;
  }
  return StreamFault::NONE;
}

// Straight to its place, with as much of the mark behind it as is there already. What is thrown away goes into the connection's own
// memory. REQUIRES: the buffer is empty.
StreamFault ExtentReceiver::receive_direct(uint8_t* extent, bool is_thrown_away, uint32_t& crc) {
  std::array<uint8_t, 16 << 10> waste;
  for (uint64_t at = 0; at < plan_.extent_bytes;) {
    const size_t most = is_thrown_away ? waste.size() : PIECE_BYTES;
    const size_t size = static_cast<size_t>(std::min<uint64_t>(most, plan_.extent_bytes - at));
    uint8_t* const target = is_thrown_away ? waste.data() : extent + at;
    const bool is_last = at + size == plan_.extent_bytes;
    iovec parts[] = {{target, size}, {buffer_.data(), buffer_.size()}};
    size_t received = 0;
    const StreamFault fault = stream_->receive({parts, is_last ? 2U : 1U}, size, received, times_);
    if (fault != StreamFault::NONE) {
      return fault;
    }
    buffered_from_ = 0;
    buffered_to_ = received - size;
    crc = is_thrown_away ? crc : crc32c(crc, target, size);
    at += size;
  }
  return StreamFault::NONE;
}

StreamFault ExtentReceiver::receive_buffered(uint8_t* extent, bool is_thrown_away, uint32_t& crc) {
  for (uint64_t at = 0; at < plan_.extent_bytes;) {
    const StreamFault fault = fill(static_cast<size_t>(plan_.extent_bytes - at));
    if (fault != StreamFault::NONE) {
      return fault;
    }
    const size_t count = static_cast<size_t>(std::min<uint64_t>(buffered_to_ - buffered_from_, plan_.extent_bytes - at));
    if (!is_thrown_away) {
      crc = copy_crc32c(crc, extent + at, buffer_.data() + buffered_from_, count);
    }
    buffered_from_ += count;
    at += count;
  }
  return StreamFault::NONE;
}

// Of a chunk that has ended nothing more is stored.
StreamFault ExtentReceiver::receive_extent(const StreamMark& mark) {
  const bool is_thrown_away = landing_.has_ended(mark.chunk);
  uint8_t* const extent = landing_.bytes_of(mark.chunk, mark.extent);
  uint32_t crc = 0;
  const StreamFault fault =
      is_direct() ? receive_direct(extent, is_thrown_away, crc) : receive_buffered(extent, is_thrown_away, crc);
  if (fault != StreamFault::NONE) {
    return fault;
  }
  ++of(mark.chunk).next_extent;
  if (is_thrown_away) {
    return StreamFault::NONE;
  }
  if (crc != mark.crc || !landing_.is_promised(mark.chunk, mark.extent, crc)) {
    land_all();
    landing_.end(mark.chunk, PullStatus::BAD_SOURCE, PullFault::CHECKSUM);
  } else if (is_direct()) {
    landing_.land(mark.chunk, mark.extent, &crc, 1);
  } else {
    if (verified_.empty() || verified_.back().chunk != mark.chunk) {
      verified_.push_back({mark.chunk, mark.extent, 0});
    }
    ++verified_.back().count;
    verified_crcs_.push_back(crc);
  }
  return StreamFault::NONE;
}

void ExtentReceiver::land_all() {
  if (verified_.empty()) {
    return;
  }
  copy_fence();
  const uint32_t* crcs = verified_crcs_.data();
  for (const Verified& extents : verified_) {
    landing_.land(extents.chunk, extents.first, crcs, extents.count);
    crcs += extents.count;
  }
  verified_.clear();
  verified_crcs_.clear();
}

}  // namespace kvpool
