#include "holds/hold_table.h"

#include <algorithm>
#include <iterator>

namespace kvpool {

Hold HoldTable::open_hold(Records records) {
  KVPOOL_CHECK(!records.empty());
  const size_t chunks = records.size();
  holds_.emplace(++last_id_, std::move(records));
  return {last_id_, chunks};
}

Hold HoldTable::open_pin(Records records) {
  KVPOOL_CHECK(!records.empty());
  const size_t chunks = records.size();
  pins_.emplace(++last_id_, std::move(records));
  return {last_id_, chunks};
}

std::pair<HoldId, const ReservationState&> HoldTable::open_reservation(ReservationState state) {
  KVPOOL_CHECK(!state.records.empty());
  const auto opened = reservations_.emplace(++last_id_, std::move(state));
  return {last_id_, opened.first->second};
}

std::optional<HoldTable::Records> HoldTable::take(std::unordered_map<HoldId, Records>& table, HoldId id) {
  const auto found = table.find(id);
  if (found == table.end()) {
    return std::nullopt;
  }
  std::optional<Records> records(std::move(found->second));
  table.erase(found);
  return records;
}

const HoldTable::Records* HoldTable::find_readable(HoldId id) const noexcept {
  const Records* const held = find(holds_, id);
  return held != nullptr ? held : find(pins_, id);
}

std::optional<HoldTable::Records> HoldTable::records_of(const std::vector<HoldId>& holds) const {
  Records records;
  records.reserve(holds.size());
  for (const HoldId hold : holds) {
    const Records* const held = find_readable(hold);
    if (held == nullptr) {
      return std::nullopt;
    }
    records.insert(records.end(), held->begin(), held->end());
  }
  return records;
}

std::vector<HoldId> HoldTable::holders() const {
  std::vector<HoldId> ids;
  ids.reserve(holds_.size() + reservations_.size());
  for (const auto& [id, records] : holds_) {
    ids.push_back(id);
  }
  for (const auto& [id, state] : reservations_) {
    ids.push_back(id);
  }
  return ids;
}

const HoldTable::Records& HoldTable::chain_of(HoldId id) const noexcept {
  static const Records NONE;
  if (const Records* const held = find(holds_, id)) {
    return *held;
  }
  const ReservationState* const made = find(reservations_, id);
  return made != nullptr && !made->expired ? made->records : NONE;
}

std::optional<RecordId> HoldTable::record_of(HoldId id, size_t position) const noexcept {
  const Records* const held = find_readable(id);
  return held == nullptr || position >= held->size() ? std::nullopt : std::optional((*held)[position]);
}

std::optional<ChunkKey> HoldTable::key_of(HoldId id, size_t position) const noexcept {
  const auto record = record_of(id, position);
  return record ? std::optional(records_[*record].key) : std::nullopt;
}

std::optional<ChunkKey> HoldTable::parent_key_of(HoldId id) const noexcept {
  const auto first = record_of(id, 0);
  const RecordId parent = first ? records_[*first].parent : RecordId();
  return parent.valid() ? std::optional(records_[parent].key) : std::nullopt;
}

std::vector<ChunkKey> HoldTable::keys_of(const std::vector<HoldId>& holds) const {
  std::vector<ChunkKey> keys;
  keys.reserve(holds.size());
  for (const HoldId hold : holds) {
    if (const Records* const held = find_readable(hold)) {
      std::transform(held->begin(), held->end(), std::back_inserter(keys), [this](RecordId id) { return records_[id].key; });
    }
  }
  return keys;
}

std::vector<size_t> HoldTable::count_whole(const std::vector<HoldId>& holds) const {
  const auto is_whole = [this](RecordId id) { return records_[id].state != ChunkState::ZOMBIE; };
  std::vector<size_t> counts;
  counts.reserve(holds.size());
  for (const HoldId hold : holds) {
    const Records* const held = find(holds_, hold);
    if (held == nullptr) {
      counts.push_back(0);
      continue;
    }
    const auto end = records_.is_chain(*held) ? std::partition_point(held->begin(), held->end(), is_whole) : std::find_if_not(held->begin(), held->end(), is_whole);
    counts.push_back(static_cast<size_t>(end - held->begin()));
  }
  return counts;
}

std::vector<ChunkKey> HoldTable::sampled_keys(const std::vector<HoldId>& holds, size_t& chunks) const {
  std::vector<ChunkKey> keys;
  chunks = 0;
  for (const HoldId hold : holds) {
    const Records* const held = find(holds_, hold);
    for (size_t index = 0; held != nullptr && index < held->size(); ++index, ++chunks) {
      const ChunkRecord& record = records_[(*held)[index]];
      if (record.is_sampled) {
        keys.push_back(record.key);
      }
    }
  }
  return keys;
}

std::optional<uint32_t> HoldTable::extents_of(HoldId reservation) const noexcept {
  const ReservationState* const made = find(reservations_, reservation);
  return made == nullptr ? std::nullopt : std::optional(made->extents);
}

std::vector<std::string> HoldTable::verify() const {
  std::vector<std::string> broken;
  std::vector<uint32_t> holds(records_.end());
  std::vector<uint32_t> begin(records_.end());  // holds that begin there: a writer's may begin behind the root
  std::vector<uint32_t> pins(records_.end());
  const auto count = [&](const Records& records) {
    for (const RecordId id : records) {
      ++holds[id.value()];
    }
    if (!records.empty()) {
      ++begin[records.front().value()];
    }
  };
  for (const auto& [id, records] : holds_) {
    count(records);
  }
  for (const auto& [id, state] : reservations_) {
    count(state.records);
  }
  for (const auto& [id, records] : pins_) {
    for (const RecordId record : records) {
      ++pins[record.value()];
    }
  }
  uint64_t held = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    const std::string name = "chunk record " + std::to_string(index);
    held += record.holds > 0 ? 1U : 0U;
    if (record.parent.valid() && records_[record.parent].holds + begin[index] < record.holds) {
      broken.push_back(name + " is held more often than its parent");
    }
    if (record.pins != pins[index]) {
      broken.push_back(name + " has " + std::to_string(pins[index]) + " pins, counted " + std::to_string(record.pins));
    }
    if (record.holds != holds[index]) {
      broken.push_back(name + " is held " + std::to_string(holds[index]) + " times, counted " + std::to_string(record.holds));
    }
  }
  if (held != held_) {
    broken.push_back("held chunks: " + std::to_string(held) + ", counted " + std::to_string(held_));
  }
  return broken;
}

}  // namespace kvpool
