#include "net/extent_sender.h"

#include <algorithm>

#include "base/check.h"
#include "shared_index/landing_wait.h"

namespace kvpool {
namespace {

// One system call sends so much. Under a bound: what the rate allows in a twentieth of a second.
constexpr uint64_t BATCH_BYTES_MAX = 1 << 20;
constexpr uint64_t BATCH_BYTES_MIN = 4096;
constexpr uint64_t BATCHES_PER_S = 20;
// Extents of a chunk that go one behind the other, as many as fit: they land together, with one wake-up of who waits for the chunk.
constexpr uint64_t GROUP_BYTES = 16 << 10;

}  // namespace

std::vector<uint32_t> offered_checks(const IndexView& index, const std::vector<OfferedChunk>& chunks, uint32_t extents) {
  std::vector<uint32_t> checks;
  checks.reserve(chunks.size() * extents);
  for (const OfferedChunk& chunk : chunks) {
    const uint32_t landed = index.landed_at(chunk.slot);
    for (uint32_t extent = 0; extent < extents; ++extent) {
      checks.push_back(index.checksum_at(chunk.slot, extent));
    }
    // The generation after the checksums: they are this chunk's.
    if (landed == LANDING_FAILED || landed < extents || index.generation_at(chunk.slot) != chunk.generation) {
      return {};
    }
  }
  return checks;
}

void OfferStop::stop() {
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
  }
  changed_.notify_all();
}

bool OfferStop::is_stopped() {
  const std::lock_guard guard(lock_);
  return is_stopped_;
}

bool OfferStop::wait_until(StreamClock::time_point time) {
  std::unique_lock guard(lock_);
  return changed_.wait_until(guard, time, [this] { return is_stopped_; });
}

uint64_t SendPace::batch_bytes() const noexcept {
  return bytes_per_s_ == 0 ? BATCH_BYTES_MAX : std::clamp(bytes_per_s_ / BATCHES_PER_S, BATCH_BYTES_MIN, BATCH_BYTES_MAX);
}

StreamClock::time_point SendPace::take(uint64_t bytes) {
  const auto now = StreamClock::now();
  if (bytes_per_s_ == 0) {
    return now;
  }
  const std::lock_guard guard(lock_);
  const auto start = std::max(now, free_from_);
  const std::chrono::duration<double> lasts(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
  free_from_ = start + std::chrono::duration_cast<StreamClock::duration>(lasts);
  return start;
}

ExtentSender::ExtentSender(std::shared_ptr<const OfferPlan> plan, uint32_t connection, std::shared_ptr<const Mapping> arena,
                           std::shared_ptr<const IndexView> index, SendPace& pace, OfferStop& stop,
                           std::chrono::milliseconds stall)
    : plan_(std::move(plan)),
      connection_(connection),
      arena_(std::move(arena)),
      index_(std::move(index)),
      pace_(pace),
      stop_(stop),
      times_{plan_->deadline, stall},
      batch_bytes_max_(pace.batch_bytes()),
      is_gone_(plan_->chunks.size()) {
  for (const OfferedChunk& chunk : plan_->chunks) {
    KVPOOL_CHECK(arena_->contains(chunk.arena_offset, plan_->extents * plan_->extent_bytes));
  }
  marks_.reserve(BATCH_EXTENTS);
  parts_.reserve(2 * BATCH_EXTENTS);
}

StreamFault ExtentSender::run(ByteStream& stream) {
  stream_ = &stream;
  const uint32_t most = group_extents();
  for (uint32_t first = 0, end = 1; first < plan_->extents; first = end, end = std::min(first + most, plan_->extents)) {
    for (uint32_t chunk = connection_; chunk < plan_->chunks.size(); chunk += plan_->connections) {
      for (uint32_t extent = first; extent < end && !is_gone_[chunk]; ++extent) {
        const StreamFault fault = send_landed(chunk, extent);
        if (fault != StreamFault::NONE) {
          return fault;
        }
      }
    }
  }
  return flush();
}

// How many extents of a chunk go one behind the other, after extent 0: one where a save is under way, which is followed as it
// comes.
uint32_t ExtentSender::group_extents() const noexcept {
  for (uint32_t chunk = connection_; chunk < plan_->chunks.size(); chunk += plan_->connections) {
    const uint32_t landed = index_->landed_at(plan_->chunks[chunk].slot);
    if (landed < plan_->extents || landed == LANDING_FAILED) {
      return 1;
    }
  }
  return static_cast<uint32_t>(std::max<uint64_t>(1, GROUP_BYTES / plan_->extent_bytes));
}

// Whether an extent can be sent now. `landed`: the slot's word where it cannot yet.
ExtentSender::State ExtentSender::look(uint32_t number, uint32_t extent, uint32_t& crc, uint32_t& landed) const {
  const OfferedChunk& chunk = plan_->chunks[number];
  landed = index_->landed_at(chunk.slot);
  crc = index_->checksum_at(chunk.slot, extent);
  if (index_->generation_at(chunk.slot) != chunk.generation || landed == LANDING_FAILED) {
    return State::GONE;
  }
  return landed > extent ? State::READY : State::LANDING;
}

StreamFault ExtentSender::send_landed(uint32_t chunk, uint32_t extent) {
  uint32_t crc = 0;
  uint32_t landed = 0;
  while (true) {
    switch (look(chunk, extent, crc, landed)) {
      case State::READY:
        return send_extent(chunk, extent, crc);
      case State::GONE:
        is_gone_[chunk] = true;
        ++gone_chunks_;
        add_mark(make_gone_mark(chunk));
        return marks_.size() == BATCH_EXTENTS ? flush() : StreamFault::NONE;
      case State::LANDING: {
        const StreamFault fault = wait_for_landing(chunk, landed);
        if (fault != StreamFault::NONE) {
          return fault;
        }
        break;
      }
    }
  }
}

// Sends what there is, then waits for a while: a landing wakes it, a stop is seen within the period.
StreamFault ExtentSender::wait_for_landing(uint32_t chunk, uint32_t landed) {
  const StreamFault fault = flush();
  if (fault != StreamFault::NONE) {
    return fault;
  }
  const SlotAddress slot = plan_->chunks[chunk].slot;
  const auto left = plan_->deadline - StreamClock::now();
  if (left.count() <= 0) {
    return StreamFault::LATE;
  }
  LandingWait wait;
  wait.add(index_, slot, landed);
  wait.wait(std::chrono::duration<double>(std::min<StreamClock::duration>(left, WAITING_PERIOD)).count());
  if (stop_.is_stopped()) {
    return StreamFault::ENDED;
  }
  if (index_->landed_at(slot) != landed) {
    return StreamFault::NONE;
  }
  add_mark(make_waiting_mark());
  return flush();
}

StreamFault ExtentSender::send_extent(uint32_t chunk, uint32_t extent, uint32_t crc) {
  add_mark(make_extent_mark(chunk, extent, plan_->extent_bytes, crc));
  uint8_t* const bytes = arena_->data() + plan_->chunks[chunk].arena_offset + extent * plan_->extent_bytes;
  for (uint64_t at = 0; at < plan_->extent_bytes;) {
    const uint64_t size = std::min(plan_->extent_bytes - at, batch_bytes_max_ - batch_bytes_);
    parts_.push_back({bytes + at, static_cast<size_t>(size)});
    batch_bytes_ += size;
    at += size;
    if (batch_bytes_ == batch_bytes_max_ || marks_.size() == BATCH_EXTENTS) {
      const StreamFault fault = flush();
      if (fault != StreamFault::NONE) {
        return fault;
      }
    }
  }
  return StreamFault::NONE;
}

void ExtentSender::add_mark(const StreamMark& mark) {
  KVPOOL_CHECK(marks_.size() < BATCH_EXTENTS);
  marks_.push_back(mark);
  parts_.push_back({&marks_.back(), sizeof(StreamMark)});
}

StreamFault ExtentSender::flush() {
  const auto start = pace_.take(batch_bytes_);
  StreamFault fault = StreamFault::NONE;
  if (start >= plan_->deadline) {
    fault = StreamFault::LATE;
  } else if (start > StreamClock::now() && stop_.wait_until(start)) {
    fault = StreamFault::ENDED;
  } else {
    fault = stream_->send_all(parts_, times_);
  }
  bytes_ += fault == StreamFault::NONE ? batch_bytes_ : 0;
  marks_.clear();
  parts_.clear();
  batch_bytes_ = 0;
  return fault;
}

}  // namespace kvpool
