// Retention ledger: the priority and duration of each chunk of one tier, and how much of the capacity is retained.
//
// What it is: priorities, durations and their timers, the counts of what is retained, and the cap on it. What it is not: the order
// of eviction (the caller moves a chunk to the queue of its priority), a clock (`now_ns` is an argument), or the judge of several
// tiers (the caller knows when a chunk that an upper tier retains expires).
//
// A chunk is retained while its own priority, or that of a chunk that follows it, is above the default: what precedes a retained
// chunk is retained too, and counts too.
//
// Invariants (recounted by `verify`):
//   1. `retained_children` of a record counts its children that are retained.
//   2. `chunks` and `bytes` count the retained chunks; the arena has a mark on the slot of each.
//   3. A request raises `bytes` up to the cap and no further, but for what precedes a chunk that was retained before it came. One
//      that would is clipped: the chunk gets the default.
//   4. A record has a timer while it has a duration, and then only; a chunk of the default priority has none.
//   5. A priority is 0 to 100.
// Threads: the control thread only. O(1) for a chunk, and for each ancestor that is retained with it or no more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arena/slot_arena.h"
#include "records/chunk_records.h"
#include "retention/retention.h"
#include "retention/retention_timers.h"

namespace kvpool {

// From when a duration counts: the last use of the chunk, or the moment when it was retained. In a lower tier a chunk is used
// when it is read back, not when it is written: the caller notes that in the record.
enum class DurationStart : uint8_t { LAST_USE, RETENTION };

struct RetentionCounts {
  uint64_t chunks = 0;  // retained
  uint64_t bytes = 0;
  uint64_t clipped = 0;  // requests, since the start
  uint64_t expired = 0;  // chunks, since the start
};

class RetentionLedger {
 public:
  // REQUIRES: both live as long as this.
  RetentionLedger(ChunkRecords& records, SlotArena& arena, uint64_t capacity)
      : records_(records), arena_(arena), timers_(records), capacity_(capacity) {}
  RetentionLedger(const RetentionLedger&) = delete;
  RetentionLedger& operator=(const RetentionLedger&) = delete;

  // At most this share of the capacity is retained. What is retained already stays.
  void cap(double share) noexcept;
  // The next calls of `set` belong to one request: together they look at STEPS_PER_REQUEST ancestors at most.
  void begin_request() noexcept { steps_left_ = STEPS_PER_REQUEST; }

  // Sets the priority and duration of a chunk, as far as the cap has room, and stops its timer: `start_timer` is the caller's.
  // REQUIRES: a priority of up to 100; the chunk has a slot.
  [[nodiscard]] RetainState set(RecordId id, Retention request, uint64_t now_ns) noexcept;
  // The chunk leaves the tier. REQUIRES: none of its children is retained.
  void forget(RecordId id) noexcept;
  // How many ancestors of its chunk the last `set` or `forget` ended to retain, the nearest ones: their place in the queues is the
  // caller's.
  [[nodiscard]] uint32_t released() const noexcept { return released_; }
  // A duration counts from this time on.
  void restart(RecordId id, uint64_t since_ns) noexcept;

  [[nodiscard]] Retention of(RecordId id) const noexcept { return {records_[id].priority, records_[id].duration_ms}; }
  // From when the duration of a chunk counts, and when it ends, as far as this tier knows.
  [[nodiscard]] uint64_t since(const ChunkRecord& record, DurationStart start, uint64_t now_ns) const noexcept;
  [[nodiscard]] uint64_t expiry(const ChunkRecord& record, DurationStart start, uint64_t now_ns) const noexcept;
  // Nothing for a chunk without a duration. REQUIRES: it has no timer.
  void start_timer(RecordId id, uint64_t due_ns, uint64_t now_ns) noexcept {
    if (records_[id].duration_ms != 0) {
      timers_.set(id, due_ns, now_ns);
    }
  }
  // A chunk of which the timer has ended; unset where there is none. It was maybe used since: compare its expiry.
  [[nodiscard]] RecordId take_due(uint64_t now_ns) noexcept { return timers_.take_due(now_ns); }
  // When to call `take_due` next; nothing while no timer runs.
  [[nodiscard]] std::optional<uint64_t> next_ns() const noexcept { return timers_.next_ns(); }

  // A priority has expired; where somebody is to hear of it, its key is put on the list.
  void note_expired(RecordId id, bool is_listed);
  // The keys on that list, in their order; it is empty afterwards. The caller bounds it: nothing here does.
  [[nodiscard]] std::vector<ChunkKey> take_expired() noexcept;

  [[nodiscard]] const RetentionCounts& counts() const noexcept { return counts_; }
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  // Far more than the chunks of a request have where each ancestor is looked at once.
  static constexpr uint32_t STEPS_PER_REQUEST = 1U << 17;

  [[nodiscard]] uint64_t bytes_of(RecordId id) const noexcept { return arena_.size_class(records_[id].size_class).chunk_bytes; }
  [[nodiscard]] bool has_room(RecordId id) noexcept;
  void count(RecordId id) noexcept;
  void uncount(RecordId top) noexcept;

  ChunkRecords& records_;
  SlotArena& arena_;
  RetentionTimers timers_;
  const uint64_t capacity_;
  uint64_t bytes_max_ = 0;
  uint32_t steps_left_ = STEPS_PER_REQUEST;
  RetentionCounts counts_;
  uint32_t released_ = 0;
  std::vector<ChunkKey> expired_;
};

}  // namespace kvpool
