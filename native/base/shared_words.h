// Atomic access to words of shared memory, for their writer and their readers.
//
// Plain words in shared memory become atomics here and nowhere else. The writer is one thread, so it may read its
// own words plainly; readers must load. A load through a read-only mapping is a plain instruction on the machines
// supported, hence the cast: nothing is ever stored through it.
#pragma once

#include <atomic>

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

}  // namespace kvpool
