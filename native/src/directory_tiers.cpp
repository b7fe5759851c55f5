// What two tiers tell each other: shared entries, promotion, demotion, restoring. See directory.h.
#include <algorithm>
#include <utility>

#include "kvpool/check.h"
#include "kvpool/directory.h"
#include "kvpool/sampling.h"

namespace kvpool {
namespace {

// Entries looked at from each end of a recency list before a chunk that was held for a moment counts as used: a guess that
// bounds the control thread's time at a few microseconds.
constexpr uint32_t INSERT_STEPS = 256;

}  // namespace

void Directory::attach_slower(Directory& slower) noexcept {
  KVPOOL_CHECK(slower_ == nullptr);
  KVPOOL_CHECK(slower.faster_ == nullptr);
  KVPOOL_CHECK(records_.alive() == 0);
  KVPOOL_CHECK(slower.records_.alive() == 0);
  slower_ = &slower;
  slower.faster_ = this;
}

// False where the table has no room for an entry of its own.
bool Directory::note_slower(const ChunkKey& key, bool is_held) noexcept {
  const uint8_t bit = tier_bit(slower_->tier_);
  const auto entry = table_.find(key);
  if (is_held) {
    if (!entry && !table_.insert(key, RecordId(), 1, PageIndex())) {
      return false;
    }
    table_.set_tiers(key, static_cast<uint8_t>((entry ? entry->tiers : 0) | bit));
    if (entry && entry->record.valid()) {
      records_[entry->record].was_below = true;
    }
    return true;
  }
  KVPOOL_CHECK(entry.has_value());
  table_.set_tiers(key, static_cast<uint8_t>(entry->tiers & ~bit));
  if (!entry->record.valid()) {
    table_.erase(key);
  }
  return true;
}

// Whether the other tier has it too.
bool Directory::is_elsewhere(const ChunkKey& key) const noexcept {
  const Directory& shared = faster_ != nullptr ? *faster_ : *this;
  if (shared.slower_ == nullptr) {
    return false;
  }
  const auto entry = shared.table_.find(key);
  return entry && (entry->tiers & ~tier_bit(tier_)) != 0;
}

bool Directory::is_foreign_below(NamespaceId owner, const ChunkKey& key) const noexcept {
  const auto below = slower_ == nullptr ? std::nullopt : slower_->table_.find(key);
  return below && slower_->records_[below->record].owner != owner;
}

// The key's entry names this record from now on; it is new, or the slower tier's.
void Directory::enter(const ChunkKey& key, RecordId id) noexcept {
  const ChunkRecord& record = records_[id];
  if (table_.find(key)) {
    table_.move(key, id, record.generation, record.page);
  } else {
    KVPOOL_CHECK(table_.insert(key, id, record.generation, record.page));
  }
}

void Directory::leave(const ChunkKey& key) noexcept {
  const auto entry = table_.find(key);
  KVPOOL_CHECK(entry.has_value());
  const auto others = static_cast<uint8_t>(entry->tiers & ~tier_bit(tier_));
  if (others == 0) {
    table_.erase(key);
    return;
  }
  table_.set_tiers(key, others);
  table_.move(key, RecordId(), entry->generation, PageIndex());
}

void Directory::count_departure(const ChunkRecord& record) {
  if (is_elsewhere(record.key)) {
    ++stats_.shed_chunks;
    return;
  }
  ++stats_.evicted_chunks;
  if (slower_ != nullptr) {
    ++stats_.declined[static_cast<size_t>(why_declined(record))];
  }
  if (ghosts_) {
    ghosts_->add(record.key);
  }
}

bool Directory::is_admitted(const ChunkRecord& record) const noexcept {
  switch (admitted_) {
    case Admitted::ALL:
      return true;
    case Admitted::LIKELY:
      return record.touches > 1 || policy_->chance(record.queue, record.last_access_ns, latest_ns_) >= least_chance_;
    case Admitted::USED_AGAIN:
      return record.touches > 1;
    case Admitted::NOTHING:
      return false;
  }
  return false;
}

// REQUIRES: the slower tier does not have it.
Declined Directory::why_declined(const ChunkRecord& record) const noexcept {
  if (record.was_below) {
    return Declined::WRITTEN_BEFORE;
  }
  if (is_admitted(record)) {
    return Declined::UNREADY;
  }
  return admitted_ == Admitted::NOTHING  ? Declined::NO_BUDGET
         : admitted_ == Admitted::LIKELY ? Declined::UNLIKELY
                                         : Declined::USED_ONCE;
}

void Directory::forget_written() noexcept {
  for (uint32_t index = 0; index < records_.end(); ++index) {
    records_[RecordId(index)].was_below = false;
  }
}

void Directory::keep_ghosts(uint32_t chunks) {
  KVPOOL_CHECK(!ghosts_);
  ghosts_.emplace(chunks);
}

void Directory::become_ready(ChunkRecord& record) noexcept {
  const auto entry = table_.find(record.key);
  KVPOOL_CHECK(entry.has_value());
  table_.set_tiers(record.key, static_cast<uint8_t>(entry->tiers | tier_bit(tier_)));
  record.state = ChunkState::READY;
  record.stored_tick = tick_of(latest_ns_);
  record.touches = std::max(record.touches, uint8_t{1});
  NamespaceCounts& counts = namespaces_[record.owner.value()];
  ++counts.chunks;
  counts.held += record.holds > 0 ? 1U : 0U;
  counts.bytes += chunk_bytes(record);
  ++stats_.chunks;
  if (faster_ != nullptr) {
    KVPOOL_CHECK(faster_->note_slower(record.key, true));
  }
}

Reservation Directory::promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                               const uint8_t* keys, size_t n, uint64_t now_ns) {
  Reservation answer;
  expire_retention(now_ns);
  ReservationState state = place_chain(owner, size_class, parent, keys, n, ChunkState::PROMOTING, answer);
  for (size_t index = state.ancestors; index < state.records.size(); ++index) {
    const ChunkRecord& record = records_[state.records[index]];
    if (record.state == ChunkState::PROMOTING && slower_ != nullptr) {
      static_cast<void>(keep(state.records[index], slower_->retention(record.key).value_or(Retention{})));
    }
  }
  if (!state.records.empty()) {
    answer.id = ++last_id_;
    holds_.emplace(last_id_, std::move(state.records));
  }
  return answer;
}

bool Directory::landed(const ChunkKey& key, uint64_t generation, std::span<const int32_t> tokens) {
  const auto entry = table_.find(key);
  if (!entry || !entry->record.valid()) {
    return false;
  }
  ChunkRecord& record = records_[entry->record];
  if (record.state != ChunkState::PROMOTING || record.generation != generation) {
    return false;
  }
  --stats_.promoting;
  ++stats_.promoted_chunks;
  tokens_.keep(entry->record, tokens);
  become_ready(record);
  report(record, ChangeKind::ARRIVED, Cause::PROMOTED);
  return true;
}

uint64_t Directory::fail_landing(const ChunkKey& key, uint64_t generation) {
  const auto entry = table_.find(key);
  const bool is_this = entry && entry->record.valid() && records_[entry->record].generation == generation;
  if (!is_this || records_[entry->record].state != ChunkState::PROMOTING) {
    return 0;
  }
  departure_ = Cause::LANDING_FAILED;
  const uint64_t removed = remove_subtree(entry->record);
  stats_.dropped_chunks += removed;
  return removed;
}

Hold Directory::hold_unsaved(uint32_t scan, bool newest_first, size_t& saved) {
  saved = 0;
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    RecordId found;
    queues_.visit(ClassId(index), latest_ns_, scan, newest_first, [this, &found](RecordId id) {
      const bool is_lacking = wants_place_below(records_[id]);
      found = is_lacking ? id : RecordId();
      return !is_lacking;
    });
    if (found.valid()) {
      return hold_chain_of(found, saved);
    }
  }
  return {};
}

uint64_t Directory::count_unsaved() const noexcept {
  uint64_t count = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    count += record.state == ChunkState::READY && !is_elsewhere(record.key) ? 1U : 0U;
  }
  return count;
}

Hold Directory::hold_chain_of(RecordId leaf, size_t& saved) {
  std::vector<RecordId> chain;
  append_chain(leaf, chain);
  while (saved < chain.size() && is_elsewhere(records_[chain[saved]].key)) {
    ++saved;
  }
  return make_hold(std::move(chain));
}

bool Directory::release_untouched(HoldId hold) {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) {
    return false;
  }
  const std::vector<RecordId> records = std::move(found->second);
  holds_.erase(found);
  uint64_t child_access_ns = 0;  // a parent counts as used whenever its child was
  for (auto id = records.rbegin(); id != records.rend(); ++id) {
    ChunkRecord& record = records_[*id];
    KVPOOL_CHECK(record.holds > 0);
    record.last_access_ns = std::max(record.last_access_ns, child_access_ns);
    child_access_ns = record.last_access_ns;
    if (--record.holds > 0) {
      continue;
    }
    --stats_.held;
    if (record.state == ChunkState::ZOMBIE) {
      --stats_.zombies;
      free_slot(*id);
      continue;
    }
    KVPOOL_CHECK(record.state == ChunkState::READY);
    --namespaces_[record.owner.value()].held;
    queues_.add_by_access(*id, INSERT_STEPS, false);
    child_access_ns = record.last_access_ns;
    arena_.set_idle(record.page, record.last_access_ns);
    stats_.idle_bytes += chunk_bytes(record);
  }
  return true;
}

bool Directory::restore(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                        const ChunkKey& key, PageIndex page, uint64_t generation, Retention wish, uint64_t now_ns) {
  const auto above = parent ? table_.find(*parent) : std::nullopt;
  const bool has_parent = !parent || (above && records_[above->record].owner == owner &&
                                      records_[above->record].size_class == size_class);
  const bool is_visible = faster_ == nullptr || faster_->table_.find(key) || faster_->table_.has_room(key);
  if (!has_parent || !is_visible || generation == 0 || records_.is_full() || table_.find(key) ||
      !table_.has_room(key)) {
    return false;
  }
  const RecordId id = records_.allocate();
  if (!arena_.claim(size_class, page, id)) {
    records_.release(id);
    return false;
  }
  ChunkRecord& record = records_[id];
  record.key = key;
  record.is_sampled = is_in_sample(key);
  record.owner = owner;
  record.size_class = size_class;
  record.generation = generation;
  record.page = page;
  last_generation_ = std::max(last_generation_, generation);
  enter(key, id);
  table_.set_generation(page, generation);
  if (above) {
    records_.attach_child(above->record, id);
  }
  stats_.used_bytes += chunk_bytes(record);
  ++stats_.promoted_chunks;
  become_ready(record);
  latest_ns_ = std::max(latest_ns_, now_ns);
  if (wish != Retention{}) {
    steps_to_keep_ = STEPS_TO_KEEP;
    static_cast<void>(keep(id, wish));
  }
  return true;
}

std::vector<ChunkKey> Directory::take_departed() noexcept { return std::exchange(departed_, {}); }

std::vector<ChunkKey> Directory::take_lapsed() noexcept { return std::exchange(lapsed_, {}); }

// Children were restored after their parents and must stand before them in their list.
void Directory::finish_restore() noexcept {
  arena_.finish_claims();
  if (feed_ != nullptr && stats_.chunks > 0) {
    feed_->mark_gap();  // a whole tier has come at once: who reads along has to look at what there is
  }
  for (uint32_t index = records_.end(); index-- > 0;) {
    const RecordId id(index);
    if (records_[id].state == ChunkState::READY && records_[id].holds == 0) {
      queues_.add(id);
      arena_.set_idle(records_[id].page, 0);
      stats_.idle_bytes += chunk_bytes(records_[id]);
    }
  }
}

}  // namespace kvpool
