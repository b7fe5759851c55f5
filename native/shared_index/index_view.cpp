// The readers' side of the shared index. See chunk_table.h for the layout and the argument.
#include <array>
#include <bit>
#include <cstring>

#include "shared_index/index_words.h"
#include "shared_index/chunk_table.h"

namespace kvpool {
namespace {

// Memory latency over the time of one probe that hits the cache: about 80 ns over 10 ns (guess).
constexpr size_t PREFETCH_AHEAD = 8;

enum class Look { FOUND, ABSENT, IN_FLUX };

// Reads one slot whole. Returns IN_FLUX where the writer was at it, ABSENT where it is empty or another key's.
Look read_slot(const TableSlot& slot, const ChunkKey& key, bool& empty, TableEntry& entry) noexcept {
  empty = false;
  const uint32_t seq = load_acquire(slot.seq);
  if (seq % 2 != 0) {
    return Look::IN_FLUX;
  }
  const uint64_t generation = load_acquire(slot.generation);
  bool equal = true;
  for (size_t word = 0; word < 4; ++word) {
    equal = equal && load_acquire(slot.key.words[word]) == key.words[word];
  }
  const uint32_t record = load_acquire(slot.record);
  const uint32_t page = load_acquire(slot.page);
  const uint8_t tiers = load_acquire(slot.tiers);
  if (load_acquire(slot.seq) != seq) {
    return Look::IN_FLUX;
  }
  empty = generation == 0;
  if (empty || !equal) {
    return Look::ABSENT;
  }
  entry = {RecordId(record), generation, page_of(page), tiers};
  return Look::FOUND;
}

// One walk along the probe sequence.
Look look_once(const TableSlot* slots, uint64_t count, uint64_t home, const ChunkKey& key, TableEntry& entry) noexcept {
  Look result = Look::ABSENT;
  uint64_t position = home;
  for (uint64_t step = 0; step < MAX_PROBE; ++step, position = position + 1 == count ? 0 : position + 1) {
    bool empty = false;
    const Look look = read_slot(slots[position], key, empty, entry);
    if (look == Look::FOUND) {
      return look;
    }
    if (look == Look::IN_FLUX) {
      result = Look::IN_FLUX;
    }
    if (empty) {
      break;
    }
  }
  return result;
}

}  // namespace

std::shared_ptr<const IndexView> IndexView::attach(std::shared_ptr<const Mapping> mapping) {
  if (mapping == nullptr || mapping->size() < PAGE_BYTES) {
    return nullptr;
  }
  const auto* header = reinterpret_cast<const IndexHeader*>(mapping->data());
  const IndexShape shape{load_acquire(header->slots), load_acquire(header->arena_bytes)};
  if (std::memcmp(header->magic, INDEX_MAGIC, sizeof(INDEX_MAGIC)) != 0 || header->version != INDEX_VERSION) {
    return nullptr;
  }
  if (!shape.valid() || mapping->size() < shape.total_bytes()) {
    return nullptr;
  }
  return std::shared_ptr<const IndexView>(new IndexView(std::move(mapping), shape));
}

IndexView::IndexView(std::shared_ptr<const Mapping> mapping, IndexShape shape) noexcept
    : mapping_(std::move(mapping)),
      shape_(shape),
      header_(reinterpret_cast<const IndexHeader*>(mapping_->data())),
      slots_(reinterpret_cast<const TableSlot*>(mapping_->data() + PAGE_BYTES)),
      generations_(reinterpret_cast<const uint64_t*>(mapping_->data() + shape.generations_offset())),
      checksums_(reinterpret_cast<const uint32_t*>(mapping_->data() + shape.checksums_offset())),
      landings_(reinterpret_cast<const uint32_t*>(mapping_->data() + shape.landings_offset())),
      seed_{load_acquire(header_->seed.words[0]), load_acquire(header_->seed.words[1])} {}

std::optional<TableEntry> IndexView::find(const ChunkKey& key) const noexcept {
  return find_from(home_of(key, seed_, shape_.slots), key);
}

std::optional<TableEntry> IndexView::find_from(uint64_t home, const ChunkKey& key) const noexcept {
  TableEntry entry{};
  for (uint32_t look = 0; look < MAX_LOOKS; ++look) {
    const uint64_t moves = load_acquire(header_->moves);
    const Look result = look_once(slots_, shape_.slots, home, key, entry);
    if (result == Look::FOUND) {
      return entry;
    }
    if (result == Look::ABSENT && load_acquire(header_->moves) == moves) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

bool IndexView::is_being_written(const ChunkKey& key) const noexcept {
  const auto entry = find(key);
  return entry && entry->tiers == 0;
}

size_t IndexView::lookup(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept {
  std::array<uint64_t, PREFETCH_AHEAD> homes{};
  const auto prefetch = [&](size_t index) {
    if (index < n) {
      const uint64_t home = home_of(ChunkKey::from_bytes(keys + index * KEY_BYTES), seed_, shape_.slots);
      homes[index % PREFETCH_AHEAD] = home;
      __builtin_prefetch(&slots_[home]);
    }
  };
  for (size_t index = 0; index < PREFETCH_AHEAD; ++index) {
    prefetch(index);
  }
  for (size_t index = 0; index < n; ++index) {
    const uint64_t home = homes[index % PREFETCH_AHEAD];
    prefetch(index + PREFETCH_AHEAD);
    const auto entry = find_from(home, ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!entry || entry->tiers == 0) {
      return index;
    }
    levels[index] = static_cast<uint8_t>(std::countr_zero(entry->tiers));
  }
  return n;
}

uint64_t IndexView::generation_at(uint64_t offset) const noexcept {
  if (offset % PAGE_BYTES != 0 || offset >= shape_.arena_bytes) {
    return 0;
  }
  return load_acquire(generations_[offset / PAGE_BYTES]);
}

uint32_t IndexView::checksum_at(uint64_t offset, uint32_t layer) const noexcept {
  if (!covers(offset, 1) || offset / PAGE_BYTES * CHECKSUMS_PER_PAGE + layer >= shape_.page_count() * CHECKSUMS_PER_PAGE) {
    return 0;
  }
  return load_acquire(checksums_[offset / PAGE_BYTES * CHECKSUMS_PER_PAGE + layer]);
}

uint32_t IndexView::landed_at(uint64_t offset) const noexcept {
  const uint32_t* const word = landing_word(offset);
  return word == nullptr ? 0 : load_acquire(*word);
}

const uint32_t* IndexView::landing_word(uint64_t offset) const noexcept {
  return offset % PAGE_BYTES != 0 || offset >= shape_.arena_bytes ? nullptr : &landings_[offset / PAGE_BYTES];
}

bool IndexView::covers(uint64_t offset, uint32_t layers) const noexcept {
  if (offset % PAGE_BYTES != 0 || offset >= shape_.arena_bytes) {
    return false;
  }
  return offset / PAGE_BYTES * CHECKSUMS_PER_PAGE + layers <= shape_.page_count() * CHECKSUMS_PER_PAGE;
}

uint64_t IndexView::count() const noexcept { return load_acquire(header_->count); }

std::string IndexView::epoch() const {
  return {reinterpret_cast<const char*>(header_->epoch), sizeof(header_->epoch)};
}

}  // namespace kvpool
