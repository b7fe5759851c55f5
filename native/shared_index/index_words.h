// Atomic access to the words of the shared index, for its writer and its readers.
//
// Plain words in shared memory become atomics here and nowhere else. The writer is one thread, so it may read its
// own words plainly; readers must load. A load through a read-only mapping is a plain instruction on the machines
// supported, hence the cast: nothing is ever stored through it.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/memory.h"
#include "shared_index/index_format.h"

namespace kvpool {

template <typename Word>
[[nodiscard]] inline Word load_acquire(const Word& word) noexcept {
  static_assert(std::atomic_ref<Word>::is_always_lock_free);
  return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_acquire);
}

template <typename Word>
inline void store_release(Word& word, Word value) noexcept {
  std::atomic_ref<Word>(word).store(value, std::memory_order_release);
}

template <typename Word>
inline void store_relaxed(Word& word, Word value) noexcept {
  std::atomic_ref<Word>(word).store(value, std::memory_order_relaxed);
}

// The words of one region, in a mapping. A reader's mapping is read-only: nothing is stored through it.
struct RegionWords {
  SlotWords* slots = nullptr;
  uint32_t* checksums = nullptr;
  uint64_t slot_count = 0;
  uint64_t checksum_count = 0;

  // nullptr: the region has no such slot.
  [[nodiscard]] SlotWords* find(uint32_t number) const noexcept { return number < slot_count ? &slots[number] : nullptr; }
  // The checksums of `layers` layers of a slot; nullptr where they would lie outside. Where they begin is read anew each time.
  [[nodiscard]] uint32_t* find_checksums(const SlotWords& slot, uint64_t layers) const noexcept {
    const uint64_t first = load_acquire(slot.first_checksum);
    return layers <= checksum_count && first <= checksum_count - layers ? &checksums[first] : nullptr;
  }
};

[[nodiscard]] inline RegionWords words_of(const Mapping& index, const RegionHeader& region) noexcept {
  return {reinterpret_cast<SlotWords*>(index.data() + region.words_offset),
          reinterpret_cast<uint32_t*>(index.data() + region.checksums_offset), region.slots, region.checksums};
}

}  // namespace kvpool
