// What two tiers tell each other: shared entries, promotion, demotion, restoring. See directory.h.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"
#include "hash/sampling.h"

namespace kvpool {
namespace {

// Entries looked at from each end of a list for the place of a chunk that was held without a use: a guess that bounds the
// control thread's time at a few microseconds.
constexpr uint32_t UNTOUCHED_STEPS = 256;
// Chunks put into another list in one call, each by some hundred steps.
constexpr uint32_t MOVES_AT_ONCE = 64;

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
      mark_below(entry->record, true);
    }
    return true;
  }
  KVPOOL_CHECK(entry.has_value());
  table_.set_tiers(key, static_cast<uint8_t>(entry->tiers & ~bit));
  if (!entry->record.valid()) {
    table_.erase(key);
    return true;
  }
  mark_below(entry->record, false);
  return true;
}

void Directory::mark_below(RecordId id, bool is_below) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.is_below != is_below);
  record.is_below = is_below;
  set_written(record, record.was_below || is_below);
  if (record.state == ChunkState::READY) {
    stats_.unsaved_chunks += is_below ? UINT64_MAX : 1U;
    if (is_below) {
      write_shares_.note_written(record.size_class, chunk_bytes(record));
    }
  }
  settle(id);
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
  ChunkRecord& record = records_[id];
  if (const auto entry = table_.find(key)) {
    record.is_below = slower_ != nullptr && (entry->tiers & tier_bit(slower_->tier_)) != 0;
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
    const Declined reason = why_declined(record);
    ++stats_.declined[static_cast<size_t>(reason)];
    if (reason == Declined::UNREADY) {
      write_shares_.note_lost(record.size_class, chunk_bytes(record));
    }
  }
  if (ghosts_) {
    ghosts_->add(record.key);
  }
}

void Directory::admit(Admitted admitted, double least_chance) noexcept {
  vain_.was_vain = vain_.was_vain && admitted == admitted_ && least_chance == least_chance_;
  admitted_ = admitted;
  least_chance_ = least_chance;
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

uint32_t Directory::forget_written(uint32_t cursor, uint32_t looks) noexcept {
  const uint64_t stop = std::min<uint64_t>(uint64_t{cursor} + looks, records_.end());
  uint32_t moved = 0;
  uint64_t index = cursor;
  for (; index < stop && moved < MOVES_AT_ONCE; ++index) {
    const RecordId id(static_cast<uint32_t>(index));
    ChunkRecord& record = records_[id];
    if (record.was_below && !record.is_below) {
      set_written(record, false);
      settle(id);
      ++moved;
    }
  }
  vain_.was_vain = false;
  return index < records_.end() ? static_cast<uint32_t>(index) : 0;
}

void Directory::keep_ghosts(uint32_t chunks) {
  KVPOOL_CHECK(!ghosts_);
  ghosts_.emplace(chunks);
}

// Whether a chunk that is written may not become visible in this slower tier: what it was copied from is gone, or the shared
// table has no entry left for it. Keys are clients' choice: 256 of one home leave none once the chunk's own entry is gone.
std::optional<SaveState> Directory::why_unpublishable(const ChunkRecord& record, uint64_t source) const noexcept {
  if (faster_ == nullptr) {
    return std::nullopt;
  }
  const ChunkRecord* above = source == 0 ? nullptr : faster_->find_ready(record.key);
  if (source != 0 && (above == nullptr || above->generation != source)) {
    return SaveState::EXPIRED;
  }
  const bool has_entry = faster_->table_.find(record.key) || faster_->table_.has_room(record.key);
  return has_entry ? std::nullopt : std::optional(SaveState::FULL);
}

// REQUIRES, in a slower tier: the shared table has the key's entry, or room for it.
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
  counted_ += record.generation > counted_from_ ? 1U : 0U;
  stats_.unsaved_chunks += record.is_below ? 0U : 1U;
  if (faster_ != nullptr) {
    KVPOOL_CHECK(faster_->note_slower(record.key, true));
  }
}

Reservation Directory::promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                               const uint8_t* keys, size_t n, uint64_t now_ns) {
  Reservation answer;
  expire_retention(now_ns);
  ShareClaim claim;
  ReservationState state;
  if (begin_chain(owner, size_class, parent, state)) {
    place_chain(state, keys, n, ChunkState::PROMOTING, {}, claim, answer);
  } else {
    answer.states.assign(n, static_cast<uint8_t>(SaveState::NO_PARENT));
  }
  answer.offsets.resize(n);
  answer.generations.resize(n);
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

bool Directory::release_untouched(HoldId hold) {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) {
    return false;
  }
  const std::vector<RecordId> records = std::move(found->second);
  holds_.erase(found);
  uncharge(hold, records);
  uint64_t child_access_ns = 0;  // a parent counts as used whenever its child was
  for (auto id = records.rbegin(); id != records.rend(); ++id) {
    ChunkRecord& record = records_[*id];
    KVPOOL_CHECK(record.holds > 0);
    give_up_landing(*id);
    record.last_access_ns = std::max(record.last_access_ns, child_access_ns);
    child_access_ns = record.last_access_ns;
    if (--record.holds > 0) {
      continue;
    }
    --stats_.held;
    if (record.state == ChunkState::ZOMBIE) {
      let_zombie_go(*id);
      continue;
    }
    --namespaces_[record.owner.value()].held;
    KVPOOL_CHECK(record.state == ChunkState::READY);
    stand_by_access(*id, UNTOUCHED_STEPS, false);
    count_idle(record);
  }
  return true;
}

// Whether a chunk of an earlier life may stand behind its parent, and the faster tier's table can say that it is here.
bool Directory::is_restorable(NamespaceId owner, ClassId size_class, const std::optional<TableEntry>& above,
                              const ChunkKey& key) const noexcept {
  if (above) {
    const ChunkRecord& parent = records_[above->record];
    if (parent.state != ChunkState::READY || parent.owner != owner || parent.size_class != size_class ||
        parent.depth + 1 >= max_chain_) {
      return false;
    }
  }
  if (faster_ == nullptr) {
    return true;
  }
  const auto shared = faster_->table_.find(key);
  if (!shared) {
    return faster_->table_.has_room(key);
  }
  return !shared->record.valid() || faster_->records_[shared->record].owner == owner;
}

bool Directory::restore(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                        const ChunkKey& key, PageIndex page, uint64_t generation, Retention wish, uint64_t now_ns) {
  const auto above = parent ? table_.find(*parent) : std::nullopt;
  if (parent.has_value() != above.has_value() || !is_restorable(owner, size_class, above, key)) {
    return false;
  }
  if (generation == 0 || generation >= GENERATION_END || records_.is_full() || table_.find(key) || !table_.has_room(key)) {
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
  latest_ns_ = std::max(latest_ns_, now_ns);
  become_ready(record);
  if (wish != Retention{}) {
    steps_to_keep_ = STEPS_TO_KEEP;
    static_cast<void>(keep(id, wish));
  }
  // What comes later was used before it: each goes behind the one restored last, children on the older side of parents.
  queues_.add_oldest(id);
  arena_.set_idle(page, record.last_access_ns);
  stats_.idle_bytes += chunk_bytes(record);
  return true;
}

void Directory::finish_restore(uint64_t generation) noexcept {
  last_generation_ = std::max(last_generation_, std::min(generation, GENERATION_END));
  if (feed_ != nullptr && stats_.chunks > 0) {
    feed_->mark_gap();  // who reads along has to look at what there is
  }
}

std::vector<ChunkKey> Directory::take_departed() noexcept { return std::exchange(departed_, {}); }

std::vector<ChunkKey> Directory::take_lapsed() noexcept { return std::exchange(lapsed_, {}); }

}  // namespace kvpool
