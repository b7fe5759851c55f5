// Where the chunks stand that nobody holds: for each size class and priority one queue for each class of the policy.
//
// What it is: the order of victims. What it is not: the judge of what a chunk is worth (EvictionPolicy), or of who may
// stand here (Directory).
//
// A queue is up to three lists of one order, by last use: chunks that need no copy below, chunks that no other tier has, and
// those of the latter that are just being written down (Standing). So the oldest of each is found at once, and a chunk that
// is written down keeps its place in the order. A chunk with a pin stays where it is and is passed over.
//
// The victim is the oldest chunk of a queue of the lowest level that has any, of those the one that is worth least.
// If it has a child it is moved beside that child, on the newer side, into the child's level and queue, and the search
// goes on: a chunk is worth at least what follows it is, and no chunk goes before its children. What follows it in the same
// queue, used at the same time, is moved first, all at once. A chunk whose child cannot go either, was used later or is in another
// list is set aside: it stands in no list until its last child has left.
//
// Invariants: a level's bit is set where one of its lists is occupied, a list's where it is not empty; each record here
// names its level, queue and standing; a record that is set aside is in no list and has a child.
// Threads: the control thread only. O(1) per operation: a search looks at no more than 20 queues and passes over what checks
// have pinned, and moves a chunk at most once for each queue between two of its uses. To put a chunk among others by its last
// use takes a bounded number of steps.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "records/chunk_records.h"
#include "eviction/eviction_policy.h"
#include "base/types.h"

namespace kvpool {

// Among which chunks a victim is searched: all, or those alone that need no copy below.
enum class Among : uint8_t { ALL, SAVED };

class EvictionQueues {
 public:
  static constexpr uint32_t LEVELS = MAX_PRIORITY + 1;

  // REQUIRES: both live as long as this.
  EvictionQueues(ChunkRecords& records, const EvictionPolicy& policy) : records_(records), policy_(policy) {}
  EvictionQueues(const EvictionQueues&) = delete;
  EvictionQueues& operator=(const EvictionQueues&) = delete;

  void add_class() { classes_.emplace_back(); }

  // The record becomes the newest of the list that its queue and standing name, at the level of its priority.
  void add(RecordId id) { add_all({&id, 1}); }
  // The same of several, from the last one to the first: a chain from its leaf on. Those that come to one list are linked there
  // together. REQUIRES: of one size class.
  void add_all(std::span<const RecordId> ids);
  // The same, but the oldest.
  void add_oldest(RecordId id);
  // Puts a record among the others of that list by its last access, behind those of the same time, but before its parent and
  // behind its child where these are of the same time. Looks at no more than `steps` entries from each end; where that does
  // not do it becomes the oldest (`or_oldest`), or goes as near to its place as some more steps come from where the one before
  // was put: chunks that are written down one after the other are about as old.
  void add_by_access(RecordId id, uint32_t steps, bool or_oldest);
  void remove(RecordId id) noexcept { remove_all({&id, 1}); }
  // The same of several. Those that stand side by side, each one older than the one before, leave their list together: a chain that
  // was added by `add_all`.
  void remove_all(std::span<const RecordId> ids) noexcept;
  // The same for a while: `put_back` has a record stand where it stood, if what was taken out later is back already. Where the one
  // it stood behind is elsewhere now it becomes the oldest.
  struct Place {
    RecordId older;
    bool is_aside;
  };
  [[nodiscard]] Place take_out(RecordId id) noexcept;
  void put_back(RecordId id, Place place) noexcept;

  // Who goes next of a size class: never one with a child or a pin. Unset where nobody may.
  [[nodiscard]] RecordId victim(ClassId size_class, uint64_t now_ns, Among among = Among::ALL) noexcept;
  // The same of all size classes.
  [[nodiscard]] RecordId victim(uint64_t now_ns, Among among = Among::ALL) noexcept;

  // How often a chunk has come to a list of unsaved ones or left one. UnsavedOrder walks along these lists.
  [[nodiscard]] uint64_t unsaved_changes() const noexcept { return unsaved_changes_; }

  // How many stand so, in all queues of a size class.
  [[nodiscard]] uint64_t count(ClassId size_class, Standing standing) const noexcept {
    return classes_[size_class.value()].counts[static_cast<size_t>(standing)];
  }

  // Recounts everything; one line per broken invariant. Each record found counts in `found`, by its id.
  [[nodiscard]] std::vector<std::string> verify(std::vector<uint8_t>& found) const;

 private:
  friend class UnsavedOrder;

  struct Level {
    std::array<uint32_t, STANDINGS> occupied{};  // a bit for each queue
    uint64_t newest_unsaved_ns = 0;              // no unsaved chunk here was used after that
    std::array<std::array<ChunkList, STANDINGS>, EvictionPolicy::QUEUES> queues{};
  };
  struct SizeClassQueues {
    std::array<std::array<uint64_t, 2>, STANDINGS> occupied{};  // a bit for each level
    uint64_t newest_unsaved_ns = 0;                             // likewise
    std::array<uint64_t, STANDINGS> counts{};                   // of records
    std::array<std::unique_ptr<Level>, LEVELS> levels{};
  };

  [[nodiscard]] Level& level_of(const ChunkRecord& record);
  [[nodiscard]] ChunkList& list_of(Level& level, const ChunkRecord& record) const noexcept;
  [[nodiscard]] uint32_t next_level(ClassId size_class, Among among, uint32_t first) const noexcept;
  [[nodiscard]] RecordId oldest_of(const Level& level, uint32_t queue, Among among) const noexcept;
  [[nodiscard]] RecordId cheapest(const Level& level, uint64_t now_ns, Among among) const noexcept;
  [[nodiscard]] std::optional<RecordId> place_from_ends(const ChunkList& list, RecordId id, uint32_t steps) const noexcept;
  [[nodiscard]] RecordId place_from_hand(const ChunkList& list, const ChunkRecord& record) const noexcept;
  void link(Level& level, RecordId id, RecordId older) noexcept { link_run(level, {&id, 1}, older); }
  void link_run(Level& level, std::span<const RecordId> run, RecordId older) noexcept;
  void unlink_run(std::span<const RecordId> run) noexcept;
  void move_beside_child(RecordId id);
  [[nodiscard]] bool can_stand_beside(RecordId id, RecordId child) const noexcept;
  [[nodiscard]] bool is_in_order(RecordId id) const noexcept;
  // Whether a chunk goes before another one, maybe of another size class.
  [[nodiscard]] bool is_colder(const ChunkRecord& record, const ChunkRecord& other, uint64_t now_ns) const noexcept;
  // Whether a chunk stands in the list that the other names, in order, with the same last use.
  [[nodiscard]] bool has_same_position(RecordId id, const ChunkRecord& other) const noexcept;
  [[nodiscard]] bool stands(RecordId id) const noexcept;
  [[nodiscard]] bool names_list_of(RecordId id, const ChunkRecord& other) const noexcept;
  void verify_level(const SizeClassQueues& queues, const ChunkRecord& expected, std::vector<uint8_t>& found,
                    std::vector<std::string>& broken) const;
  void verify_list(const ChunkList& list, const ChunkRecord& expected, std::vector<uint8_t>& found,
                   std::vector<std::string>& broken) const;

  ChunkRecords& records_;
  const EvictionPolicy& policy_;
  std::vector<SizeClassQueues> classes_;
  uint64_t unsaved_changes_ = 0;
};

}  // namespace kvpool
