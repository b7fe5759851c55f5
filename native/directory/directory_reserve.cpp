// Reservations: which chunks of a chain are present, reserved or declined. See directory.h; commit and end are in
// directory_writing.cpp, the victims for their room in room_planner.cpp.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "directory/directory.h"
#include "hash/sampling.h"

namespace kvpool {
namespace {

// Keys whose places are asked of the memory before they are looked at: to decide one takes about as long as some misses of the cache.
constexpr size_t KEYS_AHEAD = 8;

}  // namespace

Reservation Directory::reserve(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                               const uint8_t* keys, size_t n, uint64_t now_ns, HolderId holder, ReserveBounds bounds) {
  Reservation answer;
  retention_.expire_due(now_ns);
  ShareClaim claim{holder, shares_.protected_bytes()};
  ReservationState state;
  if (begin_chain(owner, size_class, parent, state)) {
    place_chain(state, keys, n, {}, bounds, claim, answer);
  } else {
    answer.states.assign(n, static_cast<uint8_t>(SaveState::NO_PARENT));
  }
  finish_reserve(std::move(state), claim, answer, bounds.is_kept || answer.states.size() < n, now_ns);
  return answer;
}

Reservation Directory::reserve_more(HoldId reservation, const uint8_t* keys, size_t n, uint64_t now_ns,
                                    ReserveBounds bounds) {
  Reservation answer;
  answer.id = reservation;
  ReservationState* const found = holds_.find_reservation(reservation);
  if (found == nullptr || found->expired || records_[found->records.back()].state == ChunkState::ZOMBIE) {
    answer.states.assign(n, static_cast<uint8_t>(SaveState::NO_PARENT));
    complete(answer);
    return answer;
  }
  retention_.expire_due(now_ns);
  ReservationState& state = *found;
  const size_t before = state.records.size();
  const bool is_compared = state.is_compared || shares_.accounts().counts(state.holder) != state.counts;
  ShareClaim claim{state.holder, shares_.protected_bytes(), before, is_compared, reservation};
  place_chain(state, keys, n, {}, bounds, claim, answer);
  complete(answer);
  state.is_compared = claim.is_compared;
  const size_t added = state.records.size() - before;
  const auto writing = static_cast<size_t>(
      std::count(answer.states.begin(), answer.states.end(), static_cast<uint8_t>(SaveState::RESERVED)));
  state.writing += writing;
  shares_.grow(state, writing, added);
  return answer;
}

// Holds what precedes the chain. False where that is not stored, and is not being stored.
bool Directory::begin_chain(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                            ReservationState& state, bool is_promotion) noexcept {
  KVPOOL_CHECK(owner.value() < namespaces_.size());
  KVPOOL_CHECK(size_class.value() < arena_.class_count());
  state.owner = owner;
  state.size_class = size_class;
  state.extents = arena_.size_class(size_class).extents;
  state.taken_bytes = shares_.taken_bytes(size_class);
  if (!parent) {
    return true;
  }
  const RecordId above = find_record(*parent);
  if (!above.valid() || !(records_[above].has_bytes() || (!is_promotion && may_follow(records_[above]))) ||
      records_[above].owner != owner || records_[above].size_class != size_class) {
    return false;
  }
  append_chain(above, HELD_ANCESTORS, state.records);
  ChunkRecord& first = records_[state.records.front()];
  first.is_cut = first.is_cut || first.parent.valid();
  state.ancestors = state.records.size();
  for (const RecordId id : state.records) {
    add_hold(id);
    state.is_uncertain = state.is_uncertain || records_[id].state != ChunkState::READY;
  }
  return true;
}

// Holds what is present of the keys, and makes records for the others, as far as that goes without a gap: to be written, or
// read from `sources`, one a key. Answers all keys once there is one, else as many as the bounds allow. To a writer a chunk that
// is on its way from another tier, or that another one writes, is PENDING, and held: what follows it can be reserved.
void Directory::place_chain(ReservationState& state, const uint8_t* keys, size_t n, std::span<const PromotionSource> sources,
                            ReserveBounds bounds, ShareClaim& claim, Reservation& answer) {
  const size_t before = state.records.size();
  const size_t wanted = std::min(n, bounds.limit);
  answer.states.reserve(wanted);
  answer.offsets.reserve(wanted);
  answer.generations.reserve(wanted);
  answer.slots.reserve(wanted);
  WindowSearch search;
  auto rest = SaveState::NO_PARENT;
  bool is_open = true;
  const auto key_at = [&](size_t index) { return ChunkKey::from_bytes(keys + index * KEY_BYTES); };
  // The places of the next keys come into the cache while the ones before are decided.
  std::array<uint64_t, KEYS_AHEAD> homes;
  const auto prefetch = [&](size_t index) {
    if (index < wanted) {
      const ChunkKey key = key_at(index);
      homes[index % KEYS_AHEAD] = table_.prefetch(key);
      policy_->prefetch(key);
    }
  };
  for (size_t index = 0; index < KEYS_AHEAD; ++index) {
    prefetch(index);
  }
  while (is_open && answer.states.size() < wanted) {
    const RecordId above = state.records.empty() ? RecordId() : state.records.back();
    if (above.valid() && records_[above].depth + 1 >= max_chain_) {
      rest = SaveState::TOO_LONG;
      is_open = false;
      break;
    }
    RecordId record;
    const size_t at = answer.states.size();
    const ChunkKey key = key_at(at);
    const TableLook look = table_.look_from(homes[at % KEYS_AHEAD], key);
    prefetch(at + KEYS_AHEAD);
    const bool is_following = above.valid() && records_[above].state == ChunkState::WRITING &&
                              (records_[above].is_following || state.written.empty() || state.written.back() + 1 != state.records.size());
    // Asked where a slot is needed alone: what is there already shows by then how much of the chain the holder protects anyway.
    const bool is_there = look.entry && look.entry->record.valid();
    const bool may_reserve = is_there || shares_.has_share(claim, state.records, state.taken_bytes);
    if (is_following && waiting_.is_full() && !(look.entry && look.entry->record.valid())) {
      is_open = false;  // as if nothing could follow
      break;
    }
    const PromotionSource* source = sources.empty() ? nullptr : &sources[at];
    const bool may_pass = !bounds.is_run || state.written.empty();
    SaveState result = place(state.owner, state.size_class, above, key, look, search, source, may_reserve, may_pass, record);
    if (result == SaveState::NOT_READY && bounds.may_wait) {
      break;
    }
    is_open = record.valid();
    if (result == SaveState::RESERVED) {
      records_.seal(record, source != nullptr ? OWN_WRITER : bounds.is_joint ? HolderId() : claim.holder);
      if (is_following) {
        waiting_.begin_following(records_[record]);
      }
    }
    if (is_open) {
      state.records.push_back(record);
      if (result == SaveState::RESERVED) {
        state.written.push_back(static_cast<uint32_t>(state.records.size() - 1));
      } else {
        state.first_reserved += state.written.empty() ? 1U : 0U;
        state.is_uncertain = state.is_uncertain || records_[record].state != ChunkState::READY;
      }
      state.is_uncertain = state.is_uncertain || records_[record].state == ChunkState::PROMOTING;
    }
    if (result == SaveState::PRESENT && source == nullptr && state.is_uncertain) {
      result = SaveState::PENDING;  // it may not land, and takes its descendants with it
    }
    answer.states.push_back(static_cast<uint8_t>(result));
    answer.offsets.push_back(is_open ? uint64_t{records_[record].page.value()} * PAGE_BYTES : 0);
    answer.generations.push_back(is_open ? records_[record].generation : 0);
  }
  LastRun last;
  for (size_t made = before; made < state.records.size(); ++made) {
    answer.slots.push_back(table_.slot_of(records_[state.records[made]].page, last).packed());
  }
  if (!is_open) {
    answer.states.resize(n, static_cast<uint8_t>(rest));
  }
  note_chain(state, before);
}

// Counts the states of an answer, and completes its columns.
void Directory::complete(Reservation& answer) noexcept {
  answer.offsets.resize(answer.states.size());
  answer.generations.resize(answer.states.size());
  answer.slots.resize(answer.states.size());
  for (const uint8_t code : answer.states) {
    ++stats_.answers[code];
  }
}

void Directory::finish_reserve(ReservationState state, const ShareClaim& claim, Reservation& answer, bool is_kept, uint64_t now_ns) {
  complete(answer);
  if (state.records.empty() || (state.written.empty() && !is_kept)) {
    end_holds(state.records, now_ns);  // nothing to write: what is present was merely touched
    return;
  }
  state.writing = state.written.size();
  state.holder = claim.holder;
  state.is_compared = claim.is_compared;
  state.counts = shares_.accounts().counts(claim.holder);
  const auto [id, opened] = holds_.open_reservation(std::move(state));
  answer.id = id;
  shares_.open(id, opened, claim);
}

SaveState Directory::present_state(NamespaceId owner, ClassId size_class, RecordId parent,
                                   const TableEntry& entry) const noexcept {
  const ChunkRecord& record = records_[entry.record];
  if (record.owner != owner || record.size_class != size_class) {
    return SaveState::FOREIGN;
  }
  // A key names its whole prefix; a caller that names another parent has a wrong chain.
  if (record.parent != parent) {
    return SaveState::NO_PARENT;
  }
  return record.state == ChunkState::WRITING ? SaveState::PENDING : SaveState::PRESENT;
}

// Decides one chunk; `record` is set where it is PRESENT or RESERVED, or PENDING and `may_pass`, and is then held once more.
SaveState Directory::place(NamespaceId owner, ClassId size_class, RecordId parent, const ChunkKey& key, const TableLook& look,
                           WindowSearch& search, const PromotionSource* source, bool may_reserve, bool may_pass,
                           RecordId& record) noexcept {
  const auto& entry = look.entry;
  if (entry && entry->record.valid()) {
    const SaveState state = present_state(owner, size_class, parent, *entry);
    const bool is_coming = state == SaveState::PENDING && source == nullptr && may_pass && may_follow(records_[entry->record]);
    if (state == SaveState::PRESENT || is_coming) {
      record = entry->record;
      add_hold(record);
    }
    return state;
  }
  if ((entry || is_lower()) && tiers_ != nullptr && tiers_->is_foreign(*this, owner, key)) {
    return SaveState::FOREIGN;
  }
  if (const auto refusal = originals_ == nullptr ? std::nullopt : originals_->why_not_copied(owner, size_class, parent, key)) {
    return *refusal;
  }
  const ChunkRecord* const lower = source == nullptr ? nullptr : promotions_.find_source(key, *source);
  if (source != nullptr && lower == nullptr && !promotions_.is_outside(*source)) {
    return SaveState::NO_PARENT;  // the lower tier has lost it meanwhile
  }
  if (!may_reserve) {
    return SaveState::QUOTA;
  }
  const SaveState state = find_room(size_class, key, look.has_place, search);
  if (state != SaveState::RESERVED) {
    return state;
  }
  const RecordId id = records_.allocate();
  ChunkRecord& fresh = records_[id];
  fresh.key = key;
  fresh.is_sampled = is_in_sample(key);
  fresh.owner = owner;
  fresh.size_class = size_class;
  occupy(id, source == nullptr ? ChunkState::WRITING : ChunkState::PROMOTING);
  fresh.is_used = true;
  policy_->note_new(fresh, latest_ns_);
  if (parent.valid()) {
    records_.attach_child(parent, id);
  }
  if (source != nullptr) {
    promotions_.begin_promotion(id, *source, lower);
  }
  record = id;
  return SaveState::RESERVED;
}

bool Directory::has_room_for(ClassId size_class, uint64_t chunks) const noexcept {
  if (!room_.protects_unsaved() && !arena_.is_behind() && stats_.pinned_bytes == 0) {
    return true;
  }
  const uint64_t unused = arena_.lent_slots(size_class) - std::min(arena_.lent_slots(size_class), arena_.used_slots(size_class));
  return unused + queues_.count(size_class, Standing::SAVED) >= chunks;
}

// Room for a key's entry in the table, where it has no place there yet, and for its bytes.
SaveState Directory::find_room(ClassId size_class, const ChunkKey& key, bool has_place, WindowSearch& search) noexcept {
  const bool is_crowded = !has_place;
  if (is_crowded) {
    if (const SaveState state = room_.plan_room(size_class, search, latest_ns_).state; state != SaveState::RESERVED) {
      return state;
    }
    if (!clear_reach(key)) {
      return room_.protects_unsaved() ? SaveState::NOT_READY : SaveState::FULL;
    }
  }
  const SaveState state = make_room(size_class, search);
  if (state != SaveState::RESERVED && is_crowded && table_.find(key)) {
    table_.erase(key);  // the slot that it got and does not need
  }
  return state;
}

// Evicts exactly what is in the plan, or nothing.
SaveState Directory::make_room(ClassId size_class, WindowSearch& search) noexcept {
  const RoomPlan& plan = room_.plan_room(size_class, search, latest_ns_);
  if (plan.state != SaveState::RESERVED) {
    return plan.state;
  }
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  if (plan.own.valid()) {
    evict(plan.own, Eviction::OWN_CLASS);
  }
  for (const RecordId id : plan.slot_owners) {
    if (records_[id].state == ChunkState::READY) {  // else it went with its parent
      evict_subtree(id, Eviction::OTHER_CLASS);
    }
  }
  for (const RecordId id : plan.further) {
    const Eviction reason = records_[id].size_class == size_class ? Eviction::OWN_CLASS : Eviction::OTHER_CLASS;
    evict(id, stats_.used_bytes + bytes > geometry_.capacity ? reason : Eviction::INDEX_FULL);
  }
  KVPOOL_CHECK(arena_.can_allocate(size_class));
  KVPOOL_CHECK(stats_.used_bytes + bytes <= geometry_.capacity);
  return SaveState::RESERVED;
}

// Gives a blank record its slot, generation and entry.
void Directory::occupy(RecordId id, ChunkState as) noexcept {
  ChunkRecord& fresh = records_[id];
  const auto page = arena_.allocate(fresh.size_class, id);
  KVPOOL_CHECK(page.has_value());
  KVPOOL_CHECK(table_.has_generation(*page, 0));
  records_.note_generation(++last_generation_);
  fresh.generation = last_generation_;
  fresh.page = *page;
  table_.open_slot(*page);
  holds_.hold(id);
  fresh.state = as;
  fresh.has_writer = true;
  // What returns from a lower tier, or comes again after it was evicted, was used before.
  fresh.touches = as == ChunkState::PROMOTING || demotion_.remembers(fresh.key) ? 2 : 1;
  enter(fresh.key, id);
  stats_.used_bytes += chunk_bytes(fresh);
  shares_.protect(fresh.size_class);
  if (as == ChunkState::WRITING) {
    ++stats_.writing;
    ++namespaces_[fresh.owner.value()].writing;
    return;
  }
  // Readers may come before the first extent does.
  table_.set_generation(fresh.page, fresh.generation);
  ++stats_.promoting;
}

}  // namespace kvpool
