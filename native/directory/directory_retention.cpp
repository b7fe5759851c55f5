// Retention in the queues and over several tiers: each tier has a ledger (retention_ledger.h). See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// Priorities that expire in one call; the others do in the next.
constexpr uint32_t EXPIRED_AT_ONCE = 256;

}  // namespace

// The ancestors of a chunk that the ledger ended to retain with it go back from a queue above the default priority to their own.
void Directory::requeue_released(RecordId id) noexcept {
  for (uint32_t left = retention_.released(); left > 0; --left) {
    id = records_[id].parent;
    if (records_[id].is_listed() && records_[id].level > DEFAULT_PRIORITY) {
      standings_.requeue(id);
    }
  }
}

// Sets the retention of a chunk that is in no queue.
RetainState Directory::set_retention(RecordId id, Retention request) noexcept {
  ChunkRecord& record = records_[id];
  const uint8_t before = record.priority;
  const RetainState state = retention_.set(id, request, latest_ns_);
  if (record.duration_ms != 0) {
    start_timer(id);
  }
  if (retention_.released() > 0) {
    requeue_released(id);
  }
  if (record.has_copy) {
    copies_->follow_retention(record.key, record.priority);
  }
  if (record.priority != before) {
    reports_.report_priority(record, before);
  }
  return state;
}

// The same for a chunk that may be in one: it is taken out, so that no other chunk is compared with it meanwhile, and put back.
RetainState Directory::set_retention_in_queue(RecordId id, Retention request) noexcept {
  const bool is_standing = records_[id].is_listed();
  if (is_standing) {
    queues_.remove(id);
  }
  const RetainState state = set_retention(id, request);
  if (is_standing) {
    standings_.add_by_access(id, Standings::POSITION_STEPS, true);
  }
  return state;
}

uint64_t Directory::expires_at(const ChunkRecord& record) const noexcept {
  if (is_lower()) {
    const auto upper_ns = tiers_->upper_expiry(*this, record.key, {record.priority, record.duration_ms});
    return upper_ns ? *upper_ns : own_expiry(record);
  }
  return own_expiry(record);
}

// The record of a key, if it has just this retention.
RecordId Directory::find_alike(const ChunkKey& key, Retention retention) const noexcept {
  const RecordId id = find_record(key);
  return id.valid() && retention_.of(id) == retention ? id : RecordId();
}

// REQUIRES: the chunk has a duration.
void Directory::start_timer(RecordId id) noexcept { retention_.start_timer(id, expires_at(records_[id]), latest_ns_); }

// A chunk that leaves this tier is retained in each lower tier that has it as it was here; its time goes on from its last use.
// A priority below the default is not handed down: it has the chunk leave this tier early, and says nothing about the others.
void Directory::hand_down(const ChunkRecord& record) noexcept {
  for (Directory* lower : lower_tiers()) {
    const RecordId id = lower->find_record(record.key);
    if (id.valid()) {
      lower->take_over(id, record, retention_.since(record, duration_start(), latest_ns_), latest_ns_);
    }
  }
}

// The chunk is retained here from now on as it was in the upper tier that it leaves.
void Directory::take_over(RecordId id, const ChunkRecord& upper, uint64_t since_ns, uint64_t now_ns) noexcept {
  const Retention retention{upper.priority, upper.duration_ms};
  latest_ns_ = std::max(latest_ns_, now_ns);
  if (upper.priority > DEFAULT_PRIORITY) {
    static_cast<void>(set_retention_in_queue(id, retention));
  }
  if (retention_.of(id) == retention) {
    retention_.restart(id, since_ns);
    if (retention.duration_ms != 0) {
      start_timer(id);
    }
  }
  if (!upper.was_below) {
    standings_.renew(id, latest_ns_);  // used there since it was written here; what precedes it follows when it leaves too
  }
}

std::vector<uint8_t> Directory::retain(NamespaceId owner, const uint8_t* keys, const std::vector<Retention>& requests,
                                       uint64_t now_ns) {
  expire_retention(now_ns);
  std::vector<uint8_t> states(requests.size(), static_cast<uint8_t>(RetainState::ABSENT));
  if (originals_ != nullptr) {
    return states;
  }
  if (lower_bits_ != 0) {
    states = tiers_->below(*this).front()->retain(owner, keys, requests, now_ns);
  }
  for (size_t index = 0; index < requests.size(); ++index) {
    const auto entry = table_.find(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (entry && entry->record.valid() && records_[entry->record].owner == owner) {  // never a zombie: those left the table
      states[index] = static_cast<uint8_t>(set_retention_in_queue(entry->record, requests[index]));
    }
  }
  return states;
}

// A copy's duration is its original's.
Retention Directory::retained_as(RecordId id) const noexcept {
  Retention retention = retention_.of(id);
  const auto original = originals_ == nullptr ? std::nullopt : originals_->originals().retention(records_[id].key);
  if (original && original->priority == retention.priority) {
    retention.duration_ms = original->duration_ms;
  }
  return retention;
}

std::optional<Retention> Directory::retention(const ChunkKey& key) const noexcept {
  const RecordId id = find_record(key);
  return id.valid() ? std::optional(retained_as(id)) : std::nullopt;
}

std::optional<std::vector<Retention>> Directory::retentions(HoldId hold) const {
  const HoldTable::Records* const held = holds_.find_readable(hold);
  if (held == nullptr) {
    return std::nullopt;
  }
  std::vector<Retention> retentions;
  for (const RecordId id : *held) {
    retentions.push_back(retained_as(id));
  }
  return retentions;
}

// The priority of a chunk expires, here and in each lower tier that retains it alike.
void Directory::expire(RecordId id) {
  const ChunkKey key = records_[id].key;
  const Retention retention = retention_.of(id);
  expire_here(id);
  for (Directory* lower : lower_tiers()) {
    const RecordId below = lower->find_alike(key, retention);
    if (below.valid()) {
      lower->latest_ns_ = std::max(lower->latest_ns_, latest_ns_);
      lower->expire_here(below);
    }
  }
}

void Directory::expire_here(RecordId id) {
  static_cast<void>(set_retention_in_queue(id, Retention{}));
  retention_.note_expired(id, is_lower());
}

void Directory::expire_retention(uint64_t now_ns) {
  latest_ns_ = std::max(latest_ns_, now_ns);
  retention_.begin_request();
  if (copies_ != nullptr) {
    copies_->copies().retention_.begin_request();
  }
  if (tiers_ != nullptr) {
    for (Directory* lower : tiers_->below(*this)) {
      lower->retention_.begin_request();
    }
    for (Directory* upper : tiers_->above(*this)) {
      upper->latest_ns_ = std::max(upper->latest_ns_, latest_ns_);  // until when a chunk that is held there is used
    }
  }
  for (uint32_t expired = 0; expired < EXPIRED_AT_ONCE; ++expired) {
    const RecordId id = retention_.take_due(latest_ns_);
    if (!id.valid()) {
      return;
    }
    if (expires_at(records_[id]) > latest_ns_) {
      start_timer(id);  // used since, or the timer moves to an inner ring
      continue;
    }
    expire(id);
  }
}

// The chunk leaves this tier, childless.
void Directory::forget_retention(RecordId id) noexcept {
  retention_.forget(id);
  if (retention_.released() > 0) {
    requeue_released(id);
  }
}

}  // namespace kvpool
