// Where the chunks stand that nobody holds: for each size class and priority one queue for each class of the policy.
//
// What it is: the order of victims. What it is not: the judge of what a chunk is worth (EvictionPolicy), or of who may
// stand here (Directory).
//
// The victim is the oldest chunk of a queue of the lowest level that has any, of those the one that is worth least.
// If it has a child it is moved beside that child, on the newer side, into the child's level and queue, and the search
// goes on: a chunk is worth at least what follows it is, and no chunk goes before its children. What follows it in the same
// queue, used at the same time, is moved first, all at once.
//
// Invariants: a level's bit is set where one of its queues is occupied, a queue's where it is not empty; each record here
// names its level and queue; the children of a record here are here.
// Threads: the control thread only. O(1) per operation: a search looks at no more than 20 queues, and moves a chunk at most
// once for each queue between two of its uses.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/chunk_records.h"
#include "kvpool/eviction_policy.h"
#include "kvpool/types.h"

namespace kvpool {

class EvictionQueues {
 public:
  static constexpr uint32_t LEVELS = MAX_PRIORITY + 1;

  // REQUIRES: both live as long as this.
  EvictionQueues(ChunkRecords& records, const EvictionPolicy& policy) : records_(records), policy_(policy) {}
  EvictionQueues(const EvictionQueues&) = delete;
  EvictionQueues& operator=(const EvictionQueues&) = delete;

  void add_class() { classes_.emplace_back(); }

  // The record becomes the newest of its queue, at the level of its priority.
  void add(RecordId id);
  // Puts a record among the others of its queue by its last access, behind those of the same time, but before its parent and
  // behind its child where these are of the same time. Looks at no more than
  // `steps` entries from each end; where that does not do it becomes the newest, with the last access of the newest,
  // or (`or_oldest`) the oldest.
  void add_by_access(RecordId id, uint32_t steps, bool or_oldest);
  void remove(RecordId id) noexcept;

  // Who goes next of a size class: never one with a child. Unset where nobody is here.
  [[nodiscard]] RecordId victim(ClassId size_class, uint64_t now_ns) noexcept;
  // The same of all size classes.
  [[nodiscard]] RecordId victim(uint64_t now_ns) noexcept;

  // Records in about the order in which they go, or (`newest_first`) the newest of each queue first, as long as `visit`
  // answers true and for no more than `limit` records.
  template <typename Visit>
  void visit(ClassId size_class, uint64_t now_ns, uint32_t limit, bool newest_first, Visit visit) const {
    std::vector<RecordId> fronts = fronts_of(size_class, newest_first);
    for (uint32_t step = 0; step < limit && !fronts.empty(); ++step) {
      const size_t next = first_of(fronts, now_ns, newest_first);
      if (!visit(fronts[next])) {
        return;
      }
      fronts[next] = newest_first ? records_[fronts[next]].older : records_[fronts[next]].newer;
      if (!fronts[next].valid()) {
        fronts[next] = fronts.back();
        fronts.pop_back();
      }
    }
  }

  [[nodiscard]] uint64_t listed(ClassId size_class) const noexcept;
  // Recounts everything; one line per broken invariant. Each record found counts in `found`, by its id.
  [[nodiscard]] std::vector<std::string> verify(std::vector<uint8_t>& found) const;

 private:
  struct Level {
    uint32_t occupied = 0;  // a bit for each queue
    std::array<ChunkList, EvictionPolicy::QUEUES> queues{};
  };
  struct SizeClassQueues {
    std::array<uint64_t, 2> occupied{};  // a bit for each level
    std::array<std::unique_ptr<Level>, LEVELS> levels{};
  };

  [[nodiscard]] Level& level_of(const ChunkRecord& record);
  [[nodiscard]] const Level* lowest(ClassId size_class) const noexcept;
  [[nodiscard]] RecordId cheapest(const Level& level, uint64_t now_ns) const noexcept;
  void link(RecordId id, RecordId older);
  void link(Level& level, const ChunkRecord& record, RecordId id, RecordId older) noexcept;
  void move_beside_child(RecordId id);
  [[nodiscard]] bool is_in_order(RecordId id) const noexcept;
  // Whether a chunk stands in the queue that the other names, in order, with the same last use.
  [[nodiscard]] bool stands_alike(RecordId id, const ChunkRecord& other) const noexcept;
  void verify_queue(const ChunkList& list, const ChunkRecord& expected, std::vector<uint8_t>& found,
                    std::vector<std::string>& broken) const;
  [[nodiscard]] std::vector<RecordId> fronts_of(ClassId size_class, bool newest_first) const;
  [[nodiscard]] size_t first_of(const std::vector<RecordId>& fronts, uint64_t now_ns, bool newest_first) const noexcept;

  ChunkRecords& records_;
  const EvictionPolicy& policy_;
  std::vector<SizeClassQueues> classes_;
};

}  // namespace kvpool
