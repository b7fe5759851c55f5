// The writer's side of the shared index. See chunk_table.h for the layout and the argument.
#include "shared_index/chunk_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "shared_index/index_words.h"
#include "base/check.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

uint64_t IndexShape::slots_for(uint64_t entries) noexcept {
  return std::max(MIN_TABLE_SLOTS, (entries + 4) / 5 * 8);
}

bool IndexShape::valid() const noexcept {
  return slots >= MIN_TABLE_SLOTS && slots <= MAX_TABLE_SLOTS && arena_bytes != 0 && arena_bytes % PAGE_BYTES == 0 &&
         page_count() < UINT32_MAX;
}

ChunkTable::ChunkTable(std::shared_ptr<const Mapping> mapping, IndexShape shape, const uint8_t epoch[16],
                       const HashSeed& seed)
    : mapping_(std::move(mapping)),
      shape_(shape),
      seed_(seed),
      header_(reinterpret_cast<IndexHeader*>(mapping_->data())),
      slots_(reinterpret_cast<TableSlot*>(mapping_->data() + PAGE_BYTES)),
      generations_(reinterpret_cast<uint64_t*>(mapping_->data() + shape.generations_offset())),
      checksums_(reinterpret_cast<uint32_t*>(mapping_->data() + shape.checksums_offset())),
      landings_(reinterpret_cast<uint32_t*>(mapping_->data() + shape.landings_offset())) {
  KVPOOL_CHECK(shape_.valid());
  KVPOOL_CHECK(mapping_->is_writable());
  KVPOOL_CHECK(mapping_->size() >= shape_.total_bytes());
  KVPOOL_CHECK(header_->version == 0);
  std::memcpy(header_->magic, INDEX_MAGIC, sizeof(INDEX_MAGIC));
  header_->version = INDEX_VERSION;
  header_->slots = shape_.slots;
  header_->arena_bytes = shape_.arena_bytes;
  std::memcpy(header_->epoch, epoch, sizeof(header_->epoch));
  header_->seed = seed_;
}

std::optional<uint64_t> ChunkTable::position_from(uint64_t home, const ChunkKey& key) const noexcept {
  uint64_t position = home;
  for (uint64_t step = 0; step < MAX_PROBE; ++step, position = behind(position)) {
    if (slots_[position].generation == 0) {
      return std::nullopt;
    }
    if (slots_[position].key == key) {
      return position;
    }
  }
  return std::nullopt;
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

std::optional<TableEntry> ChunkTable::find(const ChunkKey& key) const noexcept { return find_from(home(key), key); }

std::optional<TableEntry> ChunkTable::find_from(uint64_t home, const ChunkKey& key) const noexcept {
  const auto position = position_from(home, key);
  if (!position) {
    return std::nullopt;
  }
  const TableSlot& slot = slots_[*position];
  return TableEntry{RecordId(slot.record), slot.generation, page_of(slot.page), slot.tiers};
}

uint64_t ChunkTable::prefetch(const ChunkKey& key) const noexcept {
  const uint64_t position = home(key);
  __builtin_prefetch(&slots_[position]);
  return position;
}

bool ChunkTable::has_room(const ChunkKey& key) const noexcept {
  return count_ < shape_.max_entries() && free_position(key).has_value();
}

bool ChunkTable::insert(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept {
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(page.value() < shape_.page_count() || !page.valid());
  KVPOOL_DCHECK(!position_of(key));
  if (!has_room(key)) {
    return false;
  }
  write_slot(*free_position(key), key, record, generation, page);
  store_relaxed(header_->count, ++count_);
  return true;
}

void ChunkTable::write_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation,
                            PageIndex page) noexcept {
  TableSlot& slot = slots_[position];
  const uint32_t seq = slot.seq;
  store_relaxed(slot.seq, seq + 1);
  store_release(slot.record, record.value());
  store_release(slot.generation, generation);
  for (size_t word = 0; word < 4; ++word) {
    store_release(slot.key.words[word], key.words[word]);
  }
  store_release(slot.page, stored_page(page));
  store_release(slot.tiers, uint8_t{0});
  store_release(slot.seq, seq + 2);
}

void ChunkTable::move(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(page.value() < shape_.page_count() || !page.valid());
  TableSlot& slot = slots_[*position];
  const uint32_t seq = slot.seq;
  store_relaxed(slot.seq, seq + 1);
  store_release(slot.record, record.value());
  store_release(slot.generation, generation);
  store_release(slot.page, stored_page(page));
  store_release(slot.seq, seq + 2);
}

void ChunkTable::set_tiers(const ChunkKey& key, uint8_t tiers) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  store_release(slots_[*position].tiers, tiers);
}

void ChunkTable::erase(const ChunkKey& key) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  if (bequest_ && bequest_->from == key) {
    write_slot(*position, bequest_->to, RecordId(), 1, PageIndex());
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
  store_release(to.page, from.page);
  store_release(to.tiers, from.tiers);
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

void ChunkTable::set_generation(PageIndex page, uint64_t generation) noexcept {
  KVPOOL_CHECK(page.value() < shape_.page_count());
  store_release(generations_[page.value()], generation);
}

void ChunkTable::set_checksums(PageIndex page, const uint32_t* checksums, uint32_t layers) noexcept {
  const uint64_t first = uint64_t{page.value()} * CHECKSUMS_PER_PAGE;
  KVPOOL_CHECK(first + layers <= shape_.page_count() * CHECKSUMS_PER_PAGE);
  for (uint32_t layer = 0; layer < layers; ++layer) {
    store_release(checksums_[first + layer], checksums[layer]);
  }
}

void ChunkTable::set_landed(PageIndex page, uint32_t layers) noexcept {
  KVPOOL_CHECK(page.value() < shape_.page_count());
  store_release(landings_[page.value()], layers);
}

uint64_t ChunkTable::generation(PageIndex page) const noexcept {
  KVPOOL_CHECK(page.value() < shape_.page_count());
  return generations_[page.value()];
}

uint32_t ChunkTable::checksum(PageIndex page, uint32_t layer) const noexcept {
  const uint64_t word = uint64_t{page.value()} * CHECKSUMS_PER_PAGE + layer;
  KVPOOL_CHECK(word < shape_.page_count() * CHECKSUMS_PER_PAGE);
  return checksums_[word];
}

template <typename Visit>
void ChunkTable::visit_touched(Visit visit) const {
  const uint64_t table_end = shape_.generations_offset();
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
    count += slots_[position].generation != 0 && slots_[position].page == NO_PAGE ? 1U : 0U;
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
  const uint64_t table_end = shape_.generations_offset();
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
  if (position_of(slot.key) != position) {
    note("is not where its key is found");
  }
  if (slot.page >= shape_.page_count() && slot.page != NO_PAGE) {
    note("points outside the arena");
  }
}

}  // namespace kvpool
