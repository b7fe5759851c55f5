// Unsaved order: which of the chunks that no other tier has is written to a lower tier next, over all size classes.
//
// What it is: a walk along the lists of unsaved chunks (EvictionQueues), from where they begin, without a look at those behind.
// What it is not: the admission of a chunk to a lower tier (Directory), or a list of its own.
//
// The coldest first: the lowest level, there the class that has lost the largest part of its chunks for want of a write
// (WriteShares), and of that class, or of all that have lost as much, what is worth least: as victims are chosen. A use saves about
// what the chunk's bytes took to compute, so worth needs no weight by size.
//
// The newest first: of the class that has lost the largest part, by last use alone. A class and a level know a time that none of
// their unsaved chunks was used after. The walk takes the class, the level and the list with the latest such time, and corrects
// a time that is too late, so that levels and classes without new chunks cost nothing.
//
// The worthiest first, for a stop that may have too little time: the highest level first, there by last use alone.
//
// Threads: the control thread only. A walk of the coldest or worthiest first begins with one look at each queue of a level, one of the newest
// first with one at the classes, one class's levels and one level's queues; a step costs O(queues of one class + log classes).
// REQUIRES: the queues do not change during a walk.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/eviction_queues.h"
#include "directory/write_shares.h"

namespace kvpool {

enum class WriteOrder : uint8_t { COLDEST = 0, NEWEST = 1, WORTHIEST = 2 };

class UnsavedOrder {
 public:
  // REQUIRES: both live as long as this.
  UnsavedOrder(EvictionQueues& queues, const WriteShares& shares) : queues_(queues), shares_(shares) {}
  UnsavedOrder(const UnsavedOrder&) = delete;
  UnsavedOrder& operator=(const UnsavedOrder&) = delete;

  // Begins a walk.
  void start(uint64_t now_ns, WriteOrder order);
  // The next chunk of the walk; unset behind the last one.
  [[nodiscard]] RecordId next();

 private:
  // The first of the chunks left of a list.
  struct Head {
    RecordId id;
    double worth;
    uint64_t access_ns;
  };
  // The coldest first: what a class has left of the level, and the first of it.
  struct ClassHeads {
    double lost_part;
    Head first;
    std::vector<Head> heads;
  };
  // The newest or worthiest first: a chunk, or a class or a level whose chunks were used no later.
  struct Front {
    double lost_part;  // of its class; the worthiest first: its level
    uint64_t access_ns;
    RecordId id;          // unset: a class or a level
    uint32_t size_class;
    uint32_t level = EvictionQueues::LEVELS;  // of a level
    bool operator<(const Front& other) const noexcept {
      return lost_part != other.lost_part ? lost_part < other.lost_part : access_ns < other.access_ns;
    }
  };

  [[nodiscard]] RecordId next_coldest();
  void gather_next_level();
  [[nodiscard]] Head head_of(RecordId id) const noexcept;
  static void choose_first(ClassHeads& of_class) noexcept;
  [[nodiscard]] static bool comes_after(const ClassHeads& one, const ClassHeads& other) noexcept;

  [[nodiscard]] RecordId next_newest();
  void push(uint32_t size_class, uint64_t access_ns, RecordId id, uint32_t level = EvictionQueues::LEVELS);
  void push_levels(uint32_t size_class);
  void push_lists(uint32_t size_class, uint32_t level);

  EvictionQueues& queues_;
  const WriteShares& shares_;
  uint64_t now_ns_ = 0;
  WriteOrder order_ = WriteOrder::COLDEST;
  uint32_t next_level_ = EvictionQueues::LEVELS;  // levels below this are done
  std::vector<ClassHeads> classes_;               // a heap
  std::vector<Front> fronts_;                     // a heap
};

}  // namespace kvpool
