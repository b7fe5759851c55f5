// Atomic access to the words of the shared index, for its writer and its readers.
//
// Plain words in shared memory become atomics here and nowhere else. The writer is one thread, so it may read its
// own words plainly; readers must load. A load through a read-only mapping is a plain instruction on the machines
// supported, hence the cast: nothing is ever stored through it.
#pragma once

#include <atomic>
#include <cstdint>

#include "shared_index/chunk_table.h"

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

// A page as the shared table has it: an arena has fewer than 2^32.
[[nodiscard]] inline uint32_t stored_page(PageIndex page) noexcept {
  return page.valid() ? static_cast<uint32_t>(page.value()) : NO_PAGE;
}
[[nodiscard]] inline PageIndex page_of(uint32_t stored) noexcept {
  return stored == NO_PAGE ? PageIndex() : PageIndex(stored);
}

}  // namespace kvpool
