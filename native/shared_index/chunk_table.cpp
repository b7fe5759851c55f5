// The writer's side of the shared index. See chunk_table.h for the layout and the argument.
#include "shared_index/chunk_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

namespace {

// No slot: a region that is none.
SlotAddress address_of(uint8_t region, uint32_t number) noexcept {
  return number == UINT32_MAX ? SlotAddress() : SlotAddress{region, number};
}

}  // namespace

ChunkTable::ChunkTable(std::shared_ptr<const Mapping> mapping, IndexShape shape, const uint8_t epoch[16],
                       const HashSeed& seed)
    : mapping_(std::move(mapping)),
      shape_(std::move(shape)),
      seed_(seed),
      header_(reinterpret_cast<IndexHeader*>(mapping_->data())),
      slots_(reinterpret_cast<TableSlot*>(mapping_->data() + PAGE_BYTES)) {
  KVPOOL_CHECK(shape_.valid());
  KVPOOL_CHECK(mapping_->is_writable());
  const IndexLayout layout = shape_.layout();
  KVPOOL_CHECK(mapping_->size() >= layout.total_bytes);
  KVPOOL_CHECK(header_->version == 0);
  std::memcpy(header_->magic, INDEX_MAGIC, sizeof(INDEX_MAGIC));
  header_->version = INDEX_VERSION;
  header_->regions = static_cast<uint32_t>(layout.regions.size());
  header_->slots = shape_.slots;
  header_->further_offset = layout.further_offset;
  std::memcpy(header_->epoch, epoch, sizeof(header_->epoch));
  header_->seed = seed_;
  std::copy(layout.regions.begin(), layout.regions.end(), header_->region);
  for (const RegionHeader& region : layout.regions) {
    regions_.push_back(words_of(*mapping_, region));
  }
  if (layout.further_offset != 0) {
    further_ = reinterpret_cast<FurtherSlot*>(mapping_->data() + layout.further_offset);
  }
}

ChunkTable::Probe ChunkTable::probe(uint64_t home, const ChunkKey& key) const noexcept {
  uint64_t position = home;
  for (uint64_t step = 0; step < MAX_PROBE && step < shape_.slots; ++step, position = behind(position)) {
    if (slots_[position].generation == 0) {
      return {position, false};
    }
    if (slots_[position].key == key) {
      last_position_ = position;
      return {position, true};
    }
  }
  return {};
}

std::optional<uint64_t> ChunkTable::free_position(const ChunkKey& key) const noexcept {
  uint64_t position = home(key);
  for (uint64_t step = 0; step < MAX_PROBE && step < shape_.slots; ++step, position = behind(position)) {
    if (slots_[position].generation == 0) {
      return position;
    }
  }
  return std::nullopt;
}

std::vector<ChunkKey> ChunkTable::keys_in_reach(const ChunkKey& key) const {
  std::vector<ChunkKey> keys;
  uint64_t position = home(key);
  for (uint64_t step = 0; step < MAX_PROBE && step < shape_.slots; ++step, position = behind(position)) {
    if (slots_[position].generation != 0) {
      keys.push_back(slots_[position].key);
    }
  }
  return keys;
}

std::optional<uint64_t> ChunkTable::probe_length(const ChunkKey& key) const noexcept {
  const auto position = position_of(key);
  return position ? std::optional(distance(home(key), *position) + 1) : std::nullopt;
}

bool ChunkTable::bequeath(const ChunkKey& from, const ChunkKey& to) noexcept {
  const auto position = position_of(from);
  KVPOOL_CHECK(position.has_value());
  if (distance(home(to), *position) >= MAX_PROBE) {
    return false;
  }
  bequest_ = {from, to};
  return true;
}

std::optional<TableEntry> ChunkTable::entry_at(std::optional<uint64_t> position) const noexcept {
  if (!position) {
    return std::nullopt;
  }
  const TableSlot& slot = slots_[*position];
  return TableEntry{RecordId(slot.record), slot.generation, address_of(slot.region, slot.number), slot.tiers};
}

std::optional<TableEntry> ChunkTable::find(const ChunkKey& key) const noexcept { return entry_at(position_of(key)); }

std::optional<TableEntry> ChunkTable::find_from(uint64_t home, const ChunkKey& key) const noexcept {
  return entry_at(position_from(home, key));
}

TableLook ChunkTable::look_from(uint64_t home, const ChunkKey& key) const noexcept {
  const Probe found = probe(home, key);
  return {found.is_found ? entry_at(found.position) : std::nullopt, found.position.has_value()};
}

uint64_t ChunkTable::prefetch(const ChunkKey& key) const noexcept {
  const uint64_t position = home(key);
  __builtin_prefetch(&slots_[position]);
  return position;
}

bool ChunkTable::has_room(const ChunkKey& key) const noexcept {
  return count_ < shape_.max_entries() && free_position(key).has_value();
}

bool ChunkTable::insert(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept {
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(!slot.valid() || is_slot_of(slot, shape_.regions.front().tier));
  KVPOOL_DCHECK(!position_of(key));
  const auto position = count_ < shape_.max_entries() ? free_position(key) : std::nullopt;
  if (position) {
    fill_slot(*position, key, record, generation, slot);
  }
  return position.has_value();
}

std::optional<uint8_t> ChunkTable::enter(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept {
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(!slot.valid() || is_slot_of(slot, shape_.regions.front().tier));
  const Probe found = probe(home(key), key);
  if (found.is_found) {
    move_entry(*found.position, record, generation, slot);
    return slots_[*found.position].tiers;
  }
  if (!found.position || count_ >= shape_.max_entries()) {
    return std::nullopt;
  }
  fill_slot(*found.position, key, record, generation, slot);
  return uint8_t{0};
}

// REQUIRES: the slot is free, and the key's place.
void ChunkTable::fill_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept {
  write_slot(position, key, record, generation, slot);
  last_position_ = position;
  store_relaxed(header_->count, ++count_);
}

void ChunkTable::write_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation,
                            SlotAddress slot) noexcept {
  TableSlot& entry = slots_[position];
  const uint32_t seq = entry.seq;
  store_relaxed(entry.seq, seq + 1);
  store_release(entry.record, record.value());
  store_release(entry.generation, generation);
  for (size_t word = 0; word < 4; ++word) {
    store_release(entry.key.words[word], key.words[word]);
  }
  store_release(entry.number, slot.number);
  store_release(entry.region, static_cast<uint8_t>(slot.region));
  store_release(entry.tiers, uint8_t{0});
  store_further(position, {});
  store_release(entry.seq, seq + 2);
}

// REQUIRES: the entry's `seq` is odd.
void ChunkTable::store_further(uint64_t position, const FurtherSlot& further) noexcept {
  for (size_t level = 0; further_ != nullptr && level < TIER_LEVELS; ++level) {
    StoredResidency& stored = further_[position].of_level[level];
    store_release(stored.generation, further.of_level[level].generation);
    store_release(stored.number, further.of_level[level].number);
    store_release(stored.region, further.of_level[level].region);
  }
}

void ChunkTable::move(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(!slot.valid() || is_slot_of(slot, shape_.regions.front().tier));
  move_entry(*position, record, generation, slot);
}

void ChunkTable::move_entry(uint64_t position, RecordId record, uint64_t generation, SlotAddress slot) noexcept {
  TableSlot& entry = slots_[position];
  const uint32_t seq = entry.seq;
  store_relaxed(entry.seq, seq + 1);
  store_release(entry.record, record.value());
  store_release(entry.generation, generation);
  store_release(entry.number, slot.number);
  store_release(entry.region, static_cast<uint8_t>(slot.region));
  store_release(entry.seq, seq + 2);
}

void ChunkTable::set_residency(const ChunkKey& key, Tier tier, Residency residency) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  KVPOOL_CHECK(further_ != nullptr);
  KVPOOL_CHECK(tier != shape_.regions.front().tier);
  KVPOOL_CHECK(residency.generation == 0 || is_slot_of(residency.slot, tier));
  TableSlot& entry = slots_[*position];
  StoredResidency& stored = further_[*position].of_level[static_cast<size_t>(tier)];
  const uint32_t seq = entry.seq;
  store_relaxed(entry.seq, seq + 1);
  store_release(stored.generation, residency.generation);
  store_release(stored.number, residency.slot.number);
  store_release(stored.region, static_cast<uint8_t>(residency.slot.region));
  store_release(entry.seq, seq + 2);
}

std::optional<Residency> ChunkTable::residency(const ChunkKey& key, Tier tier) const noexcept {
  const auto position = position_of(key);
  if (!position) {
    return std::nullopt;
  }
  if (tier == shape_.regions.front().tier) {
    const TableSlot& entry = slots_[*position];
    const SlotAddress slot = address_of(entry.region, entry.number);
    return slot.valid() ? std::optional(Residency{entry.generation, slot}) : std::nullopt;
  }
  if (further_ == nullptr) {
    return std::nullopt;
  }
  const StoredResidency& stored = further_[*position].of_level[static_cast<size_t>(tier)];
  return stored.generation == 0 ? std::nullopt : std::optional(Residency{stored.generation, {stored.region, stored.number}});
}

void ChunkTable::set_tiers(const ChunkKey& key, uint8_t tiers) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  store_release(slots_[*position].tiers, tiers);
}

void ChunkTable::add_tiers(const ChunkKey& key, uint8_t tiers) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  store_release(slots_[*position].tiers, static_cast<uint8_t>(slots_[*position].tiers | tiers));
}

void ChunkTable::erase(const ChunkKey& key) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  if (bequest_ && bequest_->from == key) {
    write_slot(*position, bequest_->to, RecordId(), 1, SlotAddress());
    bequest_.reset();
    return;
  }
  uint64_t hole = *position;
  // No entry stands MAX_PROBE or more behind its home, so none from there on can move to the hole: keys are the clients'
  // choice, and a run of occupied slots can be as long as the table allows.
  for (uint64_t next = behind(hole); slots_[next].generation != 0 && distance(hole, next) < MAX_PROBE; next = behind(next)) {
    // The entry may move back to the hole unless that is before its home, in probe order.
    if (distance(home(slots_[next].key), next) >= distance(hole, next)) {
      copy_slot(hole, next);
      store_release(header_->moves, header_->moves + 1);
      hole = next;
    }
  }
  clear_slot(hole);
  store_relaxed(header_->count, --count_);
}

void ChunkTable::copy_slot(uint64_t target, uint64_t source) noexcept {
  TableSlot& to = slots_[target];
  const TableSlot& from = slots_[source];
  const uint32_t seq = to.seq;
  store_relaxed(to.seq, seq + 1);
  store_release(to.record, from.record);
  store_release(to.generation, from.generation);
  for (size_t word = 0; word < 4; ++word) {
    store_release(to.key.words[word], from.key.words[word]);
  }
  store_release(to.number, from.number);
  store_release(to.region, from.region);
  store_release(to.tiers, from.tiers);
  if (further_ != nullptr) {
    store_further(target, further_[source]);
  }
  store_release(to.seq, seq + 2);
}

void ChunkTable::clear_slot(uint64_t position) noexcept {
  TableSlot& slot = slots_[position];
  const uint32_t seq = slot.seq;
  store_relaxed(slot.seq, seq + 1);
  store_release(slot.tiers, uint8_t{0});
  store_release(slot.generation, uint64_t{0});
  store_release(slot.seq, seq + 2);
}

// Entries lie anywhere in the table; words lie close together where there are as many slots.
std::vector<WrittenSoon> ChunkTable::pages_for(uint64_t count) const {
  std::vector<WrittenSoon> pages;
  const RegionHeader& region = header_->region[DRAM_REGION];
  if (count > region.slots / 2) {
    pages.push_back({mapping_.get(), {region.words_offset, region.words_offset + region.slots * sizeof(SlotWords)}});
  }
  if (count > shape_.table_end() / PAGE_BYTES) {
    pages.push_back({mapping_.get(), {0, shape_.table_end()}});
  }
  return pages;
}

template <typename Visit>
void ChunkTable::visit_touched(Visit visit) const {
  const uint64_t table_end = shape_.table_end();
  for (Stretch pages = mapping_->next_pages(PAGE_BYTES); pages.begin < std::min(pages.end, table_end);
       pages = mapping_->next_pages(pages.end)) {
    const uint64_t end = (std::min(pages.end, table_end) - PAGE_BYTES) / sizeof(TableSlot);
    for (uint64_t position = (pages.begin - PAGE_BYTES) / sizeof(TableSlot); position < end; ++position) {
      visit(position);
    }
  }
}

uint64_t ChunkTable::count_placeless() const noexcept {
  uint64_t count = 0;
  visit_touched([&](uint64_t position) {
    count += slots_[position].generation != 0 && slots_[position].number == UINT32_MAX ? 1U : 0U;
  });
  return count;
}

uint64_t ChunkTable::count_in(uint8_t tiers) const noexcept {
  uint64_t count = 0;
  visit_touched([&](uint64_t position) {
    count += slots_[position].generation != 0 && (slots_[position].tiers & tiers) != 0 ? 1U : 0U;
  });
  return count;
}

std::vector<std::string> ChunkTable::verify() const {
  std::vector<std::string> broken;
  uint64_t entries = 0;
  visit_touched([&](uint64_t position) {
    entries += slots_[position].generation != 0 ? 1U : 0U;
    verify_slot(position, broken);
  });
  if (entries != count_ || header_->count != count_) {
    broken.push_back("table counts " + std::to_string(count_) + " entries and holds " + std::to_string(entries));
  }
  if (count_ > shape_.max_entries()) {
    broken.push_back("table is fuller than it may be");
  }
  if (bequest_) {
    broken.push_back("a table slot is bequeathed by a key that was not erased");
  }
  return broken;
}

uint64_t ChunkTable::verify_part(uint64_t position, uint32_t limit, std::vector<std::string>& broken,
                                 const std::function<bool(const ChunkKey&, RecordId)>& is_right) const {
  const uint64_t table_end = shape_.table_end();
  const Stretch pages = mapping_->next_pages(PAGE_BYTES + position * sizeof(TableSlot));
  const uint64_t begin = std::max(pages.begin, PAGE_BYTES + position * sizeof(TableSlot));
  if (begin >= std::min(pages.end, table_end)) {
    return 0;
  }
  const uint64_t last = (std::min(pages.end, table_end) - PAGE_BYTES) / sizeof(TableSlot);
  const uint64_t end = std::min(last, (begin - PAGE_BYTES) / sizeof(TableSlot) + limit);
  for (position = (begin - PAGE_BYTES) / sizeof(TableSlot); position < end; ++position) {
    verify_slot(position, broken);
    const TableSlot& slot = slots_[position];
    if (slot.generation != 0 && !is_right(slot.key, RecordId(slot.record))) {
      broken.push_back("table slot " + std::to_string(position) + " names a record of another chunk, or none that is stored");
    }
  }
  return end < shape_.slots ? end : 0;
}

void ChunkTable::verify_slot(uint64_t position, std::vector<std::string>& broken) const {
  const TableSlot& slot = slots_[position];
  const auto note = [&](const char* what) {
    broken.push_back("table slot " + std::to_string(position) + " " + what);
  };
  if (slot.seq % 2 != 0) {
    note("is left in flux");
  }
  if (slot.generation == 0) {
    return;
  }
  if (position_from(home(slot.key), slot.key) != position) {
    note("is not where its key is found");
  }
  const SlotAddress place = address_of(slot.region, slot.number);
  bool is_inside = !place.valid() || is_slot_of(place, shape_.regions.front().tier);
  for (size_t level = 0; further_ != nullptr && level < TIER_LEVELS; ++level) {
    const StoredResidency& stored = further_[position].of_level[level];
    is_inside = is_inside && (stored.generation == 0 || is_slot_of({stored.region, stored.number}, static_cast<Tier>(level)));
  }
  if (!is_inside) {
    note("points outside its region");
  }
}

}  // namespace kvpool
