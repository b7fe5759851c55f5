// Write shares: how much of each size class was lost instead of written to the lower tier, and so which class is behind on the disk.
//
// What it is: two byte counts for each class, of chunks that were written to the lower tier and of chunks that were evicted, or
// waited for, without that. What it is not: a plan; UnsavedOrder takes the class first that has lost the largest part.
//
// A disk that is too slow for all classes then writes the same part of each, so each has a share in proportion to what comes of
// it. By age alone the class whose chunks are a little older is first for long, since memory moves between classes in whole runs,
// and whoever waits stores nothing that would be new: of a disk that took half of what two models made in equal parts, one got
// 61 % with write-through, and 91 % where saves waited for it too; with these counts 50 and 57 % (measured as
// tests/unit/tiering/test_demotion_shares.py does).
//
// Invariant: the counts of a class sum up to the window at most, but for its last chunk: both are halved beyond it.
// Threads: the control thread only. O(1).
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace kvpool {

class WriteShares {
 public:
  // `window_bytes`: what is remembered of each class.
  explicit WriteShares(uint64_t window_bytes) : window_bytes_(window_bytes) {}

  void add_class() { classes_.emplace_back(); }
  void forget(ClassId size_class) noexcept { classes_[size_class.value()] = {}; }
  void note_written(ClassId size_class, uint64_t bytes) noexcept { note(classes_[size_class.value()].written, size_class, bytes); }
  void note_lost(ClassId size_class, uint64_t bytes) noexcept { note(classes_[size_class.value()].lost, size_class, bytes); }

  // The part of the class's bytes that was lost lately, of 1. A class of which little is known counts as one that lost nothing.
  [[nodiscard]] double lost_part(ClassId size_class) const noexcept {
    const Counts& counts = classes_[size_class.value()];
    const auto lost = static_cast<double>(counts.lost);
    return lost == 0 ? 0 : lost / (lost + static_cast<double>(counts.written) + static_cast<double>(window_bytes_) / PRIOR_DIVISOR);
  }

 private:
  // So much of the window counts as written before anything was: a guess.
  static constexpr double PRIOR_DIVISOR = 16;

  struct Counts {
    uint64_t written = 0;
    uint64_t lost = 0;
  };

  void note(uint64_t& count, ClassId size_class, uint64_t bytes) noexcept {
    count += bytes;
    Counts& counts = classes_[size_class.value()];
    if (counts.written + counts.lost > window_bytes_) {
      counts.written /= 2;
      counts.lost /= 2;
    }
  }

  const uint64_t window_bytes_;
  std::vector<Counts> classes_;
};

}  // namespace kvpool
