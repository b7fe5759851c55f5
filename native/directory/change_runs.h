// Runs of changes: consecutive rows of the feed that one event reports. A pure function over rows and what a directory has.
//
// Joined are chunks that came to the pool one behind the other, and chunks that left it for one reason; nothing else is, and
// nothing is moved, so that the runs together report what the rows do:
//
//   all      the same namespace, kind, tiers before and after, cause and priorities; within `payload_max` bytes of keys and ids
//   STORED   each chunk is the parent of the next; as many token ids each, and the same scope (compared by its bytes)
//   REMOVED  whatever their parents
//   UPDATED  a chunk on its own
//
// Token ids are those that the directory has now, without the scope behind them; REQUIRES of `memory` that nothing changes while
// the runs are read. Threads: the control thread only. O(rows + token ids).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "records/change_feed.h"
#include "records/token_ids.h"

namespace kvpool {

class Directory;

// What chunks have met. The numbers are those of events on the wire.
enum class RunKind : uint8_t { STORED = 1, REMOVED = 2, UPDATED = 3 };

struct ChangeRun {
  size_t first;  // of the rows
  size_t end;
  RunKind kind;
  uint8_t tiers_before;
};

struct ChangeRuns {
  std::vector<ChangeRun> runs;
  std::vector<ScopedIds> ids;  // by row, as many for each row of a run; only what arrived has any
};

// REQUIRES: `memory` knows every namespace of the rows, and how many token ids its chunks have.
[[nodiscard]] ChangeRuns cut_runs(std::span<const Change> rows, const Directory& memory, size_t payload_max);

}  // namespace kvpool
