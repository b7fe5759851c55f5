// Rows that cross packed from Python and are nobody else's. Little endian; Python makes its numpy types of their layouts, which
// `bind_rows.cpp` hands out: there is no second declaration.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace kvpool {

// A chunk to move between the files and the arena.
struct MoveRow {
  uint8_t key[KEY_BYTES];
  uint8_t parent[KEY_BYTES];  // zeros: the chunk is the first of its prompt
  uint64_t offset;            // over all segment files
  uint64_t arena_offset;
  uint64_t generation;  // in the files
};
static_assert(sizeof(MoveRow) == 88);

// One row of a catalogue as the daemon restores it.
struct RestoreRow {
  uint8_t key[KEY_BYTES];
  uint8_t parent[KEY_BYTES];  // zeros: the root
  uint64_t offset;
  uint64_t generation;
  uint32_t owner;
  uint32_t size_class;
  uint32_t priority;
  uint32_t duration_ms;
};
static_assert(sizeof(RestoreRow) == 96);

}  // namespace kvpool
