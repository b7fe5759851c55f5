// Which keys were here not long ago: two Bloom filters, of which the older one is thrown away when the newer one is full.
//
// What it is: a memory of evicted chunks in two bytes each. What it is not: exact; about one stranger in 230 to 450 is taken for
// an acquaintance, and what was added before the last `capacity` to twice that many is forgotten.
// Source: two rotating filters instead of a queue of keys, as in TinyLFU's ageing (Einziger et al., 2017).
// Threads: the control thread only. O(1) per operation, but for the clearing of a filter.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/types.h"

namespace kvpool {

class GhostFilter {
 public:
  // REQUIRES: capacity > 0, the keys of one filter.
  explicit GhostFilter(uint32_t capacity)
      : capacity_(capacity),
        newer_(std::bit_ceil(uint64_t{capacity} * BITS_PER_KEY) / 64),
        older_(newer_.size()),
        mask_(newer_.size() * 64 - 1) {}

  void add(const ChunkKey& key) {
    if (count_ == capacity_) {
      std::swap(newer_, older_);
      newer_.assign(newer_.size(), 0);
      count_ = 0;
    }
    ++count_;
    for (unsigned number = 0; number < HASHES; ++number) {
      const uint64_t bit = bit_of(key, number);
      newer_[bit / 64] |= uint64_t{1} << (bit % 64);
    }
  }

  [[nodiscard]] bool contains(const ChunkKey& key) const noexcept {
    return is_in(newer_, key) || is_in(older_, key);
  }

 private:
  static constexpr unsigned BITS_PER_KEY = 16;
  static constexpr unsigned HASHES = KEY_BYTES / sizeof(uint64_t);

  // Keys are hashes already: each of their words is one.
  [[nodiscard]] uint64_t bit_of(const ChunkKey& key, unsigned number) const noexcept {
    return key.words[number] & mask_;
  }

  [[nodiscard]] bool is_in(const std::vector<uint64_t>& filter, const ChunkKey& key) const noexcept {
    for (unsigned number = 0; number < HASHES; ++number) {
      const uint64_t bit = bit_of(key, number);
      if ((filter[bit / 64] >> (bit % 64) & 1U) == 0) {
        return false;
      }
    }
    return true;
  }

  const uint32_t capacity_;
  uint32_t count_ = 0;
  std::vector<uint64_t> newer_;
  std::vector<uint64_t> older_;
  const uint64_t mask_;
};

}  // namespace kvpool
