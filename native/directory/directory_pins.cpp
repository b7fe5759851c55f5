// Pins: chunks whose slots hardware reads, to write them to a lower tier or to compare them with their checksums. See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// Entries looked at from each end of a list for the position of a chunk that leaves another one: a guess that bounds the control
// thread's time at a few microseconds.
constexpr uint32_t SETTLE_STEPS = 256;
// Chunks that one search for chunks to write may look at on the way from leaves to roots.
constexpr uint32_t CHAIN_STEPS = 1U << 15;
constexpr uint32_t LOOKS_PER_CHANGE = 8;
// Chunks that one search may find evicted from the lower tier with their ancestors: each goes to another list.
constexpr uint32_t EVICTED_AT_ONCE = 64;

// Whether an ancestor of a chunk was evicted from the lower tier since its last use. The chunk can be written only with it.
bool follows_evicted(const ChunkRecords& records, RecordId id, uint32_t& steps) noexcept {
  for (RecordId above = records[id].parent; above.valid() && steps > 0; above = records[above].parent, --steps) {
    if (records[above].is_below || records[above].was_below) {
      return !records[above].is_below;
    }
  }
  return false;
}

}  // namespace

Standing Directory::standing_of(const ChunkRecord& record) const noexcept {
  const bool has_place_below = lower_bits_ != 0 && arena_.size_class(record.size_class).has_place_below;
  if (!has_place_below || record.is_below || record.was_below) {
    return Standing::SAVED;
  }
  return record.pins > 0 ? Standing::BEING_SAVED : Standing::UNSAVED;
}

// Moves an idle chunk that has got or lost a copy in a lower tier to the list where it belongs now, by its last use. One with
// a pin moves when the pin ends.
void Directory::settle(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (is_listed(record) && !record.is_aside && record.pins == 0 && record.standing != standing_of(record)) {
    queues_.remove(id);
    stand_by_access(id, SETTLE_STEPS, false);
  }
}

// Puts a chunk that is in no list into the one where it belongs, by its last use.
void Directory::stand_by_access(RecordId id, uint32_t steps, bool or_oldest) noexcept {
  records_[id].standing = standing_of(records_[id]);
  queues_.add_by_access(id, steps, or_oldest);
}

uint64_t Directory::unsaved_bytes() const noexcept {
  uint64_t bytes = stats_.used_bytes - written_bytes_;
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    const ClassId size_class(index);
    const SizeClass& geometry = arena_.size_class(size_class);
    const uint64_t chunks =
        geometry.has_place_below ? queues_.count(size_class, Standing::BEING_SAVED) : arena_.used_slots(size_class);
    bytes -= chunks * geometry.chunk_bytes;
  }
  return bytes;
}

// Notes whether a chunk has been written to a lower tier since its last use.
void Directory::set_written(ChunkRecord& record, bool is_written) noexcept {
  if (record.was_below != is_written) {
    record.was_below = is_written;
    written_bytes_ += is_written ? chunk_bytes(record) : uint64_t{0} - chunk_bytes(record);
  }
}

void Directory::add_pin(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.state == ChunkState::READY);
  if (holds_.pin(id) && record.holds == 0) {
    arena_.set_busy(record.page);
    stats_.idle_bytes -= chunk_bytes(record);
    stats_.pinned_bytes += chunk_bytes(record);
    ++stats_.pinned;
  }
}

// The same for a chunk that is to be written to a lower tier: it moves to the list of those, so that others are found first.
void Directory::add_pin_to_save(RecordId id) noexcept {
  add_pin(id);
  ChunkRecord& record = records_[id];
  if (is_listed(record) && !record.is_aside && record.standing == Standing::UNSAVED) {
    queues_.remove(id);
    record.standing = Standing::BEING_SAVED;
    queues_.add(id);
  }
}

void Directory::end_pin(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (!holds_.unpin(id)) {
    return;
  }
  if (record.holds > 0) {
    if (record.state == ChunkState::ZOMBIE) {
      vacate(id);
    }
    return;
  }
  --stats_.pinned;
  stats_.pinned_bytes -= chunk_bytes(record);
  shares_.protect(record.size_class);
  if (record.state == ChunkState::ZOMBIE) {
    --stats_.zombies;
    --namespaces_[record.owner.value()].zombies;
    free_slot(id);
    return;
  }
  count_idle(record);
  settle(id);
}

bool Directory::unpin(HoldId pin) {
  const auto records = holds_.close_pin(pin);
  if (!records) {
    return false;
  }
  for (auto id = records->rbegin(); id != records->rend(); ++id) {
    end_pin(*id);
  }
  empty_search_.was_empty = false;
  return true;
}

// A chunk and those before it that every lower tier lacks, root first. None where one of them is read for a copy already: what
// follows it comes when that has ended. Looks at no more than `steps` chunks, and takes them off.
Hold Directory::pin_unsaved_chain_of(RecordId leaf, uint32_t& steps) {
  std::vector<RecordId> chain;
  for (RecordId id = leaf; id.valid() && !records_[id].is_below; id = records_[id].parent) {
    if (records_[id].state != ChunkState::READY || records_[id].pins > 0 || steps == 0) {
      return {};
    }
    --steps;
    chain.push_back(id);
  }
  if (chain.empty()) {
    return {};
  }
  std::reverse(chain.begin(), chain.end());
  for (const RecordId id : chain) {
    add_pin_to_save(id);
  }
  return holds_.open_pin(std::move(chain));
}

// The last chunk that follows this one and was used with it or later: by last use a chain's root comes first.
RecordId Directory::newest_of_chain(RecordId id, uint32_t& steps) const noexcept {
  while (steps > 0) {
    const RecordId child = records_[id].first_child;
    if (!child.valid() || !is_listed(records_[child]) || !wants_place_below(records_[child]) ||
        records_[child].last_access_ns < records_[id].last_access_ns) {
      return id;
    }
    id = child;
    --steps;
  }
  return id;
}

// A caller that asks once for each new chunk must not look at the same unsuitable chunks each time. So a search that finds none is not
// repeated before an eighth as many chunks as it looked at have come or gone, or something else has changed its outcome. What follows
// a chunk that was evicted from the lower tier counts as evicted with it: otherwise two chains longer than that tier are written in
// turns without end.
Hold Directory::pin_unsaved(uint32_t scan, WriteOrder order) {
  if (empty_search_.was_empty && empty_search_.order == order && queues_.unsaved_changes() < empty_search_.changes_until) {
    return {};
  }
  unsaved_order_.start(latest_ns_, order);
  uint32_t steps = CHAIN_STEPS;
  uint32_t steps_above = CHAIN_STEPS;
  uint32_t looks = 0;
  uint32_t evicted_below = 0;
  for (RecordId id; looks < scan && evicted_below < EVICTED_AT_ONCE && (id = unsaved_order_.next()).valid(); ++looks) {
    if (wants_place_below(records_[id]) && follows_evicted(records_, id, steps_above)) {
      set_written(records_[id], true);
      settle(id);
      ++evicted_below;
    } else if (wants_place_below(records_[id])) {
      const Hold pin = pin_unsaved_chain_of(order == WriteOrder::COLDEST ? id : newest_of_chain(id, steps), steps);
      if (pin.id != 0) {
        return pin;
      }
    }
  }
  empty_search_ = {evicted_below == 0, order, queues_.unsaved_changes() + looks / LOOKS_PER_CHANGE};
  return {0, evicted_below};
}

Hold Directory::pin_unsaved_prefix(NamespaceId owner, const uint8_t* keys, size_t n, const std::optional<ChunkKey>& parent) {
  std::vector<RecordId> records;
  uint32_t steps = UINT32_MAX;
  const auto above = find_above(parent);
  return !above || find_prefix(owner, *above, keys, n, records) == 0 ? Hold{} : pin_unsaved_chain_of(records.back(), steps);
}

Hold Directory::pin_unsaved_hold(HoldId hold) {
  const HoldTable::Records* held = holds_.find_hold(hold);
  uint32_t steps = UINT32_MAX;
  return held == nullptr || held->empty() ? Hold{} : pin_unsaved_chain_of(held->back(), steps);
}

std::optional<HoldId> Directory::pin_chunk(HoldId hold, size_t position) {
  const auto id = holds_.record_of(hold, position);
  if (!id || records_[*id].state != ChunkState::READY || records_[*id].pins == MAX_PINS) {
    return std::nullopt;
  }
  add_pin(*id);
  return holds_.open_pin({*id}).id;
}

std::optional<HoldId> Directory::pin_key(NamespaceId owner, const ChunkKey& key) {
  const RecordId id = find_record(key);
  if (!id.valid() || records_[id].owner != owner || records_[id].state != ChunkState::READY || records_[id].pins == MAX_PINS) {
    return std::nullopt;
  }
  add_pin(id);
  return holds_.open_pin({id}).id;
}

RecordPage Directory::records(uint32_t cursor, uint32_t limit, uint32_t end) {
  RecordPage page;
  uint32_t index = cursor;
  const uint32_t stop = std::min(end, records_.end());
  for (; index < stop && page.records.size() < limit; ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (record.state == ChunkState::READY && record.pins < MAX_PINS) {
      page.records.push_back(RecordId(index));
      add_pin(RecordId(index));
    }
  }
  page.next = index < stop ? index : 0;
  if (!page.records.empty()) {
    page.pin = holds_.open_pin(page.records).id;
  }
  return page;
}

}  // namespace kvpool
