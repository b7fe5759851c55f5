// A wait for the first landing among several chunks, each by the landing word of its own slot in the shared index.
//
// What it is: a list of words, each with the value that its reader saw, on which one thread sleeps at once. What it is not: a
// promise: a thread that wakes looks again, and a word of shared memory may have any value, so every wait has an end.
// Where the kernel or its filter lacks FUTEX_WAITV (Linux 5.16) the thread sleeps on the first word alone, and learns of the others
// when the time is over. Measured: a wait costs 0.4 us and 0.5 us for each word, 16 us where all are taken; one landing of a MiB
// takes a disk 500 us.
// Threads: one; the words change under it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "shared_index/chunk_table.h"

namespace kvpool {

// Wakes all who wait for a landing word of the shared index. Any thread.
void wake_landing(const uint32_t& word) noexcept;

class LandingWait {
 public:
  static constexpr size_t WORDS_MAX = 32;

  // Sleep until the slot's word is no longer `seen`. Ignored where there is no such slot or no room.
  void add(std::shared_ptr<const IndexView> index, SlotAddress slot, uint32_t seen) noexcept;
  void clear() noexcept;
  [[nodiscard]] bool is_full() const noexcept { return count_ == WORDS_MAX; }

  // Returns when one of the words has changed, or the time is over; may return early, and does where there is no word.
  // `wait_for_first`: of the first word alone. REQUIRES: timeout_s >= 0.
  void wait(double timeout_s) const noexcept;
  void wait_for_first(double timeout_s) const noexcept;

 private:
  struct Word {
    std::shared_ptr<const IndexView> index;  // keeps the word mapped
    const uint32_t* address;
    uint32_t seen;
  };

  std::array<Word, WORDS_MAX> words_{};
  size_t count_ = 0;
};

}  // namespace kvpool
