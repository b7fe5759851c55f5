// With what priority a chunk is retained, and the result of a retention request. Plain values; any thread.
#pragma once

#include <cstdint>

#include "records/chunk_records.h"

namespace kvpool {

// Result of a retention request for one chunk.
enum class RetainState : uint8_t {
  ACCEPTED = 0,
  CLIPPED = 1,  // retained at the default priority: the share above it is used up
  ABSENT = 2,   // the chunk is not here
};

// Priority and duration of a chunk: a priority of 0 to 100, and for how long after its last use; 0: for good.
struct Retention {
  uint8_t priority = DEFAULT_PRIORITY;
  uint32_t duration_ms = 0;
  friend bool operator==(const Retention&, const Retention&) noexcept = default;
};

}  // namespace kvpool
