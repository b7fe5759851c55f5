#include "retention/retention_ledger.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr uint64_t NS_PER_MS = 1'000'000;

}  // namespace

void RetentionLedger::cap(double share) noexcept {
  bytes_max_ = static_cast<uint64_t>(static_cast<double>(capacity_) * share);
}

// Whether the cap has room for this chunk and what precedes it. Many requests may each walk a long chain and find no room: all of one
// call share `steps_left_`.
bool RetentionLedger::has_room(RecordId id) noexcept {
  const uint64_t room = bytes_max_ - std::min(bytes_max_, counts_.bytes);
  uint64_t bytes = 0;
  for (; id.valid() && !records_[id].is_retained(); id = records_[id].parent) {
    bytes += bytes_of(id);
    if (bytes > room || steps_left_ == 0) {
      return false;
    }
    --steps_left_;
  }
  return true;
}

// The chunk is retained from now on, and so is what precedes it.
void RetentionLedger::count(RecordId id) noexcept {
  for (bool was_retained = false; id.valid() && !was_retained; id = records_[id].parent) {
    arena_.set_retained(records_[id].page, true);
    ++counts_.chunks;
    counts_.bytes += bytes_of(id);
    const RecordId parent = records_[id].parent;
    if (parent.valid()) {
      was_retained = records_[parent].is_retained();
      ++records_[parent].retained_children;
    }
  }
}

// The chunk is retained no more, nor is what precedes it and has no other reason.
void RetentionLedger::uncount(RecordId top) noexcept {
  RecordId id = top;
  for (bool is_retained = false; id.valid() && !is_retained; id = records_[id].parent) {
    arena_.set_retained(records_[id].page, false);
    --counts_.chunks;
    counts_.bytes -= bytes_of(id);
    released_ += id != top ? 1U : 0U;
    const RecordId parent = records_[id].parent;
    if (parent.valid()) {
      KVPOOL_CHECK(records_[parent].retained_children > 0);
      --records_[parent].retained_children;
      is_retained = records_[parent].is_retained();
    }
  }
}

RetainState RetentionLedger::set(RecordId id, Retention request, uint64_t now_ns) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(request.priority <= MAX_PRIORITY);
  released_ = 0;
  RetainState state = RetainState::ACCEPTED;
  if (request.priority > DEFAULT_PRIORITY && !record.is_retained() && !has_room(id)) {
    request = Retention{};
    state = RetainState::CLIPPED;
    ++counts_.clipped;
  }
  timers_.cancel(id);
  const bool was_retained = record.is_retained();
  record.priority = request.priority;
  record.duration_ms = request.priority == DEFAULT_PRIORITY ? 0 : request.duration_ms;
  record.retained_tick = tick_of(now_ns);
  if (!was_retained && record.is_retained()) {
    count(id);
  } else if (was_retained && !record.is_retained()) {
    uncount(id);
  }
  return state;
}

void RetentionLedger::forget(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.retained_children == 0);
  released_ = 0;
  timers_.cancel(id);
  const bool was_retained = record.is_retained();
  record.priority = DEFAULT_PRIORITY;
  record.duration_ms = 0;
  if (was_retained) {
    uncount(id);
  }
}

void RetentionLedger::restart(RecordId id, uint64_t since_ns) noexcept {
  timers_.cancel(id);
  records_[id].retained_tick = tick_of(since_ns);
}

uint64_t RetentionLedger::since(const ChunkRecord& record, DurationStart start, uint64_t now_ns) const noexcept {
  if (record.holds > 0) {
    return now_ns;
  }
  const uint64_t retained_ago = uint64_t{tick_of(now_ns) - record.retained_tick} << TICK_SHIFT;
  const uint64_t retained_ns = now_ns - std::min(now_ns, retained_ago);
  return start == DurationStart::RETENTION ? retained_ns : std::max(retained_ns, record.last_access_ns);
}

uint64_t RetentionLedger::expiry(const ChunkRecord& record, DurationStart start, uint64_t now_ns) const noexcept {
  return since(record, start, now_ns) + record.duration_ms * NS_PER_MS;
}

void RetentionLedger::note_expired(RecordId id, bool is_listed) {
  ++counts_.expired;
  if (is_listed) {
    expired_.push_back(records_[id].key);
  }
}

std::vector<ChunkKey> RetentionLedger::take_expired() noexcept { return std::exchange(expired_, {}); }

std::vector<std::string> RetentionLedger::verify() const {
  std::vector<std::string> broken = timers_.verify();
  const auto expect = [&broken](const char* what, uint64_t truth, uint64_t counted) {
    if (truth != counted) {
      broken.push_back(std::string(what) + ": " + std::to_string(truth) + ", counted " + std::to_string(counted));
    }
  };
  RetentionCounts sums;
  uint64_t durations = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const RecordId id(index);
    const ChunkRecord& record = records_[id];
    const std::string name = "chunk record " + std::to_string(index);
    durations += record.duration_ms != 0 ? 1U : 0U;
    uint32_t retained = 0;
    for (RecordId child = record.first_child; child.valid(); child = records_[child].next_sibling) {
      retained += records_[child].is_retained() ? 1U : 0U;
    }
    if (record.retained_children != retained) {
      broken.push_back(name + " miscounts its retained children");
    }
    if (record.priority > MAX_PRIORITY) {
      broken.push_back(name + " has a priority of " + std::to_string(record.priority));
    }
    if (record.is_retained()) {
      ++sums.chunks;
      sums.bytes += bytes_of(id);
    }
  }
  expect("chunks with a duration that have a timer", durations, timers_.size());
  expect("retained chunks", sums.chunks, counts_.chunks);
  expect("retained bytes", sums.bytes, counts_.bytes);
  return broken;
}

}  // namespace kvpool
