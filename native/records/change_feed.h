// The change feed: which chunks have come to a tier and which have left one, in the order in which it happened.
//
// What it is: a ring between the directories, which add to it, and one reader, which takes from it. What it is not: a log
// for subscribers; nobody can read a change twice, and it knows no times. One feed serves the directories of all tiers, so
// that the changes of one chunk stand in their order.
//
// Invariants:
//   1. O(1) for each change, and nothing is allocated: a full feed forgets its oldest change.
//   2. Dropped changes are reported: `lost` counts them, and the next `take` reports the gap before later changes.
//   3. The descriptor is readable from the first change after a `take` on until the next `take`.
//
// Threads: the control thread only, but for waiting on the descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "base/types.h"

namespace kvpool {

enum class ChangeKind : uint8_t {
  ARRIVED = 0,   // the chunk can be loaded from the tier
  LEFT = 1,      // it cannot any more
  PRIORITY = 2,  // its priority has become another
};

// Why a chunk came or went. The first ones are the numbers of `Eviction`.
enum class Cause : uint8_t {
  OWN_CLASS = 0,
  OTHER_CLASS = 1,
  INDEX_FULL = 2,
  FLUSHED = 3,
  DROPPED = 4,         // it was found bad, or lost
  DISCARDED = 5,       // its only user wanted it no more
  FAILED_LANDING = 6,  // what it follows could not be read from a lower tier
  STORED = 7,          // by an engine's save, or written down from an upper tier
  PROMOTED = 8,        // read back from a lower tier
};

// Nothing is initialised by itself, so that a ring of these is not touched before it is used.
struct Change {
  ChunkKey key;
  ChunkKey parent;  // zeros: the chunk is the first of its prompt
  uint32_t owner;
  uint32_t record;  // in memory, where the chunk had one then: a hint, it may be another's by now
  ChangeKind kind;
  uint8_t level;  // the tier
  uint8_t tiers;  // bits of the tiers that have the chunk after the change
  Cause cause;
  uint8_t priority;
  uint8_t priority_before;
  uint8_t unused[2];
};
static_assert(sizeof(Change) == 80);
static_assert(std::is_trivially_default_constructible_v<Change>);

class ChangeFeed {
 public:
  // Nothing where no descriptor can be had. REQUIRES: capacity > 0.
  [[nodiscard]] static std::shared_ptr<ChangeFeed> create(uint32_t capacity);
  ~ChangeFeed();
  ChangeFeed(const ChangeFeed&) = delete;
  ChangeFeed& operator=(const ChangeFeed&) = delete;

  void add(const Change& change) noexcept;
  // More has changed at once than fits: waiting changes are dropped too.
  void mark_gap() noexcept;

  // Moves up to `limit` changes to `out`, the oldest first; returns how many. `has_gap`: something before them was lost.
  [[nodiscard]] size_t take(Change* out, size_t limit, bool& has_gap) noexcept;

  [[nodiscard]] size_t waiting() const noexcept { return count_; }
  [[nodiscard]] uint64_t lost() const noexcept { return lost_; }
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  ChangeFeed(uint32_t capacity, int fd);
  void signal() noexcept;
  // REQUIRES: less than twice the capacity.
  [[nodiscard]] size_t wrapped(size_t place) const noexcept { return place < capacity_ ? place : place - capacity_; }

  const size_t capacity_;
  const std::unique_ptr<Change[]> ring_;  // memory never written is never touched
  const int fd_;
  size_t first_ = 0;
  size_t count_ = 0;
  uint64_t lost_ = 0;
  bool has_gap_ = false;
  bool is_signalled_ = false;
};

}  // namespace kvpool
