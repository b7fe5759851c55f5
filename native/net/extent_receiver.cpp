#include "net/extent_receiver.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
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

size_t chunks_of(const PullPlan& plan, uint32_t connection) noexcept {
  return (plan.rows.size() + plan.connections - 1 - connection) / plan.connections;
}

}  // namespace

const char* pull_fault_word(PullFault fault) noexcept {
  static constexpr const char* WORDS[] = {"",       "unreachable", "refused",  "closed", "broken",   "stalled",
                                          "late",   "format",      "checksum", "gone",   "untrusted", "cancelled"};
  return WORDS[static_cast<size_t>(fault)];
}

ExtentReceiver::ExtentReceiver(const PullPlan& plan, uint32_t connection, const Mapping& arena, LandingBoard& board,
                               Report report)
    : plan_(plan),
      connection_(connection),
      arena_(arena),
      board_(board),
      report_(std::move(report)),
      times_{plan.deadline, plan.stall},
      begun_(StreamClock::now()),
      chunks_(chunks_of(plan, connection)),
      left_(chunks_.size()),
      buffer_(is_direct() ? sizeof(StreamMark) : BUFFER_BYTES) {
  KVPOOL_CHECK(plan_.checks.empty() || plan_.checks.size() == plan_.rows.size() * plan_.extents);
  for (const PullRow& row : plan_.rows) {
    KVPOOL_CHECK(arena_.contains(row.arena_offset, plan_.extents * plan_.extent_bytes));
  }
}

std::chrono::microseconds ExtentReceiver::elapsed() const {
  return std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - begun_);
}

void ExtentReceiver::run(ByteStream& stream) {
  stream_ = &stream;
  StreamHello hello = make_hello(plan_.ticket, connection_, plan_.connections);
  iovec part{&hello, sizeof(hello)};
  StreamFault fault = stream.send_all({&part, 1}, times_);
  while (fault == StreamFault::NONE && left_ > 0) {
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
      end_all(PullStatus::BAD_SOURCE, PullFault::FORMAT);
      return;
    }
    has_heard_ = true;
    if (mark->kind == MarkKind::EXTENT) {
      fault = receive_extent(*mark);
    } else if (mark->kind == MarkKind::GONE) {
      of(mark->chunk).is_gone = true;
      end_chunk(mark->chunk, PullStatus::BAD_SOURCE, PullFault::GONE);
    }
    if (buffered_from_ == buffered_to_) {
      land_all();
    }
  }
  land_all();
  end_by(fault);
}

// Whether the other side may send this now. Everything behind it is trusted only as far as this reaches.
bool ExtentReceiver::is_next(const StreamMark& mark) const noexcept {
  if (mark.kind == MarkKind::WAITING) {
    return true;
  }
  if (mark.chunk >= plan_.rows.size() || mark.chunk % plan_.connections != connection_) {
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
  Chunk& chunk = of(mark.chunk);
  const bool is_thrown_away = chunk.has_ended;
  uint8_t* const extent = arena_.data() + plan_.rows[mark.chunk].arena_offset + mark.extent * plan_.extent_bytes;
  uint32_t crc = 0;
  const StreamFault fault =
      is_direct() ? receive_direct(extent, is_thrown_away, crc) : receive_buffered(extent, is_thrown_away, crc);
  if (fault != StreamFault::NONE) {
    return fault;
  }
  ++chunk.next_extent;
  if (is_thrown_away) {
    return StreamFault::NONE;
  }
  chunk.bytes += plan_.extent_bytes;
  if (!is_promised(mark, crc)) {
    land_all();
    end_chunk(mark.chunk, PullStatus::BAD_SOURCE, PullFault::CHECKSUM);
  } else if (is_direct()) {
    land({mark.chunk, mark.extent, 1}, &crc);
  } else {
    if (verified_.empty() || verified_.back().chunk != mark.chunk) {
      verified_.push_back({mark.chunk, mark.extent, 0});
    }
    ++verified_.back().count;
    verified_crcs_.push_back(crc);
  }
  return StreamFault::NONE;
}

bool ExtentReceiver::is_promised(const StreamMark& mark, uint32_t crc) const noexcept {
  return crc == mark.crc && (plan_.checks.empty() || plan_.checks[uint64_t{mark.chunk} * plan_.extents + mark.extent] == crc);
}

void ExtentReceiver::land_all() {
  if (verified_.empty()) {
    return;
  }
  copy_fence();
  const uint32_t* crcs = verified_crcs_.data();
  for (const Verified& extents : verified_) {
    land(extents, crcs);
    crcs += extents.count;
  }
  verified_.clear();
  verified_crcs_.clear();
}

void ExtentReceiver::land(const Verified& extents, const uint32_t* crcs) {
  board_.land(plan_.rows[extents.chunk].slot, extents.first, crcs, extents.count);
  if (extents.first == 0) {
    of(extents.chunk).first_extent = elapsed();
  }
  if (extents.first + extents.count == plan_.extents) {
    end_chunk(extents.chunk, PullStatus::DONE, PullFault::NONE);
  }
}

void ExtentReceiver::end_chunk(uint32_t index, PullStatus status, PullFault fault) {
  Chunk& chunk = of(index);
  if (chunk.has_ended) {
    return;
  }
  chunk.has_ended = true;
  --left_;
  PullOutcome outcome;
  outcome.is_unmarked = status == PullStatus::FAILED && chunk.next_extent == 0;
  if (status != PullStatus::DONE && !outcome.is_unmarked) {
    board_.fail(plan_.rows[index].slot);
  }
  outcome.chunk = index;
  outcome.status = status;
  outcome.fault = fault;
  outcome.bytes = chunk.bytes;
  outcome.first_extent = chunk.first_extent;
  outcome.elapsed = elapsed();
  report_(outcome);
}

void ExtentReceiver::end_by(StreamFault fault) {
  end_all(fault == StreamFault::ENDED ? PullStatus::CANCELLED : PullStatus::FAILED, fault_word_of(fault, has_heard_));
}

void ExtentReceiver::end_all(PullStatus status, PullFault fault) {
  for (uint32_t chunk = connection_; chunk < plan_.rows.size(); chunk += plan_.connections) {
    end_chunk(chunk, status, fault);
  }
}

}  // namespace kvpool
