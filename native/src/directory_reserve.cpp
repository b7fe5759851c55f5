// Reservations: reserve, commit, end, expire, and the room they need. See directory.h.
#include <algorithm>

#include "kvpool/check.h"
#include "kvpool/directory.h"
#include "kvpool/sampling.h"

namespace kvpool {
namespace {

[[nodiscard]] uint8_t turn_after(uint8_t turn) noexcept { return static_cast<uint8_t>(std::min(turn + 1, UINT8_MAX)); }

}  // namespace

Reservation Directory::reserve(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                               const uint8_t* keys, size_t n, uint64_t now_ns) {
  Reservation answer;
  expire_retention(now_ns);
  ReservationState state = place_chain(owner, size_class, parent, keys, n, ChunkState::WRITING, answer);
  finish_reserve(std::move(state), answer, now_ns);
  return answer;
}

// Holds what precedes the keys and what is present of them, and makes records in the state `as` for the others, as far as
// that goes without a gap.
Directory::ReservationState Directory::place_chain(NamespaceId owner, ClassId size_class,
                                                   const std::optional<ChunkKey>& parent, const uint8_t* keys, size_t n,
                                                   ChunkState as, Reservation& answer) {
  KVPOOL_CHECK(owner.value() < namespaces_.size());
  KVPOOL_CHECK(size_class.value() < arena_.class_count());
  answer = {0, std::vector<uint8_t>(n, static_cast<uint8_t>(SaveState::NO_PARENT)), std::vector<uint64_t>(n),
            std::vector<uint64_t>(n)};
  ReservationState state;
  state.layers = arena_.size_class(size_class).layers;
  RecordId above;
  bool is_open = true;
  if (parent) {
    const auto entry = table_.find(*parent);
    is_open = entry && entry->record.valid() && has_bytes(records_[entry->record].state) &&
              records_[entry->record].owner == owner && records_[entry->record].size_class == size_class;
    if (is_open) {
      above = entry->record;
      append_chain(above, state.records);
    }
  }
  state.ancestors = state.records.size();
  for (const RecordId id : state.records) {
    add_hold(id);
  }
  WindowSearch search;
  for (size_t index = 0; index < n && is_open; ++index) {
    RecordId record;
    const ChunkKey key = ChunkKey::from_bytes(keys + index * KEY_BYTES);
    const SaveState result = place(owner, size_class, above, key, search, as, record);
    answer.states[index] = static_cast<uint8_t>(result);
    is_open = record.valid();
    if (is_open) {
      state.records.push_back(record);
      state.first_reserved += result == SaveState::PRESENT ? 1U : 0U;
      answer.offsets[index] = uint64_t{records_[record].page.value()} * PAGE_BYTES;
      answer.generations[index] = records_[record].generation;
      above = record;
    }
  }
  note_chain(state);
  return state;
}

// A request that stores something says how much of its chain was here: what was acquired since it was stored. What the same
// request stored a while ago was not, and is of its turn. What is remembered has its turn already.
void Directory::note_chain(const ReservationState& state) noexcept {
  const size_t before = state.ancestors + state.first_reserved;
  if (state.records.size() == before) {
    return;
  }
  size_t found = 0;
  while (found < before && records_[state.records[found]].is_reused) {
    ++found;
  }
  uint8_t turn = 1;
  if (before > 0) {
    const ChunkRecord& last = records_[state.records[before - 1]];
    turn = last.is_reused || last.turn == 0 ? turn_after(last.turn) : last.turn;
  }
  for (size_t index = before; index < state.records.size(); ++index) {
    ChunkRecord& record = records_[state.records[index]];
    turn = record.turn == 0 ? turn : turn_after(record.turn);
    record.turn = record.turn == 0 ? turn : record.turn;
  }
  const uint8_t kind = chain_kind_of(records_[state.records.back()].turn, found);
  for (const RecordId id : state.records) {
    records_[id].chain_kind = kind;
  }
}

void Directory::finish_reserve(ReservationState state, Reservation& answer, uint64_t now_ns) {
  for (const uint8_t code : answer.states) {
    ++stats_.answers[code];
  }
  if (state.records.size() == state.ancestors + state.first_reserved) {
    end_holds(state.records, now_ns);  // nothing to write: what is present was merely touched
    return;
  }
  answer.id = ++last_id_;
  reservations_.emplace(last_id_, std::move(state));
}

SaveState Directory::present_state(NamespaceId owner, ClassId size_class, RecordId parent,
                                   const TableEntry& entry) const noexcept {
  const ChunkRecord& record = records_[entry.record];
  if (record.owner != owner || record.size_class != size_class) {
    return SaveState::FOREIGN;
  }
  if (record.state == ChunkState::WRITING) {
    return SaveState::PENDING;
  }
  // A key names its whole prefix; a caller that says otherwise has its chain wrong.
  return record.parent == parent ? SaveState::PRESENT : SaveState::NO_PARENT;
}

// Decides one chunk; `record` is set where it is PRESENT or RESERVED, and is then held once more.
SaveState Directory::place(NamespaceId owner, ClassId size_class, RecordId parent, const ChunkKey& key,
                           WindowSearch& search, ChunkState as, RecordId& record) noexcept {
  const auto entry = table_.find(key);
  if (entry && entry->record.valid()) {
    const SaveState state = present_state(owner, size_class, parent, *entry);
    if (state == SaveState::PRESENT) {
      record = entry->record;
      add_hold(record);
    }
    return state;
  }
  if (entry && is_foreign_below(owner, key)) {
    return SaveState::FOREIGN;
  }
  if (!entry && as == ChunkState::PROMOTING) {
    return SaveState::NO_PARENT;  // the slower tier has lost it meanwhile
  }
  if (!entry && !table_.is_in_reach(key)) {
    return SaveState::FULL;
  }
  const SaveState state = make_room(size_class, search);
  if (state != SaveState::RESERVED) {
    return state;
  }
  const RecordId id = records_.allocate();
  ChunkRecord& fresh = records_[id];
  fresh.key = key;
  fresh.is_sampled = is_in_sample(key);
  fresh.owner = owner;
  fresh.size_class = size_class;
  occupy(id, as);
  fresh.is_used = true;
  policy_->note_new(fresh, latest_ns_);
  if (parent.valid()) {
    records_.attach_child(parent, id);
  }
  record = id;
  return SaveState::RESERVED;
}

// Gives a blank record its slot, generation and entry.
void Directory::occupy(RecordId id, ChunkState as) noexcept {
  ChunkRecord& fresh = records_[id];
  const auto page = arena_.allocate(fresh.size_class, id);
  KVPOOL_CHECK(page.has_value());
  KVPOOL_CHECK(table_.generation(*page) == 0);
  fresh.generation = ++last_generation_;
  fresh.page = *page;
  fresh.holds = 1;
  fresh.state = as;
  // What comes back from below, or again after it was evicted, has been used before.
  fresh.touches = as == ChunkState::PROMOTING || (ghosts_ && ghosts_->contains(fresh.key)) ? 2 : 1;
  enter(fresh.key, id);
  stats_.used_bytes += chunk_bytes(fresh);
  ++stats_.held;
  if (as == ChunkState::WRITING) {
    ++stats_.writing;
    return;
  }
  // Readers may come before the first layer does.
  table_.set_landed(fresh.page, 0);
  table_.set_generation(fresh.page, fresh.generation);
  ++stats_.promoting;
}

// Sees first whether everything needed can be had, then evicts until it is there: nothing goes in vain.
SaveState Directory::make_room(ClassId size_class, WindowSearch& search) noexcept {
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  if (stats_.used_bytes - stats_.idle_bytes + bytes > geometry_.capacity) {
    return SaveState::FULL;
  }
  if (records_.is_full() && stats_.idle_bytes == 0) {
    return SaveState::FULL;
  }
  const SaveState slot = make_slot(size_class, search);
  if (slot != SaveState::RESERVED) {
    return slot;
  }
  while (stats_.used_bytes + bytes > geometry_.capacity || records_.is_full()) {
    const RecordId victim = queues_.victim(latest_ns_);
    KVPOOL_CHECK(victim.valid());
    if (!may_evict(victim)) {
      return SaveState::NOT_READY;
    }
    const Eviction reason = records_[victim].size_class == size_class ? Eviction::OWN_CLASS : Eviction::OTHER_CLASS;
    evict(victim, stats_.used_bytes + bytes > geometry_.capacity ? reason : Eviction::INDEX_FULL);
  }
  KVPOOL_DCHECK(arena_.can_allocate(size_class));
  return SaveState::RESERVED;
}

// Whether clearing a window of other classes costs less than evicting this chunk: the lower priority first, then the older.
bool Directory::is_cheaper(const SegmentWindow& window, RecordId own) const noexcept {
  const uint8_t level = records_[own].level;
  const bool is_own_kept = level > DEFAULT_PRIORITY;
  if (level < DEFAULT_PRIORITY || window.is_kept != is_own_kept) {
    return level >= DEFAULT_PRIORITY && is_own_kept;
  }
  return window.newest_ns < records_[own].last_access_ns;
}

// Evicts the class's own next victim, or clears a window of other classes that was used longer ago than that.
SaveState Directory::make_slot(ClassId size_class, WindowSearch& search) noexcept {
  if (arena_.can_allocate(size_class)) {
    return SaveState::RESERVED;
  }
  const RecordId own = queues_.victim(size_class, latest_ns_);
  find_window(size_class, search);
  if (search.window && (!own.valid() || is_cheaper(*search.window, own))) {
    const std::vector<RecordId> owners = arena_.owners_in(*search.window);
    if (!std::all_of(owners.begin(), owners.end(), [this](RecordId id) { return may_evict(id); })) {
      return SaveState::NOT_READY;
    }
    for (const RecordId id : owners) {
      if (records_[id].state == ChunkState::READY) {  // else it went with its parent
        evict_subtree(id, Eviction::OTHER_CLASS);
      }
    }
    KVPOOL_CHECK(arena_.can_allocate(size_class));
    return SaveState::RESERVED;
  }
  if (!own.valid()) {
    return arena_.is_behind() ? SaveState::NOT_READY : SaveState::FULL;
  }
  if (!may_evict(own)) {
    return SaveState::NOT_READY;
  }
  evict(own, Eviction::OWN_CLASS);
  return SaveState::RESERVED;
}

bool Directory::may_evict(RecordId id) const noexcept {
  return !protects_unsaved_ || !wants_place_below(records_[id]);
}

void Directory::find_window(ClassId size_class, WindowSearch& search) const noexcept {
  if (search.searched && (!search.window || arena_.is_clearable(size_class, *search.window))) {
    return;
  }
  search.searched = true;
  search.window = std::nullopt;
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    if (ClassId(index) != size_class && arena_.lent_runs(ClassId(index)) > 0) {
      search.window = arena_.coldest_window(size_class);
      return;
    }
  }
}

std::optional<uint32_t> Directory::reservation_layers(HoldId reservation) const {
  const auto found = reservations_.find(reservation);
  return found == reservations_.end() ? std::nullopt : std::optional<uint32_t>(found->second.layers);
}

std::vector<uint8_t> Directory::commit(HoldId reservation, size_t first, size_t count, const uint32_t* checksums,
                                       uint64_t now_ns, std::span<const int32_t> tokens) {
  KVPOOL_CHECK(count == 0 || tokens.size() % count == 0);
  const size_t chunk_tokens = count == 0 ? 0 : tokens.size() / count;
  latest_ns_ = std::max(latest_ns_, now_ns);
  std::vector<uint8_t> answers(count, static_cast<uint8_t>(SaveState::EXPIRED));
  const auto found = reservations_.find(reservation);
  if (found == reservations_.end() || found->second.expired) {
    return answers;
  }
  const ReservationState& state = found->second;
  const size_t before = state.ancestors + state.first_reserved;
  const size_t reserved = state.records.size() - before;
  for (size_t index = 0; index < count && first < reserved && index < reserved - first; ++index) {
    const RecordId id = state.records[before + first + index];
    ChunkRecord& record = records_[id];
    if (record.state == ChunkState::ZOMBIE) {
      continue;
    }
    if (record.state == ChunkState::WRITING) {
      if (record.parent.valid() && !has_bytes(records_[record.parent].state)) {
        answers[index] = static_cast<uint8_t>(SaveState::NO_PARENT);
        continue;
      }
      tokens_.keep(id, tokens.subspan(index * chunk_tokens, chunk_tokens));
      // In this order: who finds the key finds its generation, who finds the generation finds the layers and checksums.
      table_.set_checksums(record.page, checksums + index * state.layers, state.layers);
      table_.set_landed(record.page, state.layers);
      table_.set_generation(record.page, record.generation);
      --stats_.writing;
      ++stats_.stored_chunks;
      become_ready(record);
      report(record, ChangeKind::ARRIVED, Cause::STORED);
    }
    answers[index] = static_cast<uint8_t>(SaveState::STORED);
  }
  return answers;
}

void Directory::abort_writing(RecordId id) noexcept {
  KVPOOL_CHECK(records_[id].holds == 1);
  if (records_[id].touches > 1) {
    --records_[id].touches;  // it was not stored: what was remembered of it is remembered again
    policy_->note_evicted(records_[id]);
  }
  hide(id);
  records_[id].holds = 0;
  --stats_.held;
  ++stats_.aborted_chunks;
  free_slot(id);
}

bool Directory::end_reservation(HoldId reservation, uint64_t now_ns) {
  const auto found = reservations_.find(reservation);
  if (found == reservations_.end()) {
    return false;
  }
  std::vector<RecordId>& records = found->second.records;
  for (auto id = records.rbegin(); id != records.rend(); ++id) {
    if (records_[*id].state == ChunkState::WRITING) {
      abort_writing(*id);
    }
  }
  std::erase_if(records, [this](RecordId id) { return records_[id].state == ChunkState::FREE; });
  end_holds(records, now_ns);
  reservations_.erase(found);
  return true;
}

bool Directory::expire_reservation(HoldId reservation, uint64_t now_ns) {
  const auto found = reservations_.find(reservation);
  if (found == reservations_.end() || found->second.expired) {
    return false;
  }
  ReservationState& state = found->second;
  for (auto id = state.records.rbegin(); id != state.records.rend(); ++id) {
    if (records_[*id].state == ChunkState::WRITING) {
      make_zombie(*id);
      ++stats_.aborted_chunks;
    }
  }
  const auto is_zombie = [this](RecordId id) { return records_[id].state == ChunkState::ZOMBIE; };
  const auto split = std::stable_partition(state.records.begin(), state.records.end(), is_zombie);
  end_holds(std::vector<RecordId>(split, state.records.end()), now_ns);
  state.records.erase(split, state.records.end());
  state.expired = true;
  return true;
}

}  // namespace kvpool
