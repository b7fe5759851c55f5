// The writer's side of the shared index. See chunk_table.h for the layout and the argument.
#include "kvpool/chunk_table.h"

#include <bit>
#include <cstring>

#include "index_words.h"
#include "kvpool/check.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

uint32_t IndexShape::table_log2_for(uint64_t max_chunks) noexcept {
  uint32_t log2 = 6;
  while (log2 < MAX_TABLE_LOG2 && (uint64_t{1} << log2) < 2 * max_chunks) {
    ++log2;
  }
  return log2;
}

bool IndexShape::valid() const noexcept {
  return table_log2 >= 6 && table_log2 <= MAX_TABLE_LOG2 && arena_bytes != 0 && arena_bytes % PAGE_BYTES == 0 &&
         page_count() < UINT32_MAX;
}

ChunkTable::ChunkTable(std::shared_ptr<const Mapping> mapping, IndexShape shape, const uint8_t epoch[16])
    : mapping_(std::move(mapping)),
      shape_(shape),
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
  header_->table_log2 = shape_.table_log2;
  header_->arena_bytes = shape_.arena_bytes;
  std::memcpy(header_->epoch, epoch, sizeof(header_->epoch));
}

std::optional<uint64_t> ChunkTable::position_of(const ChunkKey& key) const noexcept {
  const uint64_t mask = shape_.slot_count() - 1;
  const uint64_t home = home_of(key, mask);
  for (uint64_t step = 0; step < MAX_PROBE; ++step) {
    const uint64_t position = (home + step) & mask;
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
  const uint64_t mask = shape_.slot_count() - 1;
  const uint64_t home = home_of(key, mask);
  for (uint64_t step = 0; step < MAX_PROBE && step <= mask; ++step) {
    const uint64_t position = (home + step) & mask;
    if (slots_[position].generation == 0) {
      return position;
    }
  }
  return std::nullopt;
}

std::optional<TableEntry> ChunkTable::find(const ChunkKey& key) const noexcept {
  const auto position = position_of(key);
  if (!position) {
    return std::nullopt;
  }
  const TableSlot& slot = slots_[*position];
  return TableEntry{RecordId(slot.record), slot.generation, PageIndex(slot.page), slot.tiers};
}

void ChunkTable::prefetch(const ChunkKey& key) const noexcept {
  __builtin_prefetch(&slots_[home_of(key, shape_.slot_count() - 1)]);
}

bool ChunkTable::has_room(const ChunkKey& key) const noexcept {
  return count_ < shape_.slot_count() / 2 && free_position(key).has_value();
}

bool ChunkTable::insert(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept {
  KVPOOL_CHECK(generation != 0);
  KVPOOL_CHECK(page.value() < shape_.page_count() || !page.valid());
  KVPOOL_DCHECK(!position_of(key));
  if (!has_room(key)) {
    return false;
  }
  TableSlot& slot = slots_[*free_position(key)];
  const uint32_t seq = slot.seq;
  store_relaxed(slot.seq, seq + 1);
  store_release(slot.record, record.value());
  store_release(slot.generation, generation);
  for (size_t word = 0; word < 4; ++word) {
    store_release(slot.key.words[word], key.words[word]);
  }
  store_release(slot.page, page.value());
  store_release(slot.tiers, uint8_t{0});
  store_release(slot.seq, seq + 2);
  store_relaxed(header_->count, ++count_);
  return true;
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
  store_release(slot.page, page.value());
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
  const uint64_t mask = shape_.slot_count() - 1;
  uint64_t hole = *position;
  // No entry stands MAX_PROBE or more behind its home, so none from there on can move to the hole: keys are the clients'
  // choice, and a run of occupied slots can be as long as the table allows.
  for (uint64_t next = (hole + 1) & mask; slots_[next].generation != 0 && ((next - hole) & mask) < MAX_PROBE;
       next = (next + 1) & mask) {
    // The entry may move back to the hole unless that is before its home, in probe order.
    const uint64_t distance = (next - home_of(slots_[next].key, mask)) & mask;
    if (distance >= ((next - hole) & mask)) {
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

uint64_t ChunkTable::count_placeless() const noexcept {
  uint64_t count = 0;
  for (uint64_t position = 0; position < shape_.slot_count(); ++position) {
    count += slots_[position].generation != 0 && slots_[position].page == NO_PAGE ? 1U : 0U;
  }
  return count;
}

uint64_t ChunkTable::count_in(uint8_t tiers) const noexcept {
  uint64_t count = 0;
  for (uint64_t position = 0; position < shape_.slot_count(); ++position) {
    count += slots_[position].generation != 0 && (slots_[position].tiers & tiers) != 0 ? 1U : 0U;
  }
  return count;
}

std::vector<std::string> ChunkTable::verify() const {
  std::vector<std::string> broken;
  const uint64_t mask = shape_.slot_count() - 1;
  uint64_t entries = 0;
  for (uint64_t position = 0; position <= mask; ++position) {
    const TableSlot& slot = slots_[position];
    if (slot.seq % 2 != 0) {
      broken.push_back("table slot " + std::to_string(position) + " is left in flux");
    }
    if (slot.generation == 0) {
      continue;
    }
    ++entries;
    const auto found = position_of(slot.key);
    if (!found || *found != position) {
      broken.push_back("table slot " + std::to_string(position) + " is not where its key is found");
    }
    if (slot.page >= shape_.page_count() && slot.page != NO_PAGE) {
      broken.push_back("table slot " + std::to_string(position) + " points outside the arena");
    }
  }
  if (entries != count_ || header_->count != count_) {
    broken.push_back("table counts " + std::to_string(count_) + " entries and holds " + std::to_string(entries));
  }
  if (count_ > shape_.slot_count() / 2) {
    broken.push_back("table is more than half full");
  }
  return broken;
}

}  // namespace kvpool
