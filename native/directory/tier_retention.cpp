#include "directory/tier_retention.h"

#include <algorithm>

#include "directory/directory.h"

namespace kvpool {
namespace {

// Priorities that expire in one call; the others do in the next.
constexpr uint32_t EXPIRED_AT_ONCE = 256;

}  // namespace

// The ancestors of a chunk that the ledger ended to retain with it go back from a queue above the default priority to their own.
void TierRetention::requeue_released(RecordId id) noexcept {
  for (uint32_t left = ledger_.released(); left > 0; --left) {
    id = of_.records_[id].parent;
    if (of_.records_[id].is_listed() && of_.records_[id].level > DEFAULT_PRIORITY) {
      of_.standings_.requeue(id);
    }
  }
}

RetainState TierRetention::set_retention(RecordId id, Retention request) noexcept {
  ChunkRecord& record = of_.records_[id];
  const uint8_t before = record.priority;
  const RetainState state = ledger_.set(id, request, of_.latest_ns_);
  if (record.duration_ms != 0) {
    start_timer(id);
  }
  if (ledger_.released() > 0) {
    requeue_released(id);
  }
  if (record.has_copy) {
    of_.copies_->follow_retention(record.key, record.priority);
  }
  if (record.priority != before) {
    of_.reports_.report_priority(record, before);
  }
  return state;
}

RetainState TierRetention::set_retention_in_queue(RecordId id, Retention request) noexcept {
  const bool is_standing = of_.records_[id].is_listed();
  if (is_standing) {
    of_.queues_.remove(id);
  }
  const RetainState state = set_retention(id, request);
  if (is_standing) {
    of_.standings_.add_by_access(id, Standings::POSITION_STEPS, true);
  }
  return state;
}

void TierRetention::restore(RecordId id, Retention retention, uint64_t since_ns) noexcept {
  ledger_.begin_request();
  static_cast<void>(set_retention(id, retention));
  go_on_since(id, retention, since_ns);
}

// The duration of a chunk that got this retention counts from then on.
void TierRetention::go_on_since(RecordId id, Retention retention, uint64_t since_ns) noexcept {
  if (ledger_.of(id) == retention) {
    ledger_.restart(id, since_ns);
    if (retention.duration_ms != 0) {
      start_timer(id);
    }
  }
}

DurationStart TierRetention::duration_start() const noexcept {
  return of_.is_lower() ? DurationStart::RETENTION : DurationStart::LAST_USE;
}

uint64_t TierRetention::own_expiry(const ChunkRecord& record) const noexcept {
  return ledger_.expiry(record, duration_start(), of_.latest_ns_);
}

uint64_t TierRetention::expires_at(const ChunkRecord& record) const noexcept {
  if (of_.is_lower()) {
    const auto upper_ns = of_.tiers_->upper_expiry(of_, record.key, {record.priority, record.duration_ms});
    return upper_ns ? *upper_ns : own_expiry(record);
  }
  return own_expiry(record);
}

RecordId TierRetention::find_alike(const ChunkKey& key, Retention retention) const noexcept {
  const RecordId id = of_.find_record(key);
  return id.valid() && ledger_.of(id) == retention ? id : RecordId();
}

// REQUIRES: the chunk has a duration.
void TierRetention::start_timer(RecordId id) noexcept { ledger_.start_timer(id, expires_at(of_.records_[id]), of_.latest_ns_); }

void TierRetention::hand_down(const ChunkRecord& record) noexcept {
  for (Directory* lower : of_.lower_tiers()) {
    const RecordId id = lower->find_record(record.key);
    if (id.valid()) {
      lower->retention_.take_over(id, record, ledger_.since(record, duration_start(), of_.latest_ns_), of_.latest_ns_);
    }
  }
}

// The chunk is retained here from now on as it was in the upper tier that it leaves.
void TierRetention::take_over(RecordId id, const ChunkRecord& upper, uint64_t since_ns, uint64_t now_ns) noexcept {
  const Retention retention{upper.priority, upper.duration_ms};
  of_.latest_ns_ = std::max(of_.latest_ns_, now_ns);
  if (upper.priority > DEFAULT_PRIORITY) {
    static_cast<void>(set_retention_in_queue(id, retention));
  }
  go_on_since(id, retention, since_ns);
  if (!upper.was_below) {
    of_.standings_.renew(id, of_.latest_ns_);  // used there since it was written here; what precedes it follows when it leaves too
  }
}

std::vector<uint8_t> TierRetention::retain(NamespaceId owner, const uint8_t* keys, const std::vector<Retention>& requests,
                                           uint64_t now_ns) {
  expire_due(now_ns);
  std::vector<uint8_t> states(requests.size(), static_cast<uint8_t>(RetainState::ABSENT));
  if (of_.originals_ != nullptr) {
    return states;
  }
  if (of_.lower_bits_ != 0) {
    states = of_.tiers_->below(of_).front()->retention_.retain(owner, keys, requests, now_ns);
  }
  for (size_t index = 0; index < requests.size(); ++index) {
    const RecordId id = of_.find_record(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (id.valid() && of_.records_[id].owner == owner) {  // never a zombie: those left the table
      states[index] = static_cast<uint8_t>(set_retention_in_queue(id, requests[index]));
    }
  }
  return states;
}

// A copy's duration is its original's.
Retention TierRetention::retained_as(RecordId id) const noexcept {
  Retention retention = ledger_.of(id);
  const auto original = of_.originals_ == nullptr ? std::nullopt : of_.originals_->originals().retention_.of(of_.records_[id].key);
  if (original && original->priority == retention.priority) {
    retention.duration_ms = original->duration_ms;
  }
  return retention;
}

std::optional<Retention> TierRetention::of(const ChunkKey& key) const noexcept {
  const RecordId id = of_.find_record(key);
  return id.valid() ? std::optional(retained_as(id)) : std::nullopt;
}

std::optional<std::vector<Retention>> TierRetention::of_hold(HoldId hold) const {
  const HoldTable::Records* const held = of_.holds_.find_readable(hold);
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
void TierRetention::expire(RecordId id) {
  const ChunkKey key = of_.records_[id].key;
  const Retention retention = ledger_.of(id);
  expire_here(id);
  for (Directory* lower : of_.lower_tiers()) {
    const RecordId below = lower->retention_.find_alike(key, retention);
    if (below.valid()) {
      lower->latest_ns_ = std::max(lower->latest_ns_, of_.latest_ns_);
      lower->retention_.expire_here(below);
    }
  }
}

void TierRetention::expire_here(RecordId id) {
  static_cast<void>(set_retention_in_queue(id, Retention{}));
  ledger_.note_expired(id, of_.is_lower());
}

void TierRetention::expire_due(uint64_t now_ns) {
  of_.latest_ns_ = std::max(of_.latest_ns_, now_ns);
  ledger_.begin_request();
  if (of_.copies_ != nullptr) {
    of_.copies_->copies().retention_.ledger_.begin_request();
  }
  if (of_.tiers_ != nullptr) {
    for (Directory* lower : of_.tiers_->below(of_)) {
      lower->retention_.ledger_.begin_request();
    }
    for (Directory* upper : of_.tiers_->above(of_)) {
      upper->latest_ns_ = std::max(upper->latest_ns_, of_.latest_ns_);  // until when a chunk that is held there is used
    }
  }
  for (uint32_t expired = 0; expired < EXPIRED_AT_ONCE; ++expired) {
    const RecordId id = ledger_.take_due(of_.latest_ns_);
    if (!id.valid()) {
      return;
    }
    if (expires_at(of_.records_[id]) > of_.latest_ns_) {
      start_timer(id);  // used since, or the timer moves to an inner ring
      continue;
    }
    expire(id);
  }
}

void TierRetention::forget_chunk(RecordId id) noexcept {
  ledger_.forget(id);
  if (ledger_.released() > 0) {
    requeue_released(id);
  }
}

}  // namespace kvpool
