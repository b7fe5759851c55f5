// Pins: chunks whose slots hardware reads, to write them to a lower tier or to compare them with their checksums. See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

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
  count_idle(id);
  standings_.settle_chunk(id);
}

bool Directory::unpin(HoldId pin) {
  const auto records = holds_.close_pin(pin);
  if (!records) {
    return false;
  }
  for (auto id = records->rbegin(); id != records->rend(); ++id) {
    end_pin(*id);
  }
  demotion_.search_anew();
  return true;
}

// Chunks that are to be written to a lower tier, the root first.
Hold Directory::pin_to_save(std::vector<RecordId> chain) {
  for (const RecordId id : chain) {
    add_pin(id);
    standings_.begin_saving(id);
  }
  return chain.empty() ? Hold{} : holds_.open_pin(std::move(chain));
}

Hold Directory::pin_unsaved(uint32_t scan, WriteOrder order) {
  UnsavedChain found = demotion_.next_chain(scan, order, latest_ns_);
  return found.records.empty() ? Hold{0, found.evicted_below} : pin_to_save(std::move(found.records));
}

Hold Directory::pin_unsaved_chain_of(RecordId leaf) {
  uint32_t steps = UINT32_MAX;
  return pin_to_save(demotion_.unsaved_chain(leaf, steps));
}

Hold Directory::pin_unsaved_prefix(NamespaceId owner, const uint8_t* keys, size_t n, const std::optional<ChunkKey>& parent) {
  std::vector<RecordId> records;
  const auto above = find_above(parent);
  return !above || find_prefix(owner, *above, keys, n, records) == 0 ? Hold{} : pin_unsaved_chain_of(records.back());
}

std::optional<size_t> Directory::last_unsaved(HoldId holder, size_t end) const noexcept {
  const HoldTable::Records& held = holds_.chain_of(holder);
  for (size_t index = std::min(end, held.size()); index-- > 0;) {
    const ChunkRecord& record = records_[held[index]];
    if (record.state == ChunkState::READY && standings_.of(record) == Standing::UNSAVED) {
      return index;
    }
    if (record.state == ChunkState::READY && record.parent.valid()) {
      break;  // what precedes it is below where it is
    }
  }
  return std::nullopt;
}

std::vector<HoldId> Directory::unsaved_holders() const {
  std::vector<HoldId> found;
  for (const HoldId holder : holds_.holders()) {
    if (last_unsaved(holder)) {
      found.push_back(holder);
    }
  }
  return found;
}

Hold Directory::pin_unsaved_hold(HoldId holder, size_t position) {
  const HoldTable::Records& held = holds_.chain_of(holder);
  return position < held.size() && records_[held[position]].state == ChunkState::READY ? pin_unsaved_chain_of(held[position]) : Hold{};
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
  return pin_keys(owner, {reinterpret_cast<const uint8_t*>(&key), KEY_BYTES});
}

std::optional<HoldId> Directory::pin_keys(NamespaceId owner, std::span<const uint8_t> keys) {
  HoldTable::Records pinned;
  for (size_t at = 0; at + KEY_BYTES <= keys.size(); at += KEY_BYTES) {
    const RecordId id = find_record(ChunkKey::from_bytes(keys.data() + at));
    if (id.valid() && records_[id].owner == owner && records_[id].state == ChunkState::READY && records_[id].pins < MAX_PINS) {
      add_pin(id);
      pinned.push_back(id);
    }
  }
  return pinned.empty() ? std::nullopt : std::optional(holds_.open_pin(std::move(pinned)).id);
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
