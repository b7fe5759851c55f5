// The words of slots in the shared index, by region. How shared words are loaded and stored: base/shared_words.h.
#pragma once

#include <cstdint>

#include "base/memory.h"
#include "base/shared_words.h"
#include "shared_index/index_format.h"

namespace kvpool {

// The words of one region, in a mapping. A reader's mapping is read-only: nothing is stored through it.
struct RegionWords {
  SlotWords* slots = nullptr;
  uint32_t* checksums = nullptr;
  uint64_t slot_count = 0;
  uint64_t checksum_count = 0;

  // nullptr: the region has no such slot.
  [[nodiscard]] SlotWords* find(uint32_t number) const noexcept { return number < slot_count ? &slots[number] : nullptr; }
  // The checksums of `extents` extents of a slot; nullptr where they would lie outside. Where they begin is read anew each time.
  [[nodiscard]] uint32_t* find_checksums(const SlotWords& slot, uint64_t extents) const noexcept {
    const uint64_t first = load_acquire(slot.first_checksum);
    return extents <= checksum_count && first <= checksum_count - extents ? &checksums[first] : nullptr;
  }
};

[[nodiscard]] inline RegionWords words_of(const Mapping& index, const RegionHeader& region) noexcept {
  return {reinterpret_cast<SlotWords*>(index.data() + region.words_offset),
          reinterpret_cast<uint32_t*>(index.data() + region.checksums_offset), region.slots, region.checksums};
}

}  // namespace kvpool
