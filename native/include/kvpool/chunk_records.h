// Records of chunks, the tree their prefix chains form, and one recency list per size class.
//
// What it is: memory and links. What it is not: a decision; the Directory says who is held, listed or removed.
// Records are sized at start and reused; a RecordId is therefore only good while its record lives.
// Invariants: a record is on the free list or alive; children of a record form a list whose members name it as
// parent; a class's recency list runs from the oldest to the newest access.
// Threads: the control thread only. Every operation is O(1).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvpool/types.h"

namespace kvpool {

//   FREE --reserve--> WRITING --commit--> READY --evict, flush, drop--> FREE
//                        |                  |
//                        +--expire, drop----+--drop while held--> ZOMBIE --last hold ends--> FREE
//                        +--abort--> FREE
//   FREE --promote--> PROMOTING --landed--> READY
//                        +--failed, drop (it is held)--> ZOMBIE
enum class ChunkState : uint8_t { FREE, WRITING, READY, ZOMBIE, PROMOTING };

struct ChunkRecord {
  ChunkKey key{};
  uint64_t generation = 0;
  uint64_t last_access_ns = 0;
  RecordId parent;
  RecordId first_child;
  RecordId next_sibling;
  RecordId previous_sibling;
  RecordId older;  // recency list; `newer` also links the free list
  RecordId newer;
  PageIndex page;
  NamespaceId owner;
  ClassId size_class;
  uint32_t holds = 0;
  uint32_t stored_tick = 0;  // when it became READY; see stored_tick_of
  ChunkState state = ChunkState::FREE;
  uint8_t touches = 0;  // times stored or acquired, at most 255; 2 at once for a chunk that was evicted not long ago
};
static_assert(sizeof(ChunkRecord) == 96);

// Times of storing in 32 bits: ticks of 67 ms, of which differences are taken modulo 9 years.
inline constexpr unsigned STORED_TICK_SHIFT = 26;
[[nodiscard]] constexpr uint32_t stored_tick_of(uint64_t now_ns) noexcept {
  return static_cast<uint32_t>(now_ns >> STORED_TICK_SHIFT);
}
[[nodiscard]] constexpr uint64_t age_ns(const ChunkRecord& record, uint64_t now_ns) noexcept {
  return uint64_t{stored_tick_of(now_ns) - record.stored_tick} << STORED_TICK_SHIFT;
}

class ChunkRecords {
 public:
  explicit ChunkRecords(uint32_t capacity);
  ChunkRecords(const ChunkRecords&) = delete;
  ChunkRecords& operator=(const ChunkRecords&) = delete;

  [[nodiscard]] ChunkRecord& operator[](RecordId id) noexcept { return records_[id.value()]; }
  [[nodiscard]] const ChunkRecord& operator[](RecordId id) const noexcept { return records_[id.value()]; }
  void prefetch(RecordId id) const noexcept;

  [[nodiscard]] bool is_full() const noexcept { return alive_ == capacity_; }
  [[nodiscard]] uint32_t alive() const noexcept { return alive_; }
  // Ids below this may be alive.
  [[nodiscard]] uint32_t end() const noexcept { return static_cast<uint32_t>(records_.size()); }

  // A blank record. REQUIRES: not is_full().
  [[nodiscard]] RecordId allocate() noexcept;
  // REQUIRES: no parent, no children, in no list.
  void release(RecordId id) noexcept;

  // REQUIRES: child has no parent.
  void attach_child(RecordId parent, RecordId child) noexcept;
  // Takes a record out of its parent's children; nothing where it has no parent.
  void detach(RecordId child) noexcept;

  void add_class();
  void push_newest(RecordId id) noexcept;
  // Puts a record among the others by its last access, behind those of the same time. Looks at no more than `steps`
  // entries from each end; where that does not do it becomes the newest, and its last access that of the newest.
  void insert_by_access(RecordId id, uint32_t steps) noexcept;
  void unlink(RecordId id) noexcept;
  [[nodiscard]] RecordId oldest(ClassId size_class) const noexcept { return lists_[size_class.value()].oldest; }
  [[nodiscard]] RecordId newest(ClassId size_class) const noexcept { return lists_[size_class.value()].newest; }
  [[nodiscard]] uint64_t listed(ClassId size_class) const noexcept { return lists_[size_class.value()].length; }

 private:
  void link_behind(RecordId id, RecordId older) noexcept;

  struct RecencyList {
    RecordId oldest;
    RecordId newest;
    uint64_t length = 0;
  };

  const uint32_t capacity_;
  uint32_t alive_ = 0;
  std::vector<ChunkRecord> records_;  // reserved whole, grown on demand: memory never used is never touched
  RecordId first_free_;
  std::vector<RecencyList> lists_;
};

}  // namespace kvpool
