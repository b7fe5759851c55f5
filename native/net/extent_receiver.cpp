#include "net/extent_receiver.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "checksum/crc32c.h"

namespace kvpool {
namespace {

// Room for a mark, and a bound on what is copied once more because it came with one.
constexpr size_t AHEAD_BYTES = 8 << 10;
static_assert(AHEAD_BYTES >= MARK_BYTES_MAX);

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
      ahead_(AHEAD_BYTES) {}

void ExtentReceiver::run(ByteStream& stream) {
  stream_ = &stream;
  StreamHello hello = make_hello(plan_.ticket, connection_, plan_.parts);
  iovec part{&hello, sizeof(hello)};
  StreamFault fault = stream.send_all({&part, 1}, times_);
  while (fault == StreamFault::NONE && landing_.left() > 0) {
    uint8_t bytes[MARK_BYTES_MAX];
    fault = receive_bytes(bytes, sizeof(StreamMark));
    if (fault != StreamFault::NONE) {
      break;
    }
    const auto mark = read_mark(bytes);
    if (mark && mark->bytes == mark->extents * plan_.extent_bytes) {
      fault = receive_bytes(bytes, table_bytes(*mark));
      if (fault != StreamFault::NONE) {
        break;
      }
      if (mark->kind == MarkKind::WAITING || (read_table(*mark, bytes, runs_, crcs_) && take_runs())) {
        has_heard_ = true;
        fault = mark->kind == MarkKind::WAITING ? StreamFault::NONE : receive_extents();
        continue;
      }
    }
    landing_.end_all(PullStatus::BAD_SOURCE, PullFault::FORMAT);
    return;
  }
  landing_.end_all(fault == StreamFault::ENDED ? PullStatus::CANCELLED : PullStatus::FAILED, fault_word_of(fault, has_heard_));
}

// Whether the other side may send these runs now. Everything behind them is trusted only as far as this reaches.
bool ExtentReceiver::take_runs() {
  first_crc_.clear();
  size_t crcs = 0;
  for (const StreamRun& run : runs_) {
    if (!landing_.has(run.chunk)) {
      return false;
    }
    Chunk& chunk = of(run.chunk);
    if (chunk.is_gone || chunk.next_extent == plan_.extents || run.count > plan_.extents - chunk.next_extent) {
      return false;
    }
    if (run.count > 0 && run.first != chunk.next_extent) {
      return false;
    }
    chunk.next_extent += run.count;
    chunk.is_gone = run.count == 0;
    first_crc_.push_back(crcs);
    crcs += run.count;
  }
  return true;
}

// Fills `parts_`, which have so many bytes, from what is there already and then from the stream. `is_last`: with as much of what
// comes behind them as is there.
StreamFault ExtentReceiver::receive(size_t size, bool is_last) {
  size_t part = 0;
  while (size > 0 && ahead_from_ < ahead_to_) {
    iovec& front = parts_[part];
    const size_t count = std::min(front.iov_len, ahead_to_ - ahead_from_);
    std::memcpy(front.iov_base, ahead_.data() + ahead_from_, count);
    front.iov_base = static_cast<uint8_t*>(front.iov_base) + count;
    front.iov_len -= count;
    ahead_from_ += count;
    size -= count;
    part += front.iov_len == 0 ? 1 : 0;
  }
  if (size == 0) {
    return StreamFault::NONE;
  }
  if (is_last) {
    parts_.push_back({ahead_.data(), ahead_.size()});
  }
  size_t received = 0;
  const StreamFault fault = stream_->receive(std::span(parts_).subspan(part), size, received, times_);
  ahead_from_ = 0;
  ahead_to_ = fault == StreamFault::NONE ? received - size : 0;
  return fault;
}

StreamFault ExtentReceiver::receive_bytes(uint8_t* target, size_t size) {
  parts_.assign(1, {target, size});
  return receive(size, true);
}

// The bytes of the runs, piece by piece, each straight to its place. A piece ends where another extent of the chunks begins, so that the
// first one of all of them lands before bytes of the next are waited for. Of a chunk that has ended nothing more is stored: what comes
// of it goes into the connection's own memory.
StreamFault ExtentReceiver::receive_extents() {
  uint64_t at = 0;
  for (size_t run = 0; run < runs_.size() && landing_.left() > 0;) {
    pieces_.clear();
    parts_.clear();
    size_t size = 0;
    const uint32_t extent = runs_[run].first;
    while (run < runs_.size() && size < PIECE_BYTES && runs_[run].first == extent) {
      const uint32_t chunk = runs_[run].chunk;
      const bool is_thrown_away = landing_.has_ended(chunk);
      const uint64_t run_bytes = runs_[run].count * plan_.extent_bytes;
      const size_t most = std::min(PIECE_BYTES - size, is_thrown_away ? WASTE_BYTES : PIECE_BYTES);
      const auto count = static_cast<size_t>(std::min<uint64_t>(run_bytes - at, most));
      pieces_.push_back({run, at, count});
      if (count > 0) {
        parts_.push_back({is_thrown_away ? waste_.data() : landing_.bytes_of(chunk, runs_[run].first) + at, count});
      }
      size += count;
      at += count;
      if (at == run_bytes) {
        ++run;
        at = 0;
      }
    }
    const StreamFault fault = receive(size, run == runs_.size());
    if (fault != StreamFault::NONE) {
      return fault;
    }
    for (const Piece& piece : pieces_) {
      judge(piece);
    }
  }
  landing_.report();
  return StreamFault::NONE;
}

// Compares what has been received of a run, and has the extents that are whole land.
void ExtentReceiver::judge(const Piece& piece) {
  const StreamRun& run = runs_[piece.run];
  if (landing_.has_ended(run.chunk)) {
    return;
  }
  if (run.count == 0) {
    landing_.end(run.chunk, PullStatus::BAD_SOURCE, PullFault::GONE);
    return;
  }
  const uint8_t* const bytes = landing_.bytes_of(run.chunk, run.first);
  const uint32_t* const crcs = crcs_.data() + first_crc_[piece.run];
  const auto first = static_cast<uint32_t>(piece.at / plan_.extent_bytes);
  uint32_t extent = first;
  bool is_good = true;
  for (uint64_t at = piece.at; is_good && at < piece.at + piece.size;) {
    const uint64_t begin = extent * plan_.extent_bytes;
    const uint64_t end = std::min(begin + plan_.extent_bytes, piece.at + piece.size);
    crc_ = crc32c(at == begin ? 0 : crc_, bytes + at, static_cast<size_t>(end - at));
    at = end;
    if (end == begin + plan_.extent_bytes) {
      is_good = crc_ == crcs[extent] && landing_.is_promised(run.chunk, run.first + extent, crc_);
      extent += is_good ? 1 : 0;
    }
  }
  if (extent > first) {
    landing_.land(run.chunk, run.first + first, crcs + first, extent - first);
  }
  if (!is_good) {
    landing_.end(run.chunk, PullStatus::BAD_SOURCE, PullFault::CHECKSUM);
  }
}

}  // namespace kvpool
