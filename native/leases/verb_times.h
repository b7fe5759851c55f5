// Verb times: how long requests of each kind took, by bucket.
//
// What it is: counters of fixed number. What it is not: a clock. Invariant: there is a row for each kind that it was made with, and for
// no other.
// Threads: the control thread only. O(log buckets) for each time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvpool {

class VerbTimes {
 public:
  struct Row {
    std::vector<uint64_t> counts;  // a bucket for each bound, and one for what took longer
    uint64_t sum_ns = 0;
  };

  // `bounds_ns`: the upper ones of the buckets, rising.
  VerbTimes(const std::vector<uint32_t>& kinds, std::vector<uint64_t> bounds_ns) : bounds_ns_(std::move(bounds_ns)) {
    for (const uint32_t kind : kinds) {
      rows_[kind].counts.resize(bounds_ns_.size() + 1);
    }
  }
  // A request of this kind took so long; nothing for a kind without a row.
  void add_time(uint32_t kind, uint64_t taken_ns) noexcept {
    const auto row = rows_.find(kind);
    if (row != rows_.end()) {
      const auto bound = std::lower_bound(bounds_ns_.begin(), bounds_ns_.end(), taken_ns);
      ++row->second.counts[static_cast<size_t>(bound - bounds_ns_.begin())];
      row->second.sum_ns += taken_ns;
    }
  }
  // The times of a kind; nullptr where it has no row.
  [[nodiscard]] const Row* find(uint32_t kind) const noexcept {
    const auto row = rows_.find(kind);
    return row == rows_.end() ? nullptr : &row->second;
  }

 private:
  const std::vector<uint64_t> bounds_ns_;
  std::unordered_map<uint32_t, Row> rows_;
};

}  // namespace kvpool
