// How long something took or stood, in powers of two of a second.
//
// What it is: counters of fixed number. What it is not: a clock. Bucket i counts times of at most 2^i seconds and more
// than 2^(i-1); the last one counts all that is longer (48 days). Adding is O(1) and allocates nothing.
// Threads: the control thread only.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvpool {

class TimeHistogram {
 public:
  static constexpr size_t BUCKETS = 24;

  // So many times of this length.
  void add(uint64_t ns, uint64_t count = 1) noexcept {
    counts_[bucket_of(ns)] += count;
    sum_ticks_ += count * (ns >> TICK_SHIFT);
  }

  [[nodiscard]] const std::array<uint64_t, BUCKETS>& counts() const noexcept { return counts_; }
  // Sum of all times; each is cut to a whole tick, about a millisecond.
  [[nodiscard]] double sum_s() const noexcept {
    return static_cast<double>(sum_ticks_) * static_cast<double>(uint64_t{1} << TICK_SHIFT) / NS_PER_S;
  }

 private:
  // A sum of nanoseconds would overflow within hours where a million chunks are reused: gaps of all of them add up.
  static constexpr unsigned TICK_SHIFT = 20;
  static constexpr uint64_t NS_PER_S = 1'000'000'000;

  [[nodiscard]] static size_t bucket_of(uint64_t ns) noexcept {
    const uint64_t whole_s = ns == 0 ? 0 : (ns - 1) / NS_PER_S;
    return std::min(static_cast<size_t>(std::bit_width(whole_s)), BUCKETS - 1);
  }

  std::array<uint64_t, BUCKETS> counts_{};
  uint64_t sum_ticks_ = 0;
};

}  // namespace kvpool
