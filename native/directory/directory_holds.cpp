// Holds: acquire, duplicate, columns, release. See directory.h, invariants 1 to 3.
#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// As in index_view.cpp; records are larger, but their reading is spread over a second pass.
constexpr size_t PREFETCH_AHEAD = 12;

// Chunks without a parent in the order in which a chain's stand in the queues: the one that goes first is the last.
[[nodiscard]] std::vector<RecordId> last_first(std::span<const RecordId> alone) { return {alone.rbegin(), alone.rend()}; }

[[nodiscard]] uint8_t turn_after(uint8_t turn) noexcept { return static_cast<uint8_t>(std::min(turn + 1, UINT8_MAX)); }

}  // namespace

// Finds the records of leading keys, which are read when they have come near: `may_go_on(entry)` is called with each.
template <typename MayGoOn>
void Directory::find_records(const uint8_t* keys, size_t n, std::vector<RecordId>& out, MayGoOn may_go_on) const {
  out.clear();
  out.reserve(n);
  std::array<uint64_t, PREFETCH_AHEAD> homes{};  // by index modulo their number
  for (size_t index = 0; index < std::min(n, PREFETCH_AHEAD); ++index) {
    homes[index] = table_.prefetch(ChunkKey::from_bytes(keys + index * KEY_BYTES));
  }
  for (size_t index = 0; index < n; ++index) {
    const uint64_t home = homes[index % PREFETCH_AHEAD];
    if (index + PREFETCH_AHEAD < n) {
      homes[index % PREFETCH_AHEAD] = table_.prefetch(ChunkKey::from_bytes(keys + (index + PREFETCH_AHEAD) * KEY_BYTES));
    }
    const auto entry = table_.find_from(home, ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!entry || !entry->record.valid() || !may_go_on(*entry)) {
      break;
    }
    records_.prefetch(entry->record);
    out.push_back(entry->record);
  }
}

size_t Directory::find_prefix(NamespaceId owner, RecordId parent, const uint8_t* keys, size_t n,
                              std::vector<RecordId>& out) const {
  find_records(keys, n, out, [](const TableEntry& entry) { return entry.tiers != 0; });
  size_t length = 0;
  while (length < out.size() && records_[out[length]].owner == owner && records_[out[length]].parent == parent &&
         records_[out[length]].has_bytes()) {
    parent = out[length++];
  }
  out.resize(length);
  return length;
}

// The record of a parent, or none for the root; nothing where it is not here.
std::optional<RecordId> Directory::find_above(const std::optional<ChunkKey>& parent) const noexcept {
  if (!parent) {
    return RecordId();
  }
  const RecordId id = find_record(*parent);
  return id.valid() ? std::optional(id) : std::nullopt;
}

void Directory::add_holds(std::span<const RecordId> chain) noexcept {
  holds_.hold_all(chain, [this](std::span<const RecordId> begun) {
    make_busy(begun);
    count_held(begun, 1);
  });
}

// So many chunks more of their namespace are held, or less: `by` is 1 or -1.
void Directory::count_held(std::span<const RecordId> chain, uint64_t by) noexcept {
  if (!chain.empty()) {
    namespaces_[records_[chain.front()].owner.value()].held += by * chain.size();
  }
}

// `preceding`: how many chunks the request has found before these; nothing where they are no chain: each of them is used for itself.
void Directory::note_reuse(std::span<const RecordId> records, std::optional<size_t> preceding, uint64_t now_ns) noexcept {
  latest_ns_ = std::max(latest_ns_, now_ns);
  // Until the request stores some more.
  const uint8_t of_chain = preceding ? chain_kind_of(records_[records.back()].turn, *preceding + records.size()) : uint8_t{0};
  // A chain is mostly of one class, and was used at one time: counted together, for this is on the way of every load.
  uint8_t learned_class = 0;
  uint64_t used_ns = latest_ns_;
  uint32_t unheld = 0;
  uint32_t in_use = 0;
  const auto count = [&] {
    stats_.reuse_gaps.add(latest_ns_ - used_ns, unheld);
    policy_->note_reuse(learned_class, used_ns, std::exchange(unheld, 0), latest_ns_);
  };
  for (const RecordId id : records) {
    ChunkRecord& record = records_[id];
    if (record.holds != 0) {
      ++in_use;
    } else if (record.last_access_ns == used_ns && record.learned_class == learned_class) {
      ++unheld;
    } else {
      count();
      used_ns = record.last_access_ns;
      learned_class = record.learned_class;
      unheld = 1;
    }
    record.chain_kind = preceding ? of_chain : chain_kind_of(record.turn, 1);
    record.is_reused = true;
    record.is_used = true;
    record.touches = static_cast<uint8_t>(record.touches + (record.touches < UINT8_MAX ? 1 : 0));
  }
  count();
  stats_.reuse_gaps.add(0, in_use);
  if (is_lower()) {
    for (const RecordId id : records) {
      records_[id].retained_tick = tick_of(latest_ns_);  // a use on its way up
    }
  }
}

// A request that stores chunks shows how much of its chain was here: what was acquired since it was stored. What the same request
// stored a while ago was not acquired, and is of its turn. A remembered chunk has its turn already. `from`: of the reservation's
// records, the first that this is about, but for ancestors.
void Directory::note_chain(ReservationState& state, size_t from) noexcept {
  const size_t before = std::max(from, state.ancestors + state.first_reserved);
  if (state.records.size() == before) {
    return;
  }
  if (from <= state.ancestors) {
    while (state.found < before && records_[state.records[state.found]].is_reused) {
      ++state.found;
    }
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
  const uint8_t kind = chain_kind_of(records_[state.records.back()].turn, state.found);
  for (size_t index = from <= state.ancestors ? 0 : from; index < state.records.size(); ++index) {
    records_[state.records[index]].chain_kind = kind;
  }
}

Hold Directory::make_hold(std::vector<RecordId> records) {
  add_holds(records);
  return holds_.open_hold(std::move(records));
}

// A reader's hold ends: as one use of a chain; of chunks without a parent as one of each, the first of them first, for who goes on needs
// the last ones longest.
void Directory::end_reading(std::span<const RecordId> records, uint64_t now_ns) noexcept {
  if (records_.is_chain(records)) {
    end_holds(records, now_ns);
    return;
  }
  for (const RecordId& id : records) {
    note_use({&id, 1}, now_ns);
  }
  unhold_all(last_first(records), now_ns);
}

void Directory::end_holds(std::span<const RecordId> records, uint64_t now_ns) noexcept {
  note_use(records, now_ns);
  unhold_all(records, now_ns);
}

// A request has used these, and goes.
void Directory::note_use(std::span<const RecordId> records, uint64_t now_ns) noexcept {
  latest_ns_ = std::max(latest_ns_, now_ns);
  if (copies_ != nullptr) {
    copies_->use_copies(records, latest_ns_);
  }
  policy_->note_uses(records_, records, latest_ns_);
}

// From the leaf to the root: invariant 3. A chunk that others still hold counts as used now as well, so that its last release
// puts it behind the children that become idle here.
void Directory::unhold_all(std::span<const RecordId> chain, uint64_t now_ns) noexcept {
  size_t end = chain.size();  // of those that nobody holds any more, and that do not stand in queues yet
  const auto rest = [&](size_t first) {
    const auto ended = chain.subspan(first, end - first);
    holds_.count_unheld(ended.size());
    count_held(ended, uint64_t{0} - 1);
    make_idle(ended, now_ns);
  };
  for (size_t index = chain.size(); index-- > 0;) {
    const RecordId id = chain[index];
    ChunkRecord& record = records_[id];
    if (record.state == ChunkState::READY && holds_.unhold_last(record)) {
      standings_.set_written(record, false);
      continue;
    }
    rest(index + 1);
    end = index;
    give_up_landing(id);
    standings_.set_written(record, false);
    if (!holds_.unhold(id)) {
      // Its last hold may end without a use; then this use counts, as it does for what follows the chunk.
      record.last_access_ns = std::max({record.last_access_ns, latest_ns_, now_ns});
    } else {
      KVPOOL_CHECK(record.state == ChunkState::ZOMBIE);
      let_zombie_go(id);
    }
  }
  rest(0);
}

// A chunk and what precedes it, root first: the nearest `limit` of these.
void Directory::append_chain(RecordId leaf, size_t limit, std::vector<RecordId>& records) const {
  const auto first = static_cast<std::ptrdiff_t>(records.size());
  for (RecordId id = leaf; id.valid() && limit > 0; id = records_[id].parent, --limit) {
    records.push_back(id);
  }
  std::reverse(records.begin() + first, records.end());
}

Hold Directory::acquire(NamespaceId owner, const uint8_t* keys, size_t n, uint64_t now_ns,
                        const std::optional<ChunkKey>& parent) {
  std::vector<RecordId> records;
  const auto above = find_above(parent);
  if (!above || find_prefix(owner, *above, keys, n, records) == 0) {
    return {};
  }
  ChunkRecord& first = records_[records.front()];
  first.is_cut = first.is_cut || first.parent.valid();
  note_reuse(records, above->valid() ? records_[*above].depth + 1 : 0, now_ns);
  return make_hold(std::move(records));
}

size_t Directory::extend(HoldId hold, const uint8_t* keys, size_t n, uint64_t now_ns) {
  HoldTable::Records* const found = holds_.find_hold(hold);
  if (found == nullptr || shares_.is_charged(hold)) {
    return 0;
  }
  std::vector<RecordId>& held = *found;
  std::vector<RecordId> more;
  if (find_prefix(records_[held.back()].owner, held.back(), keys, n, more) > 0) {
    note_reuse(more, held.size(), now_ns);
    add_holds(more);
    held.insert(held.end(), more.begin(), more.end());
  }
  return more.size();
}

bool Directory::shorten(HoldId hold, size_t chunks, uint64_t now_ns) {
  HoldTable::Records* const found = holds_.find_hold(hold);
  if (found == nullptr || shares_.is_charged(hold) || chunks == 0) {
    return false;
  }
  std::vector<RecordId>& held = *found;
  if (chunks < held.size()) {
    const auto cut = held.begin() + static_cast<std::ptrdiff_t>(chunks);
    const std::vector<RecordId> rest(cut, held.end());
    held.erase(cut, held.end());
    end_holds(rest, now_ns);
  }
  return true;
}

// All chunks of a run, the root first; none where one is not here, or the chain has another length.
std::vector<RecordId> Directory::whole_run(const HitRun& run) const {
  std::vector<RecordId> records;
  const auto is_here = [&](RecordId id) { return id.valid() && records_[id].owner == run.owner && records_[id].has_bytes(); };
  if (run.is_chain) {
    RecordId id = find_record(ChunkKey::from_bytes(run.keys.data() + run.keys.size() - KEY_BYTES));
    if (is_here(id) && records_[id].depth + 1 == run.chunks) {
      records.resize(run.chunks);  // as many as its depth says: from the last one to the root
      for (size_t index = run.chunks; index-- > 0; id = records_[id].parent) {
        KVPOOL_DCHECK(id.valid());
        records[index] = id;
      }
    }
    return records;
  }
  find_records(run.keys.data(), run.chunks, records, [](const TableEntry&) { return true; });
  const auto is_alone_here = [&](RecordId id) { return is_here(id) && !records_[id].parent.valid(); };
  if (records.size() < run.chunks || !std::all_of(records.begin(), records.end(), is_alone_here)) {
    return {};
  }
  return records;
}

std::vector<Hold> Directory::hold_hit(std::span<const HitRun> runs, HolderId holder, uint64_t now_ns) {
  std::vector<std::vector<RecordId>> found;
  found.reserve(runs.size());
  for (const HitRun& run : runs) {
    found.push_back(whole_run(run));
    if (found.back().empty()) {
      return {};
    }
  }
  if (!shares_.may_hold(holder, found)) {
    return {};  // before any use is noted: who gets a part of it uses that
  }
  std::vector<Hold> holds;
  std::vector<HoldId> ids;
  for (size_t index = 0; index < runs.size(); ++index) {
    if (runs[index].is_chain) {
      note_reuse(found[index], 0, now_ns);
      add_holds(found[index]);
    } else {
      note_reuse(found[index], std::nullopt, now_ns);
      add_holds(last_first(found[index]));
    }
    holds.push_back(holds_.open_hold(std::move(found[index])));
    ids.push_back(holds.back().id);
  }
  if (holder.valid()) {
    static_cast<void>(shares_.charge(ids, holder));
  }
  return holds;
}

// The records of those of these keys that are here, each without a parent, with its index; what is named twice counts where it is named
// first. `is_elsewhere`: whether another tier has a key, or one is being written here once more.
std::vector<std::pair<RecordId, uint32_t>> Directory::find_alone(NamespaceId owner, std::span<const uint8_t> keys, bool& is_elsewhere) const {
  const size_t n = keys.size() / KEY_BYTES;
  const auto key_at = [keys](size_t index) { return ChunkKey::from_bytes(keys.data() + index * KEY_BYTES); };
  std::array<uint64_t, PREFETCH_AHEAD> homes{};  // by index modulo their number
  for (size_t index = 0; index < std::min(n, PREFETCH_AHEAD); ++index) {
    homes[index] = table_.prefetch(key_at(index));
  }
  std::vector<std::pair<RecordId, uint32_t>> found;
  found.reserve(n);
  for (size_t index = 0; index < n; ++index) {
    const uint64_t home = homes[index % PREFETCH_AHEAD];
    if (index + PREFETCH_AHEAD < n) {
      homes[index % PREFETCH_AHEAD] = table_.prefetch(key_at(index + PREFETCH_AHEAD));
    }
    const auto entry = table_.find_from(home, key_at(index));
    if (!entry || entry->tiers == 0) {
      continue;
    }
    if (!entry->record.valid()) {
      is_elsewhere = true;
      continue;
    }
    records_.prefetch(entry->record);
    found.emplace_back(entry->record, static_cast<uint32_t>(index));
  }
  std::erase_if(found, [&](const auto& one) {
    const ChunkRecord& record = records_[one.first];
    is_elsewhere = is_elsewhere || !record.has_bytes();
    return !record.has_bytes() || record.owner != owner || record.parent.valid();
  });
  std::vector<RecordId> seen;
  seen.reserve(found.size());
  std::transform(found.begin(), found.end(), std::back_inserter(seen), [](const auto& one) { return one.first; });
  const auto is_before = [](RecordId one, RecordId other) { return one.value() < other.value(); };
  std::sort(seen.begin(), seen.end(), is_before);
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
    std::vector<bool> is_taken(seen.size());
    std::erase_if(found, [&](const auto& one) {
      const auto at = static_cast<size_t>(std::lower_bound(seen.begin(), seen.end(), one.first, is_before) - seen.begin());
      const bool was_taken = is_taken[at];
      is_taken[at] = true;
      return was_taken;
    });
  }
  return found;
}

std::optional<HeldSet> Directory::hold_set(NamespaceId owner, std::span<const uint8_t> keys, HolderId holder, bool is_last_newest,
                                           uint64_t now_ns) {
  bool is_elsewhere = false;
  auto found = find_alone(owner, keys, is_elsewhere);
  if (is_elsewhere) {
    return std::nullopt;
  }
  if (!is_last_newest) {
    std::reverse(found.begin(), found.end());
  }
  HeldSet held;
  if (found.empty()) {
    return held;
  }
  std::vector<HoldTable::Records> records(1);
  for (const auto& [id, place] : found) {
    records.front().push_back(id);
    held.places.push_back(place);
  }
  if (!shares_.may_hold(holder, records)) {
    return std::nullopt;
  }
  held.hold = hold_alone(std::move(records.front()), holder, now_ns);
  return held;
}

// A hold on chunks without a parent, counted for a holder, where one is named.
HoldId Directory::hold_alone(HoldTable::Records records, HolderId holder, uint64_t now_ns) {
  note_reuse(records, std::nullopt, now_ns);
  add_holds(last_first(records));
  const HoldId hold = holds_.open_hold(std::move(records)).id;
  if (holder.valid()) {
    static_cast<void>(shares_.charge({hold}, holder));
  }
  return hold;
}

std::vector<HeldSet> Directory::hold_each(std::span<const SetPart> parts, HolderId holder, uint64_t now_ns) {
  std::vector<std::vector<std::pair<RecordId, uint32_t>>> found;
  std::vector<uint32_t> places;
  bool is_elsewhere = false;
  for (const SetPart& part : parts) {
    KVPOOL_CHECK(part.keys.size() == part.places.size() * KEY_BYTES);
    found.push_back(find_alone(part.owner, part.keys, is_elsewhere));
    for (auto& [id, place] : found.back()) {
      place = part.places[place];
      places.push_back(place);
    }
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  const auto leading = [&](size_t count) {  // the chunks of the first `count` places, of each part that has some
    std::vector<HoldTable::Records> runs;
    for (const auto& of_part : found) {
      HoldTable::Records run;
      for (const auto& [id, place] : of_part) {
        if (count > 0 && place <= places[count - 1]) {
          run.push_back(id);
        }
      }
      if (!run.empty()) {
        runs.push_back(std::move(run));
      }
    }
    return runs;
  };
  const auto may_hold = [&](size_t count) { return count == 0 || !holder.valid() || shares_.may_hold(holder, leading(count)); };
  size_t allowed = places.size();
  if (!may_hold(allowed)) {
    size_t beyond = std::exchange(allowed, 0);
    while (beyond - allowed > 1) {
      const size_t middle = allowed + (beyond - allowed) / 2;
      (may_hold(middle) ? allowed : beyond) = middle;
    }
  }
  std::vector<HeldSet> answer;
  for (auto& of_part : found) {
    HeldSet held;
    HoldTable::Records records;
    for (const auto& [id, place] : of_part) {
      if (allowed > 0 && place <= places[allowed - 1]) {
        records.push_back(id);
        held.places.push_back(place);
      }
    }
    if (!records.empty()) {
      held.hold = hold_alone(std::move(records), holder, now_ns);
    }
    answer.push_back(std::move(held));
  }
  return answer;
}

JoinedSet Directory::join_sets(std::span<const std::vector<HeldSet>> ranks, size_t count, bool is_last_newest, uint64_t now_ns) {
  std::vector<HoldTable::Records> held(ranks.size(), HoldTable::Records(count));  // by place
  std::vector<HolderId> holders(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const HeldSet& part : ranks[rank]) {
      const auto records = holds_.close_hold(part.hold);
      KVPOOL_CHECK(records.has_value() && records->size() == part.places.size());
      holders[rank] = shares_.holder_of(part.hold);
      shares_.end(part.hold, *records);
      for (size_t index = 0; index < records->size(); ++index) {
        KVPOOL_CHECK(part.places[index] < count && !held[rank][part.places[index]].valid());
        held[rank][part.places[index]] = (*records)[index];
      }
    }
  }
  JoinedSet joined;
  for (size_t index = 0; index < count; ++index) {
    const size_t place = is_last_newest ? index : count - 1 - index;
    const auto is_whole = [&](const HoldTable::Records& of_rank) {
      return of_rank[place].valid() && records_[of_rank[place]].state != ChunkState::ZOMBIE;
    };
    if (std::all_of(held.begin(), held.end(), is_whole)) {
      joined.places.push_back(static_cast<uint32_t>(place));
    }
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    HoldTable::Records kept;
    kept.reserve(joined.places.size());
    for (const uint32_t place : joined.places) {
      kept.push_back(std::exchange(held[rank][place], RecordId()));
    }
    std::erase_if(held[rank], [](RecordId id) { return !id.valid(); });
    if (!held[rank].empty()) {
      end_reading(held[rank], now_ns);
    }
    if (!kept.empty()) {
      joined.holds.push_back(holds_.open_hold(std::move(kept)).id);
      if (holders[rank].valid()) {
        static_cast<void>(shares_.charge({joined.holds.back()}, holders[rank]));
      }
    }
  }
  return joined;
}

HoldId Directory::join_holds(const std::vector<HoldId>& holds) {
  const auto is_known = [this](HoldId hold) { return holds_.find_hold(hold) != nullptr; };
  if (holds.empty() || !std::all_of(holds.begin(), holds.end(), is_known)) {
    return 0;
  }
  const HolderId holder = shares_.holder_of(holds.front());
  HoldTable::Records records;
  for (const HoldId hold : holds) {
    const auto of_one = holds_.close_hold(hold);
    shares_.end(hold, *of_one);
    records.insert(records.end(), of_one->begin(), of_one->end());
  }
  const HoldId joined = holds_.open_hold(std::move(records)).id;
  if (holder.valid()) {
    static_cast<void>(shares_.charge({joined}, holder));
  }
  return joined;
}

std::optional<std::vector<HoldId>> Directory::duplicate(const std::vector<HoldId>& holds) {
  const auto is_known = [this](HoldId hold) { return holds_.find_hold(hold) != nullptr; };
  if (!std::all_of(holds.begin(), holds.end(), is_known)) {
    return std::nullopt;
  }
  std::vector<HoldId> made;
  made.reserve(holds.size());
  for (const HoldId hold : holds) {
    made.push_back(make_hold(HoldTable::Records(*holds_.find_hold(hold))).id);
  }
  return made;
}

std::optional<Columns> Directory::columns(const std::vector<HoldId>& holds) const {
  const auto found = holds_.records_of(holds);
  if (!found) {
    return std::nullopt;
  }
  const size_t n = found->size();
  Columns columns{std::vector<uint64_t>(n), std::vector<uint64_t>(n), std::vector<uint8_t>(n),
                  std::vector<uint64_t>(table_.has_words() ? n : 0)};
  locate_records(*found, {columns.offsets.data(), columns.generations.data(), columns.levels.data(),
                          table_.has_words() ? columns.slots.data() : nullptr});
  return columns;
}

void Directory::locate(HoldId hold, ColumnRows rows) const {
  const HoldTable::Records* const held = holds_.find_hold(hold);
  KVPOOL_CHECK(held != nullptr);
  locate_records(*held, rows);
}

void Directory::locate_records(std::span<const RecordId> records, ColumnRows rows) const {
  const auto own_level = static_cast<uint8_t>(tier_);
  const auto copy_level = copies_ == nullptr ? own_level : static_cast<uint8_t>(copies_->copies().tier_);
  uint64_t* const offsets = rows.offsets;
  uint64_t* const generations = rows.generations;
  uint8_t* const levels = rows.levels;
  for (size_t index = 0; index < records.size(); ++index) {
    const ChunkRecord& record = records_[records[index]];
    offsets[index] = record.has_slot() ? record.page.value() * PAGE_BYTES : 0;
    generations[index] = record.generation;
    levels[index] = record.state == ChunkState::READY       ? (record.has_copy ? copy_level : own_level)
                    : record.state == ChunkState::PROMOTING ? uint8_t{record.source}
                                                            : NO_LEVEL;
  }
  if (rows.slots != nullptr) {
    LastRun last;
    for (size_t index = 0; index < records.size(); ++index) {
      rows.slots[index] = table_.slot_of(PageIndex(records_[records[index]].page), last).packed();
    }
  }
}

std::optional<Columns> Directory::copies(const std::vector<HoldId>& holds) const {
  const auto held = holds_.records_of(holds);
  if (!held) {
    return std::nullopt;
  }
  Columns columns{std::vector<uint64_t>(held->size()), std::vector<uint64_t>(held->size()),
                  std::vector<uint8_t>(held->size(), NO_LEVEL), std::vector<uint64_t>(held->size())};
  if (copies_ != nullptr) {
    copies_->locate(*held, columns);
  }
  return columns;
}

bool Directory::release(HoldId hold, uint64_t now_ns) {
  const auto records = holds_.close_hold(hold);
  if (!records) {
    return false;
  }
  shares_.end(hold, *records);
  end_reading(*records, now_ns);
  return true;
}

size_t Directory::release_part(HoldId hold, size_t limit, uint64_t now_ns) {
  HoldTable::Records* const found = holds_.find_hold(hold);
  if (found == nullptr || found->size() <= limit) {
    const size_t chunks = found == nullptr ? 0 : found->size();
    release(hold, now_ns);
    return chunks;
  }
  const auto count = static_cast<std::ptrdiff_t>(limit);
  const bool are_last = records_.is_chain(*found);
  const auto first = are_last ? found->end() - count : found->begin();
  const std::vector<RecordId> ending(first, first + count);
  found->erase(first, first + count);
  shares_.shorten(hold, records_[ending.front()].size_class, limit);
  end_reading(ending, now_ns);
  return limit;
}

// The chunk loses a hold: a chunk under promotion that loses its last one will not land.
void Directory::give_up_landing(RecordId id) noexcept {
  if (records_[id].state == ChunkState::PROMOTING && records_[id].holds == 1) {
    departure_ = Cause::FAILED_LANDING;
    stats_.dropped_chunks += remove_subtree(id);
  }
}

}  // namespace kvpool
