// Retention: with what priority chunks are kept, for how long, and how much may be kept above the default. See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// Entries looked at from each end of a queue for a chunk's place by its last use: a guess that bounds the time.
constexpr uint32_t PLACE_STEPS = 64;
// Priorities that fall back in one call; what is left does in the next.
constexpr uint32_t LAPSES_MAX = 256;
constexpr uint64_t NS_PER_MS = 1'000'000;

}  // namespace

void Directory::cap_retained(double share) noexcept {
  kept_bytes_max_ = static_cast<uint64_t>(static_cast<double>(geometry_.capacity) * share);
}

// Puts an idle chunk into the queue of its own priority, by its last use; one too old for a place goes first there.
void Directory::requeue(RecordId id) noexcept {
  queues_.remove(id);
  stand_by_access(id, PLACE_STEPS, true);
}

// Keeps a chunk that may stand in a queue: out of it, so that nobody is compared with it meanwhile, and in again.
RetainState Directory::keep_in_queue(RecordId id, Retention request) noexcept {
  const bool is_standing = is_listed(records_[id]);
  if (is_standing) {
    queues_.remove(id);
  }
  const RetainState state = keep(id, request);
  if (is_standing) {
    stand_by_access(id, PLACE_STEPS, true);
  }
  return state;
}

// Whether the cap has room for this chunk and what precedes it. Every request of a call may walk far and in vain: together they
// walk no further than `steps_to_keep_`.
bool Directory::has_room_to_keep(RecordId id) noexcept {
  const uint64_t room = kept_bytes_max_ - std::min(kept_bytes_max_, stats_.kept_bytes);
  uint64_t bytes = 0;
  for (; id.valid() && !records_[id].is_kept(); id = records_[id].parent) {
    bytes += chunk_bytes(records_[id]);
    if (bytes > room || steps_to_keep_ == 0) {
      return false;
    }
    --steps_to_keep_;
  }
  return true;
}

// The chunk has become kept: so has what precedes it.
void Directory::mark_kept(RecordId id) noexcept {
  for (bool was_kept = false; id.valid() && !was_kept; id = records_[id].parent) {
    arena_.set_kept(records_[id].page, true);
    ++stats_.kept_chunks;
    stats_.kept_bytes += chunk_bytes(records_[id]);
    const RecordId parent = records_[id].parent;
    if (parent.valid()) {
      was_kept = records_[parent].is_kept();
      ++records_[parent].kept_children;
    }
  }
}

// The chunk has ceased to be kept: so has what precedes it and has no other reason. Its own place is the caller's.
void Directory::unmark_kept(RecordId top) noexcept {
  RecordId id = top;
  for (bool is_kept = false; id.valid() && !is_kept; id = records_[id].parent) {
    arena_.set_kept(records_[id].page, false);
    --stats_.kept_chunks;
    stats_.kept_bytes -= chunk_bytes(records_[id]);
    if (id != top && is_listed(records_[id]) && records_[id].level > DEFAULT_PRIORITY) {
      requeue(id);
    }
    const RecordId parent = records_[id].parent;
    if (parent.valid()) {
      KVPOOL_CHECK(records_[parent].kept_children > 0);
      --records_[parent].kept_children;
      is_kept = records_[parent].is_kept();
    }
  }
}

// From when a chunk's duration counts: its last use, or when it was retained. In a lower tier to be written is no use.
uint64_t Directory::kept_since(const ChunkRecord& record) const noexcept {
  if (record.holds > 0) {
    return latest_ns_;
  }
  const uint64_t retained_ago = uint64_t{tick_of(latest_ns_) - record.retained_tick} << TICK_SHIFT;
  const uint64_t retained_ns = latest_ns_ - std::min(latest_ns_, retained_ago);
  return is_lower() ? retained_ns : std::max(retained_ns, record.last_access_ns);
}

uint64_t Directory::own_expiry(const ChunkRecord& record) const noexcept {
  return kept_since(record) + record.duration_ms * NS_PER_MS;
}

uint64_t Directory::expires_at(const ChunkRecord& record) const noexcept {
  if (is_lower()) {
    const auto above_ns = tiers_->expiry_above(*this, record.key, {record.priority, record.duration_ms});
    return above_ns ? *above_ns : own_expiry(record);
  }
  return own_expiry(record);
}

// The record of a key, if it is kept with just this.
RecordId Directory::find_alike(const ChunkKey& key, Retention kept) const noexcept {
  const RecordId id = find_record(key);
  return id.valid() && Retention{records_[id].priority, records_[id].duration_ms} == kept ? id : RecordId();
}

void Directory::start_timer(RecordId id) noexcept {
  if (records_[id].duration_ms != 0) {
    timers_.set(id, expires_at(records_[id]), latest_ns_);
  }
}

// Sets a chunk's priority as far as the cap allows it. Its place in the queues is the caller's.
RetainState Directory::keep(RecordId id, Retention request) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(request.priority <= MAX_PRIORITY);
  RetainState state = RetainState::ACCEPTED;
  if (request.priority > DEFAULT_PRIORITY && !record.is_kept() && !has_room_to_keep(id)) {
    request = Retention{};
    state = RetainState::CLIPPED;
    ++stats_.clipped_chunks;
  }
  timers_.cancel(id);
  const bool was_kept = record.is_kept();
  const uint8_t before = record.priority;
  record.priority = request.priority;
  record.duration_ms = request.priority == DEFAULT_PRIORITY ? 0 : request.duration_ms;
  record.retained_tick = tick_of(latest_ns_);
  start_timer(id);
  if (!was_kept && record.is_kept()) {
    mark_kept(id);
  } else if (was_kept && !record.is_kept()) {
    unmark_kept(id);
  }
  report_priority(record, before);
  return state;
}

// A chunk that leaves this tier is kept in each lower one that has it as it was here, its time running on from its last use.
// One below the default leaves this tier early, which says nothing about the others: they have heard what they are to hear.
void Directory::hand_down(const ChunkRecord& record) noexcept {
  for (Directory* lower : lower_tiers()) {
    const RecordId id = lower->find_record(record.key);
    if (id.valid()) {
      lower->take_over(id, record, kept_since(record), latest_ns_);
    }
  }
}

// The chunk is kept here from now on as it was above, where it is leaving.
void Directory::take_over(RecordId id, const ChunkRecord& above, uint64_t kept_since_ns, uint64_t now_ns) noexcept {
  const Retention kept{above.priority, above.duration_ms};
  latest_ns_ = std::max(latest_ns_, now_ns);
  if (above.priority > DEFAULT_PRIORITY) {
    static_cast<void>(keep_in_queue(id, kept));
  }
  if (Retention{records_[id].priority, records_[id].duration_ms} == kept) {
    timers_.cancel(id);
    records_[id].retained_tick = tick_of(kept_since_ns);
    start_timer(id);
  }
  if (!above.was_below) {
    renew(id);  // used there since it was written here
  }
}

// The chunk is as new here as one that comes just now. What precedes it follows when it leaves the upper tier too.
void Directory::renew(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (is_listed(record)) {
    queues_.remove(id);
    record.last_access_ns = latest_ns_;
    record.is_cut = record.parent.valid();
    queues_.add(id);
  }
}

std::vector<uint8_t> Directory::retain(NamespaceId owner, const uint8_t* keys, const std::vector<Retention>& requests,
                                       uint64_t now_ns) {
  expire_retention(now_ns);
  std::vector<uint8_t> states(requests.size(), static_cast<uint8_t>(RetainState::ABSENT));
  if (lower_bits_ != 0) {
    states = tiers_->below(*this).front()->retain(owner, keys, requests, now_ns);
  }
  for (size_t index = 0; index < requests.size(); ++index) {
    const auto entry = table_.find(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (entry && entry->record.valid() && records_[entry->record].owner == owner) {  // never a zombie: those left the table
      states[index] = static_cast<uint8_t>(keep_in_queue(entry->record, requests[index]));
    }
  }
  return states;
}

std::optional<Retention> Directory::retention(const ChunkKey& key) const noexcept {
  const auto entry = table_.find(key);
  if (!entry || !entry->record.valid()) {
    return std::nullopt;
  }
  return Retention{records_[entry->record].priority, records_[entry->record].duration_ms};
}

std::optional<std::vector<Retention>> Directory::retentions(HoldId hold) const {
  const std::vector<RecordId>* const held = held_by(hold);
  if (held == nullptr) {
    return std::nullopt;
  }
  std::vector<Retention> kept;
  for (const RecordId id : *held) {
    kept.push_back({records_[id].priority, records_[id].duration_ms});
  }
  return kept;
}

// The chunk's time is over, here and in each lower tier that keeps it alike.
void Directory::expire(RecordId id) {
  const ChunkKey key = records_[id].key;
  const Retention kept{records_[id].priority, records_[id].duration_ms};
  expire_here(id);
  for (Directory* lower : lower_tiers()) {
    const RecordId below = lower->find_alike(key, kept);
    if (below.valid()) {
      lower->latest_ns_ = std::max(lower->latest_ns_, latest_ns_);
      lower->expire_here(below);
    }
  }
}

void Directory::expire_here(RecordId id) {
  ++stats_.lapsed_chunks;
  static_cast<void>(keep_in_queue(id, Retention{}));
  if (is_lower()) {
    lapsed_.push_back(records_[id].key);
  }
}

void Directory::expire_retention(uint64_t now_ns) {
  latest_ns_ = std::max(latest_ns_, now_ns);
  steps_to_keep_ = STEPS_TO_KEEP;
  if (tiers_ != nullptr) {
    for (Directory* lower : tiers_->below(*this)) {
      lower->steps_to_keep_ = STEPS_TO_KEEP;
    }
    for (Directory* upper : tiers_->above(*this)) {
      upper->latest_ns_ = std::max(upper->latest_ns_, latest_ns_);  // until when a chunk that is held there is used
    }
  }
  for (uint32_t lapsed = 0; lapsed < LAPSES_MAX; ++lapsed) {
    const RecordId id = timers_.take_due(latest_ns_);
    if (!id.valid()) {
      return;
    }
    if (expires_at(records_[id]) > latest_ns_) {
      start_timer(id);  // used since, or handed out on its way inwards
      continue;
    }
    expire(id);
  }
}

// The chunk is leaving, childless: nothing is to be kept for its sake.
void Directory::forget_retention(RecordId id) noexcept {
  timers_.cancel(id);
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.kept_children == 0);
  const bool was_kept = record.is_kept();
  record.priority = DEFAULT_PRIORITY;
  record.duration_ms = 0;
  if (was_kept) {
    unmark_kept(id);
  }
}

}  // namespace kvpool
