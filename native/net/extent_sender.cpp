#include "net/extent_sender.h"

#include <algorithm>

#include "base/check.h"
#include "shared_index/landing_wait.h"

namespace kvpool {
namespace {

// One mark is for so much where its extents are small, and one system call sends so much. Under a bound: what the rate allows in a
// twentieth of a second.
constexpr uint64_t BATCH_BYTES_MAX = 1 << 20;
constexpr uint64_t BATCH_BYTES_MIN = 4096;
constexpr uint64_t BATCHES_PER_S = 20;
// Extents of a chunk that go one behind the other, as many as fit: they land together, with one wake-up of who waits for the chunk.
constexpr uint64_t GROUP_BYTES = 64 << 10;

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
  runs_.reserve(MARK_RUNS_MAX);
  crcs_.reserve(MARK_EXTENTS_MAX);
  parts_.reserve(MARK_RUNS_MAX + 1);
  mark_.resize(MARK_BYTES_MAX);
}

StreamFault ExtentSender::run(ByteStream& stream) {
  stream_ = &stream;
  const uint32_t most = group_extents();
  for (uint32_t first = 0, end = 1; first < plan_->extents; first = end, end = std::min(first + most, plan_->extents)) {
    for (uint32_t chunk = connection_; chunk < plan_->chunks.size(); chunk += plan_->connections) {
      const StreamFault fault = is_gone_[chunk] ? StreamFault::NONE : gather_landed(chunk, first, end);
      if (fault != StreamFault::NONE) {
        return fault;
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

// Whether extents can be sent now, `looked_` of them from `first` on. `landed`: the slot's word where none can yet.
ExtentSender::State ExtentSender::look(uint32_t number, uint32_t first, uint32_t end, uint32_t& landed) {
  const OfferedChunk& chunk = plan_->chunks[number];
  looked_.clear();
  landed = index_->landed_at(chunk.slot);
  for (uint32_t extent = first; extent < std::min(end, landed) && landed != LANDING_FAILED; ++extent) {
    looked_.push_back(index_->checksum_at(chunk.slot, extent));
  }
  // The generation after the checksums: they are this chunk's.
  if (index_->generation_at(chunk.slot) != chunk.generation || landed == LANDING_FAILED) {
    return State::GONE;
  }
  return looked_.empty() ? State::LANDING : State::READY;
}

StreamFault ExtentSender::gather_landed(uint32_t chunk, uint32_t first, uint32_t end) {
  StreamFault fault = StreamFault::NONE;
  while (first < end && fault == StreamFault::NONE) {
    uint32_t landed = 0;
    switch (look(chunk, first, end, landed)) {
      case State::READY:
        fault = add({chunk, first, static_cast<uint32_t>(looked_.size())}, looked_.data());
        first += static_cast<uint32_t>(looked_.size());
        break;
      case State::GONE:
        is_gone_[chunk] = true;
        ++gone_chunks_;
        return add({chunk, 0, 0}, nullptr);
      case State::LANDING:
        fault = wait_for_landing(chunk, landed);
        break;
    }
  }
  return fault;
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
  StreamMark waiting = make_waiting_mark();
  parts_.assign(1, {&waiting, sizeof(waiting)});
  return send_parts(0);
}

// Has a run go with the next mark, or its front with this one, where that is full.
StreamFault ExtentSender::add(const StreamRun& run, const uint32_t* crcs) {
  const auto most = static_cast<uint32_t>(std::clamp<uint64_t>(batch_bytes_max_ / plan_->extent_bytes, 1, MARK_EXTENTS_MAX));
  StreamRun left = run;
  do {
    if (runs_.size() == MARK_RUNS_MAX || (crcs_.size() >= most && left.count > 0)) {
      const StreamFault fault = flush();
      if (fault != StreamFault::NONE) {
        return fault;
      }
    }
    const uint32_t count = std::min(left.count, most - static_cast<uint32_t>(crcs_.size()));
    runs_.push_back({left.chunk, left.first, count});
    crcs_.insert(crcs_.end(), crcs, crcs + count);
    crcs += count;
    left.first += count;
    left.count -= count;
  } while (left.count > 0);
  return StreamFault::NONE;
}

StreamFault ExtentSender::flush() {
  if (runs_.empty()) {
    return StreamFault::NONE;
  }
  const size_t mark_bytes = write_extents_mark(mark_.data(), runs_, crcs_, plan_->extent_bytes);
  parts_.assign(1, {mark_.data(), mark_bytes});
  uint64_t batch = 0;
  for (const StreamRun& run : runs_) {
    uint8_t* const bytes = arena_->data() + plan_->chunks[run.chunk].arena_offset + run.first * plan_->extent_bytes;
    const uint64_t run_bytes = run.count * plan_->extent_bytes;
    for (uint64_t at = 0; at < run_bytes;) {
      const uint64_t size = std::min(run_bytes - at, batch_bytes_max_ - batch);
      parts_.push_back({bytes + at, static_cast<size_t>(size)});
      batch += size;
      at += size;
      if (batch == batch_bytes_max_) {
        const StreamFault fault = send_parts(batch);
        if (fault != StreamFault::NONE) {
          return fault;
        }
        batch = 0;
      }
    }
  }
  runs_.clear();
  crcs_.clear();
  return parts_.empty() ? StreamFault::NONE : send_parts(batch);
}

// `bytes`: of them, those that count for the rate.
StreamFault ExtentSender::send_parts(uint64_t bytes) {
  const auto start = pace_.take(bytes);
  StreamFault fault = StreamFault::NONE;
  if (start >= plan_->deadline) {
    fault = StreamFault::LATE;
  } else if (start > StreamClock::now() && stop_.wait_until(start)) {
    fault = StreamFault::ENDED;
  } else {
    fault = stream_->send_all(parts_, times_);
  }
  bytes_ += fault == StreamFault::NONE ? bytes : 0;
  parts_.clear();
  return fault;
}

}  // namespace kvpool
