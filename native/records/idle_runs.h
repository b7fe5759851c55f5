// The runs of each size class that could be cleared at once, the one that was used longest ago first.
//
// What it is: a heap for each class, of runs whose slots are all idle. What it is not: the truth about a run (SlotArena has
// it), or a choice between classes.
//
// A run comes in when its last busy slot becomes idle, and its key may fall behind from then on: a use makes it newer and busy
// without a word to the heap. Keys are therefore lower bounds; whoever takes the first looks at the run itself, and has it
// raised or removed where it is not what its key says. So a chunk that is leased and released costs nothing here.
//
// Invariants: every run whose slots are all idle is in its class's heap; a key is never above its run's; `positions_` names the
// entry of each run that is in a heap.
// Threads: the control thread only. O(log runs) per call, `first` and `has` O(1).
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/types.h"

namespace kvpool {

// How long ago a run was used, and whether a slot in it has a priority above the default: the lowest key is cleared first.
class RunAge {
 public:
  constexpr RunAge() = default;
  constexpr RunAge(uint64_t newest_ns, bool is_retained) : word_((newest_ns & ~RETAINED_BIT) | (is_retained ? RETAINED_BIT : 0)) {}
  [[nodiscard]] constexpr uint64_t newest_ns() const noexcept { return word_ & ~RETAINED_BIT; }
  [[nodiscard]] constexpr bool is_retained() const noexcept { return (word_ & RETAINED_BIT) != 0; }
  constexpr auto operator<=>(const RunAge&) const = default;

 private:
  static constexpr uint64_t RETAINED_BIT = uint64_t{1} << 63;
  uint64_t word_ = 0;
};

struct IdleRun {
  RunAge age;
  uint32_t run;  // its first segment
};

class IdleRuns {
 public:
  static constexpr uint32_t NONE = std::numeric_limits<uint32_t>::max();

  explicit IdleRuns(uint32_t segments) : positions_(segments, NONE) {}

  void add_class() { heaps_.emplace_back(); }
  [[nodiscard]] bool has(uint32_t run) const noexcept { return positions_[run] != NONE; }

  // REQUIRES: the run is in no heap / in this class's heap.
  void add(ClassId size_class, IdleRun run);
  void remove(ClassId size_class, uint32_t run) noexcept;
  void set_age(ClassId size_class, uint32_t run, RunAge age) noexcept;

  // The heap of a class: the entry at 0 is first, those at 2 n + 1 and 2 n + 2 are not before the one at n.
  [[nodiscard]] const std::vector<IdleRun>& heap(ClassId size_class) const noexcept { return heaps_[size_class.value()]; }

  // Whether the heaps are in order and `positions_` names their entries.
  [[nodiscard]] bool verify() const noexcept;

 private:
  using Heap = std::vector<IdleRun>;

  void rise(Heap& heap, size_t at) noexcept;
  void sink(Heap& heap, size_t at) noexcept;
  void put(Heap& heap, size_t at, IdleRun run) noexcept;

  std::vector<Heap> heaps_;           // by class
  std::vector<uint32_t> positions_;  // by a run's first segment
};

}  // namespace kvpool
