// Zeroed memory of a fixed size that costs address space until it is touched, however large it is.
//
// What it is: private pages without a promise of memory behind them, so that arrays can be sized for what a tier may hold at most.
// What it is not: a container: nothing is constructed or destroyed.
// Threads: those of the owner.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

namespace kvpool {

template <typename Item>
class LazyArray {
  static_assert(std::is_trivially_destructible_v<Item>);

 public:
  // Throws std::bad_alloc where not even address space is left.
  explicit LazyArray(uint64_t count)
      : bytes_(count * sizeof(Item)),
        items_(static_cast<Item*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (items_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
  }
  ~LazyArray() { munmap(items_, bytes_); }
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;

  // Brings the pages of the first ones into memory, as far as the kernel does: before they are all written at once.
  void populate(uint64_t count) noexcept {
    constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, which older libc headers lack
    static_cast<void>(madvise(items_, std::min(count * sizeof(Item), bytes_), POPULATE_WRITE));
  }
  [[nodiscard]] uint64_t count() const noexcept { return bytes_ / sizeof(Item); }
  [[nodiscard]] Item& operator[](uint64_t index) noexcept { return items_[index]; }
  [[nodiscard]] const Item& operator[](uint64_t index) const noexcept { return items_[index]; }

 private:
  const size_t bytes_;
  Item* const items_;
};

}  // namespace kvpool
