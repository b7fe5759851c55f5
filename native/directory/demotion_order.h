// Demotion order: which chunks of a tier are worth a place in a lower one, and which of them are written there next.
//
// What it is: admission (all chunks, those that are likely to be used again, or none), the memory of what was evicted, each size
// class's share of the writes, and the search for the next chain. What it is not: a pin on what it finds (the Directory), the place of a
// chunk in the queues (Standings), or a budget: the caller admits less when the lower tier cannot take more.
//
// A caller that asks once for each new chunk must not look at the same unsuitable chunks each time. So a search that finds none is not
// repeated before an eighth as many chunks as it looked at have come or gone, or something else has changed its outcome. What follows
// a chunk that was evicted from the lower tier counts as evicted with it: otherwise two chains longer than that tier are written in
// turns without end.
// Threads: the control thread only. A search looks at a bounded number of chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arena/slot_arena.h"
#include "directory/directory_answers.h"
#include "directory/standings.h"
#include "directory/unsaved_order.h"
#include "directory/write_shares.h"
#include "eviction/eviction_policy.h"
#include "eviction/eviction_queues.h"
#include "eviction/ghost_filter.h"
#include "records/chunk_records.h"

namespace kvpool {

// Chunks of one chain that every lower tier lacks, the root first. Where there are none: how many were found that count as evicted
// from the lower tier with others.
struct UnsavedChain {
  std::vector<RecordId> records;
  size_t evicted_below = 0;
};

class DemotionOrder {
 public:
  // REQUIRES: all live as long as this.
  DemotionOrder(ChunkRecords& records, const SlotArena& arena, EvictionQueues& queues, const EvictionPolicy& policy,
                Standings& standings, uint64_t capacity);
  DemotionOrder(const DemotionOrder&) = delete;
  DemotionOrder& operator=(const DemotionOrder&) = delete;

  void add_class() { shares_.add_class(); }
  void forget_class(ClassId size_class) noexcept { shares_.forget(size_class); }  // it becomes another one

  // From now on these chunks are written to lower tiers, with what precedes them. `least_chance`: what LIKELY means.
  void admit(Admitted admitted, double least_chance = 0) noexcept;
  [[nodiscard]] bool knows_chances() const noexcept { return policy_.knows_chances(); }  // of a further use
  // Remembers chunks that are evicted: one that comes again counts as touched before. REQUIRES: chunks > 0, called once.
  void remember_evicted(uint32_t chunks);
  // What was written to a lower tier and evicted there is written again only when used. Forgets that of `looks` records from the
  // cursor (0 = start) on: returns where to go on, 0 at the end.
  [[nodiscard]] uint32_t forget_written(uint32_t cursor, uint32_t looks) noexcept;

  [[nodiscard]] bool wants_place_below(const ChunkRecord& record, uint64_t now_ns) const noexcept {
    return standings_.of(record) != Standing::SAVED && is_admitted(record, now_ns);
  }
  // The first chain in this order that ends in one of the first `scan` chunks (unsaved_order.h).
  [[nodiscard]] UnsavedChain next_chain(uint32_t scan, WriteOrder order, uint64_t now_ns);
  // A chunk and those before it that every lower tier lacks. None where one of them is read for a copy already: what follows it comes
  // when that has ended. Looks at no more than `steps` chunks, and takes them off.
  [[nodiscard]] std::vector<RecordId> unsaved_chain(RecordId leaf, uint32_t& steps) const;
  // A search may find what it did not find before.
  void search_anew() noexcept { empty_search_.was_empty = false; }

  // A chunk is in a lower tier; one had to go, or is waited for, that is not.
  void note_written(const ChunkRecord& record) noexcept { shares_.note_written(record.size_class, bytes_of(record)); }
  void note_lost(const ChunkRecord& record) noexcept { shares_.note_lost(record.size_class, bytes_of(record)); }
  // A chunk leaves for good, though there is a lower tier: why it has no place there.
  [[nodiscard]] Declined note_declined(const ChunkRecord& record, uint64_t now_ns) noexcept;
  void remember(const ChunkKey& key) noexcept;
  [[nodiscard]] bool remembers(const ChunkKey& key) const noexcept { return ghosts_ && ghosts_->contains(key); }

 private:
  // A search that found no chunk, and would find none now: few chunks have come or gone since.
  struct EmptySearch {
    bool was_empty = false;
    WriteOrder order = WriteOrder::COLDEST;
    uint64_t changes_until = 0;  // of the queues' `unsaved_changes`, until another one is worth its time
  };

  [[nodiscard]] uint64_t bytes_of(const ChunkRecord& record) const noexcept { return arena_.size_class(record.size_class).chunk_bytes; }
  [[nodiscard]] bool is_admitted(const ChunkRecord& record, uint64_t now_ns) const noexcept;
  [[nodiscard]] RecordId newest_of_chain(RecordId id, uint32_t& steps, uint64_t now_ns) const noexcept;

  ChunkRecords& records_;
  const SlotArena& arena_;
  EvictionQueues& queues_;
  const EvictionPolicy& policy_;
  Standings& standings_;
  Admitted admitted_ = Admitted::ALL;
  double least_chance_ = 0;
  std::optional<GhostFilter> ghosts_;
  WriteShares shares_;
  UnsavedOrder unsaved_order_;
  EmptySearch empty_search_;
};

}  // namespace kvpool
