// Standings: where each chunk that nobody holds stands in the queues of eviction, as its last use and its copies below say.
//
// What it is: the list of its queue that a chunk belongs to (Standing), its way back into a queue by last use, and the bytes that
// have been written below. What it is not: the queues (EvictionQueues), or the judge of who is written below next (DemotionOrder).
//
// Invariants (recounted by the Directory's `verify`): a chunk that is listed and has no pin stands as `of` says; `was_below` of a
// record says whether it was written to a lower tier since its last use, and the bytes of these chunks are counted.
// Threads: the control thread only. O(1), but for a bounded number of steps along a list.
#pragma once

#include <cstdint>

#include "arena/slot_arena.h"
#include "eviction/eviction_queues.h"
#include "records/chunk_records.h"

namespace kvpool {

class Standings {
 public:
  // Entries looked at from each end of a list for the place of a chunk: guesses that bound the control thread's time at a few
  // microseconds. Of one that has got or lost a copy below; of one that has lost its last child, which was the oldest; of one with
  // another priority.
  static constexpr uint32_t SETTLE_STEPS = 256;
  static constexpr uint32_t CHILDLESS_STEPS = 64;
  static constexpr uint32_t POSITION_STEPS = 64;

  // REQUIRES: all live as long as this.
  Standings(ChunkRecords& records, const SlotArena& arena, EvictionQueues& queues) : records_(records), arena_(arena), queues_(queues) {}
  Standings(const Standings&) = delete;
  Standings& operator=(const Standings&) = delete;

  // Whether there is a lower tier. REQUIRES, where there is one: no chunk is here yet.
  void set_has_lower(bool has_lower) noexcept { has_lower_ = has_lower; }
  [[nodiscard]] Standing of(const ChunkRecord& record) const noexcept {
    if (!has_lower_ || !arena_.size_class(record.size_class).has_place_below || record.is_below || record.was_below) {
      return Standing::SAVED;
    }
    return record.pins > 0 ? Standing::BEING_SAVED : Standing::UNSAVED;
  }
  // Notes whether a chunk has been written to a lower tier since its last use.
  void set_written(ChunkRecord& record, bool is_written) noexcept {
    if (record.was_below != is_written) {
      record.was_below = is_written;
      const uint64_t bytes = arena_.size_class(record.size_class).chunk_bytes;
      written_bytes_ += is_written ? bytes : uint64_t{0} - bytes;
    }
  }

  // Puts a chunk that is in no list into the one where it belongs, by its last use: see EvictionQueues::add_by_access.
  void add_by_access(RecordId id, uint32_t steps, bool or_oldest) noexcept;
  // Moves an idle chunk that has got or lost a copy in a lower tier to the list where it belongs now. One with a pin moves when the
  // pin ends.
  void settle_chunk(RecordId id) noexcept;
  // An unsaved chunk that is read for a copy moves to the list of those, so that others are found first.
  void begin_saving(RecordId id) noexcept;
  // Moves an idle chunk to the queue of its own priority; one that is too old for a place there becomes the first.
  void requeue(RecordId id) noexcept;
  // A chunk that was moved beside its child, or set aside for it, goes back to its own place when its last child has left. It was used
  // no earlier than its child. `parent` may be unset.
  void requeue_childless(RecordId parent, uint64_t child_access_ns) noexcept;
  // An idle chunk is as new as one that comes just now. What precedes it follows when it is renewed too.
  void renew(RecordId id, uint64_t now_ns) noexcept;

  // Of these bytes in use those that were not written below since their use, and just are not.
  [[nodiscard]] uint64_t unsaved_bytes(uint64_t used_bytes) const noexcept;
  [[nodiscard]] uint64_t written_bytes() const noexcept { return written_bytes_; }

 private:
  ChunkRecords& records_;
  const SlotArena& arena_;
  EvictionQueues& queues_;
  bool has_lower_ = false;
  uint64_t written_bytes_ = 0;  // of chunks with was_below
};

}  // namespace kvpool
