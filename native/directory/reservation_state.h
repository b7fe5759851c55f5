// What a directory keeps of a reservation or a promotion, and what it finds out once for all chunks of one. Plain values; the control thread's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "directory/directory_answers.h"
#include "directory/holder_accounts.h"
#include "arena/slot_arena.h"
#include "base/types.h"

namespace kvpool {

struct ReservationState {
  size_t ancestors = 0;       // records before the first key's
  size_t first_reserved = 0;  // keys before this were PRESENT
  size_t writing = 0;         // not stored yet, those that were dropped meanwhile among them
  bool is_compared = false;   // with what its holder keeps otherwise
  size_t found = 0;           // leading records that had been acquired since they were stored
  uint64_t taken_bytes = 0;   // by each record
  uint32_t layers = 0;
  bool expired = false;
  size_t unexpired = 0;       // once expired: leading records that may not be out of sight yet
  NamespaceId owner;
  ClassId size_class;
  HolderId holder;
  std::vector<RecordId> records;  // ancestors, present, reserved; once expired: the zombies
};

// A promotion under way.
struct Promotion {
  RecordId record;
  Tier tier;                        // that the chunk is read from
  uint64_t generation;              // there
  std::vector<uint32_t> checksums;  // what its layers must be; none: not known
};

// A slot whose writer may still write.
struct Quarantined {
  FenceId fence;  // that ends it
  RecordId record;
  uint64_t generation;
};

// How much of a reserve is done in one call.
struct ReserveBounds {
  size_t limit = SIZE_MAX;  // chunks
  bool may_wait = false;    // stop before a chunk that would be NOT_READY
};

// The window a reservation would clear, searched once and then kept while it is still good.
struct WindowSearch {
  bool searched = false;
  std::optional<SegmentWindow> window;
};

// What has to go for one chunk. Nothing does unless the state is RESERVED.
struct RoomPlan {
  SaveState state = SaveState::FULL;
  std::vector<RecordId> slot_owners{};  // for its slot, with all that follows them
  Eviction slot_reason = Eviction::OWN_CLASS;
  std::vector<RecordId> further{};      // in their order
};

// What a reservation may add to what its holder keeps.
struct ShareClaim {
  HolderId holder;
  uint64_t held = 0;         // bytes that were held when it began
  size_t covered = 0;        // leading chunks that the holder keeps anyway, or that count already
  bool is_compared = false;  // whether that is known
  HoldId own = 0;            // the reservation that goes on, and counts
  bool is_recounted = false;
  size_t user_covered = 0;   // leading chunks that the holder's user keeps anyway
};

}  // namespace kvpool
