// What a directory notes of a promotion, and what it finds out once for all chunks of a reservation. Plain values; the control
// thread's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "directory/directory_answers.h"
#include "arena/slot_arena.h"
#include "base/types.h"

namespace kvpool {

// A promotion under way.
struct Promotion {
  RecordId record;
  Tier tier;                        // that the chunk is read from
  uint64_t generation;              // there; 0: the tier has no directory here
  std::vector<uint32_t> checksums;  // what its extents must be; none: not known
};

// How much of a reserve is done in one call.
struct ReserveBounds {
  size_t limit = SIZE_MAX;  // chunks
  bool may_wait = false;    // stop before a chunk that would be NOT_READY
  bool is_run = false;      // what is reserved has no other's chunk in between: such a one declines what follows it
};

}  // namespace kvpool
