// The words of slots, as the writer of the shared index stores them. See chunk_table.h.
#include <algorithm>

#include "base/check.h"
#include "shared_index/chunk_table.h"
#include "shared_index/landing_wait.h"

namespace kvpool {

SlotWords& ChunkTable::words_at(SlotAddress slot) const noexcept {
  KVPOOL_CHECK(shape_.has(slot));
  return regions_[slot.region].slots[slot.number];
}

void ChunkTable::open_slot(SlotAddress slot, uint32_t first_checksum) noexcept {
  SlotWords& words = words_at(slot);
  KVPOOL_CHECK(words.generation == 0);
  store_release(words.first_checksum, first_checksum);
  store_release(words.landed, uint32_t{0});
}

void ChunkTable::prefetch_words(SlotAddress slot) const noexcept { __builtin_prefetch(&words_at(slot), 1); }

void ChunkTable::set_generation(SlotAddress slot, uint64_t generation) noexcept {
  store_release(words_at(slot).generation, generation);
}

void ChunkTable::set_checksums(SlotAddress slot, const uint32_t* checksums, uint32_t extents) noexcept {
  uint32_t* const sums = regions_[slot.region].find_checksums(words_at(slot), extents);
  KVPOOL_CHECK(sums != nullptr);
  for (uint32_t extent = 0; extent < extents; ++extent) {
    store_release(sums[extent], checksums[extent]);
  }
}

void ChunkTable::set_landed(SlotAddress slot, uint32_t extents) noexcept {
  SlotWords& words = words_at(slot);
  const bool may_be_followed = words.generation != 0;  // before its publication only who follows it has asked for that
  store_release(words.landed, extents);
  if (may_be_followed) {
    wake_landing(words.landed);
  }
}

void ChunkTable::end_landing(SlotAddress slot) noexcept {
  SlotWords& words = words_at(slot);
  store_release(words.landed, LANDING_FAILED);
  wake_landing(words.landed);
}

void ChunkTable::land(SlotAddress slot, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept {
  SlotWords& words = words_at(slot);
  uint32_t* const sums = regions_[slot.region].find_checksums(words, uint64_t{first} + count);
  KVPOOL_CHECK(sums != nullptr && words.landed == first);
  for (uint32_t extent = 0; extent < count; ++extent) {
    store_release(sums[first + extent], checksums[extent]);
  }
  store_release(words.landed, first + count);
  wake_landing(words.landed);
}

uint32_t ChunkTable::landed(SlotAddress slot) const noexcept { return load_acquire(words_at(slot).landed); }

uint64_t ChunkTable::generation(SlotAddress slot) const noexcept { return words_at(slot).generation; }

uint32_t ChunkTable::checksum(SlotAddress slot, uint32_t extent) const noexcept {
  const uint32_t* const sums = regions_[slot.region].find_checksums(words_at(slot), uint64_t{extent} + 1);
  KVPOOL_CHECK(sums != nullptr);
  return sums[extent];
}

// Words do not straddle pages: a part begins at a multiple of their size.
uint64_t ChunkTable::count_published(uint32_t region) const noexcept {
  static_assert(PART_ALIGNMENT % sizeof(SlotWords) == 0);
  const RegionWords& words = regions_[region];
  const auto first = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(words.slots) - mapping_->data());
  const uint64_t last = first + words.slot_count * sizeof(SlotWords);
  uint64_t count = 0;
  for (Stretch pages = mapping_->next_pages(first); pages.begin < std::min(pages.end, last); pages = mapping_->next_pages(pages.end)) {
    const uint64_t begin = (std::max(pages.begin, first) - first) / sizeof(SlotWords);
    const uint64_t end = (std::min(pages.end, last) - first) / sizeof(SlotWords);
    count += static_cast<uint64_t>(
        std::count_if(words.slots + begin, words.slots + end, [](const SlotWords& slot) { return slot.generation != 0; }));
  }
  return count;
}

}  // namespace kvpool
