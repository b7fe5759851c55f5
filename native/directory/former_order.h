// The order in which chunks of a former life are restored: the most recent first, ancestors before what follows them.
//
// Records are what a process has left that was killed, and may say anything that is not sealed: what is done with it must end.
// Pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arena/slot_arena.h"
#include "base/types.h"

namespace kvpool {

// A chunk of a former life that can be taken over if what precedes it is. Candidates are known by their numbers.
struct FormerCandidate {
  static constexpr uint32_t NONE = UINT32_MAX;

  uint64_t used_ns;
  uint32_t id;      // of its record then
  uint32_t parent;  // a candidate; NONE: it is the first, or what precedes it is no candidate
  uint32_t depth;
  uint32_t run;  // where it lies, and the numbers of its slot there
  SlotNumbers slot;
  // What follows is restoring_order's own.
  uint32_t children = 0;
  uint32_t follower = NONE;
  bool is_whole = false;  // all that precede it are candidates
  RecordId restored{};    // what has become of it
};

// Those that are whole. A chunk counts as used when a descendant was, which is noted. A chain that was used as one stays together.
// O(n), but for a sort of the chains.
[[nodiscard]] std::vector<uint32_t> restoring_order(std::span<FormerCandidate> candidates);

}  // namespace kvpool
