// Room planner: which chunks would be evicted for one more of a size class.
//
// What it is: the choice of victims, for a slot, for the capacity and for a record, decided before anything is evicted; and whether
// some chunk may go at all. What it is not: an eviction (the Directory carries a plan out, whole or not at all), or the order of victims
// (EvictionQueues).
//
// A chunk may go that nobody holds and no hardware reads, and, while what is unsaved is protected, that needs no copy below. Where the
// coldest may not go for that, it is the coldest of the others; but a chunk above the default priority does not go for one that is not.
// Threads: the control thread only. O(victims), and once for a request O(segments).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arena/slot_arena.h"
#include "directory/demotion_order.h"
#include "directory/directory_answers.h"
#include "directory/standings.h"
#include "eviction/eviction_queues.h"
#include "records/chunk_records.h"

namespace kvpool {

// The window a reservation would clear, searched once and used while it is still good.
struct WindowSearch {
  bool searched = false;
  std::optional<SegmentWindow> window;
};

// What is evicted for one chunk. Nothing is unless the state is RESERVED.
struct RoomPlan {
  SaveState state = SaveState::FULL;
  RecordId own{};                       // for its slot, one of its class that nothing follows; or
  std::vector<RecordId> slot_owners{};  // those of a window of other classes, with all that follows them
  std::vector<RecordId> further{};      // in their order
};

class RoomPlanner {
 public:
  // `stats`: the bytes that are used, idle and pinned. REQUIRES: all live as long as this.
  RoomPlanner(ChunkRecords& records, SlotArena& arena, EvictionQueues& queues, Standings& standings, DemotionOrder& demotion,
              const DirectoryStats& stats, uint64_t capacity)
      : records_(records), arena_(arena), queues_(queues), standings_(standings), demotion_(demotion), stats_(stats), capacity_(capacity) {}
  RoomPlanner(const RoomPlanner&) = delete;
  RoomPlanner& operator=(const RoomPlanner&) = delete;

  // While set, what no other tier has does not go: NOT_READY instead.
  void protect_unsaved(bool is_protected) noexcept { protects_unsaved_ = is_protected; }
  [[nodiscard]] bool protects_unsaved() const noexcept { return protects_unsaved_; }

  [[nodiscard]] bool may_evict(RecordId id, uint64_t now_ns) const noexcept;
  // Whether these and all that follows them may be evicted. Those that follow one of them are looked at through it alone: each once.
  [[nodiscard]] bool may_evict_all(std::vector<RecordId> owners, uint64_t now_ns) const;
  // `search` is of this size class. The queues and the tree are as they were afterwards. The plan is good until the next one is made:
  // its memory is used again.
  [[nodiscard]] const RoomPlan& plan_room(ClassId size_class, WindowSearch& search, uint64_t now_ns) noexcept;

 private:
  [[nodiscard]] uint64_t bytes_of(RecordId id) const noexcept { return arena_.size_class(records_[id].size_class).chunk_bytes; }
  [[nodiscard]] SaveState wait_for(RecordId id) noexcept;
  [[nodiscard]] RecordId next_victim(std::optional<ClassId> size_class, uint64_t now_ns) noexcept;
  [[nodiscard]] SaveState plan_slot(ClassId size_class, WindowSearch& search, uint64_t now_ns) noexcept;
  void find_window(ClassId size_class, WindowSearch& search) noexcept;
  [[nodiscard]] SaveState plan_further(uint64_t bytes, uint64_t now_ns) noexcept;

  ChunkRecords& records_;
  SlotArena& arena_;
  EvictionQueues& queues_;
  Standings& standings_;
  DemotionOrder& demotion_;
  const DirectoryStats& stats_;
  const uint64_t capacity_;
  bool protects_unsaved_ = false;
  RoomPlan plan_;
};

}  // namespace kvpool
