// The directory: which chunks are stored, for whom, where, who holds them, and which of them go first.
//
// What it is: one tier's truth. It joins the shared table, the slot arena and the records. What it is not: a
// mover of bytes, a clock (`now_ns` is an argument), or a keeper of deadlines (leases and reservations' times
// belong to the caller).
//
// A chunk's life is drawn in chunk_records.h. Its bytes may be read while its generation word in the index is its
// generation; the word is cleared before the slot can be given to anybody else.
//
// Invariants (recounted by `verify`):
//   1. Who holds a chunk holds its ancestors: holds(parent) >= holds(child), and the parent of a READY chunk is READY.
//   2. The eviction queues hold exactly the READY chunks that nobody holds; these and only these are idle in the arena.
//   3. A victim has no children: one that has is moved beside a child first (eviction_queues.h), so no chunk is ever
//      stored without its parent. Holds end from the leaf to the root, so a parent was used no earlier than what
//      follows it, and under LRU the oldest is a leaf without a move.
//   4. A chunk and its parent have the same namespace and size class.
//   5. used_bytes, the payload of all allocated slots, is at most the capacity.
//   6. Generations are positive and never repeat.
//   7. Chunks kept above the default priority, and all that precedes them, have no more than the retained share of
//      the bytes, but for what precedes a chunk that was kept before it came.
//   8. What stands in a tier stands there from the root on: each tier's chunks are whole prefixes.
//
// Two tiers are two directories. The faster one owns the table that clients read; `attach_slower` makes the slower one tell
// it what it holds, so that an entry of the shared table says all tiers of a key. A chunk that leaves the faster tier
// keeps its entry while the slower one has it; one that returns is `promote`d into a slot and read layer by layer.
//
// Threads: the control thread only. O(1) per chunk, but for lending memory to a class: O(segments).
// Unknown hold ids and unknown namespaces are answers, not errors; broken invariants end the process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvpool/change_feed.h"
#include "kvpool/chunk_records.h"
#include "kvpool/chunk_table.h"
#include "kvpool/directory_answers.h"
#include "kvpool/directory_geometry.h"
#include "kvpool/eviction_policy.h"
#include "kvpool/eviction_queues.h"
#include "kvpool/ghost_filter.h"
#include "kvpool/memory.h"
#include "kvpool/retention.h"
#include "kvpool/retention_timers.h"
#include "kvpool/slot_arena.h"
#include "kvpool/token_ids.h"
#include "kvpool/types.h"

namespace kvpool {

class Directory {
 public:
  // `arena` may be absent: then the slots are somewhere else, and only their places are kept here.
  // REQUIRES: regions writable, index zeroed, sizes as the geometry says.
  Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index,
            const DirectoryGeometry& geometry, const uint8_t epoch[16], Tier tier = Tier::DRAM,
            PolicyKind policy = PolicyKind::LRU);
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // The slower tier's directory from now on tells this one what it holds. REQUIRES: both empty; `slower` lives as long.
  void attach_slower(Directory& slower) noexcept;

  // At most this share of the capacity is kept above the default priority. What is kept already stays.
  void cap_retained(double share) noexcept;

  // The class of chunks of this geometry, made where it is new; nothing where such a chunk cannot fit.
  [[nodiscard]] std::optional<ClassId> add_class(uint64_t chunk_bytes, uint32_t layers);
  [[nodiscard]] NamespaceId add_namespace();
  void mark_segment_ready(uint32_t segment) noexcept { arena_.mark_ready(segment); }

  // Holds the longest stored prefix; id 0 where that is empty. `keys` are n packed keys from the root on.
  // `now_ns` here and in commit serves the statistics alone; 0 stands for the latest time seen.
  [[nodiscard]] Hold acquire(NamespaceId owner, const uint8_t* keys, size_t n, uint64_t now_ns = 0);
  // The same for several ranks at once: keys of all ranks one after the other, n each, every hold cut to the
  // shortest prefix. Nothing is held where that is empty.
  [[nodiscard]] std::vector<Hold> acquire_ranks(const std::vector<NamespaceId>& owners, const uint8_t* keys, size_t n,
                                                uint64_t now_ns = 0);
  // The same by the last key of each rank alone, which names its whole prefix: nothing is held unless all of it is
  // stored and has `n` chunks on every rank. `leaves`: one packed key for each rank.
  [[nodiscard]] std::vector<Hold> acquire_leaves(const std::vector<NamespaceId>& owners, const uint8_t* leaves,
                                                 size_t n, uint64_t now_ns = 0);
  [[nodiscard]] std::optional<Hold> duplicate(HoldId hold);
  [[nodiscard]] std::optional<Columns> columns(HoldId hold) const;
  // The chunk at a position of a hold, and its key; nothing where there is none.
  [[nodiscard]] std::optional<RecordId> record_of(HoldId hold, size_t position) const;
  [[nodiscard]] std::optional<ChunkKey> key_of(HoldId hold, size_t position) const;
  // The keys of a hold that are in the sample, the nearest to the root first, and how many chunks the hold has.
  [[nodiscard]] std::vector<ChunkKey> sampled_keys(HoldId hold, size_t& chunks) const;
  // Ends a hold; its chunks become the newest. Returns false where the hold is unknown.
  bool release(HoldId hold, uint64_t now_ns);

  // Makes room and places for the chunks that follow `parent` (absent: they start at the root). The reservation
  // holds the ancestors, the present chunks and its own. Evicts exactly what is missing, or nothing for a chunk
  // that cannot be placed.
  [[nodiscard]] Reservation reserve(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                                    const uint8_t* keys, size_t n, uint64_t now_ns);
  // Makes chunks first .. first+count readable, counted from the first RESERVED one, parents before children.
  // `checksums`: [count][layers]; `tokens`, where they are kept: [count][n / count]. Committing twice is STORED twice.
  [[nodiscard]] std::vector<uint8_t> commit(HoldId reservation, size_t first, size_t count, const uint32_t* checksums,
                                            uint64_t now_ns = 0, std::span<const int32_t> tokens = {});
  // Layers of the reservation's size class; nothing where it is unknown.
  [[nodiscard]] std::optional<uint32_t> reservation_layers(HoldId reservation) const;
  // Frees what was not committed and drops the hold: the writer has stopped. False where it is unknown.
  bool end_reservation(HoldId reservation, uint64_t now_ns);
  // Takes what was not committed out of sight but keeps its slots until end_reservation: the writer may still write.
  bool expire_reservation(HoldId reservation, uint64_t now_ns);

  // Slots for chunks that the slower tier holds and that follow what `hold` holds, to be read into; like `reserve`, but
  // anybody may acquire them at once, and read each layer when it has landed. The answer's id is a hold, ended by release.
  // `landed` makes one an ordinary chunk. `fail_landing` takes it and what follows it out, for good.
  [[nodiscard]] Reservation promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                                    const uint8_t* keys, size_t n, uint64_t now_ns);
  // `tokens`: the chunk's token ids, where the slower tier has them.
  bool landed(const ChunkKey& key, uint64_t generation, std::span<const int32_t> tokens = {});
  uint64_t fail_landing(const ChunkKey& key, uint64_t generation);

  // directory_retention.cpp. Keeps chunks with these from now on, stored ones and those being written, here and in the slower
  // tier: one wish for each key, ancestors first. A RetainState each. REQUIRES: priorities up to 100.
  [[nodiscard]] std::vector<uint8_t> retain(NamespaceId owner, const uint8_t* keys, const std::vector<Retention>& wishes,
                                            uint64_t now_ns);
  // What a chunk is kept with; nothing where it is not here.
  [[nodiscard]] std::optional<Retention> retention(const ChunkKey& key) const noexcept;
  // The same of the chunks of a hold; nothing where it is unknown.
  [[nodiscard]] std::optional<std::vector<Retention>> retentions(HoldId hold) const;
  // Has priorities that have lasted their time fall back, a bounded number of them. `reserve`, `promote` and `retain` do too.
  // A chunk that is kept alike in both tiers is kept in both until its time after its last use in either is over.
  void expire_retention(uint64_t now_ns);
  // When `expire_retention` is to be called next; nothing while no priority can lapse.
  [[nodiscard]] std::optional<uint64_t> next_lapse_ns() const noexcept { return timers_.next_ns(); }
  // The keys of which the priority has lapsed in this slower tier since the last call, packed.
  [[nodiscard]] std::vector<ChunkKey> take_lapsed() noexcept;

  // From now on these chunks are worth a place below, with what precedes them. Others may be evicted though nobody else has
  // them. `least_chance`: what LIKELY means.
  void admit(Admitted admitted, double least_chance = 0) noexcept {
    admitted_ = admitted;
    least_chance_ = least_chance;
  }
  // Whether the eviction policy has learned how likely chunks are to be used again.
  [[nodiscard]] bool knows_chances() const noexcept { return policy_->knows_chances(); }
  // What was written to the slower tier and gave way there is worth a place again only when it has been used. Forgets all of
  // that: each is worth one once more.
  void forget_written() noexcept;
  // Has chunks that are evicted remembered: what comes again counts as touched before. REQUIRES: chunks > 0, called once.
  void keep_ghosts(uint32_t chunks);

  // A prefix that the slower tier lacks and that is worth a place there: held, from the root on, and how many of its first chunks the slower tier has. It ends
  // in one of the `scan` chunks next to be evicted, or (`newest_first`) used last. Id 0: none of them is lacking.
  [[nodiscard]] Hold hold_unsaved(uint32_t scan, bool newest_first, size_t& saved);
  // Chunks that the other tier lacks, counted one by one.
  [[nodiscard]] uint64_t count_unsaved() const noexcept;
  // Ends a hold as if it had never been: nothing counts as used.
  bool release_untouched(HoldId hold);
  // While set, `reserve` and `promote` answer NOT_READY rather than evict what no other tier has.
  void protect_unsaved(bool is_protected) noexcept { protects_unsaved_ = is_protected; }

  // Makes a chunk of an earlier life READY where it lies, ancestors before descendants, the most recent first. False where its
  // parent, its place or room is lacking. REQUIRES: no reservation yet; `finish_restore` ends the restoring.
  bool restore(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent, const ChunkKey& key,
               PageIndex page, uint64_t generation, Retention wish = {}, uint64_t now_ns = 0);
  void finish_restore() noexcept;
  // The keys that left this slower tier since the last call, in their order, packed.
  [[nodiscard]] std::vector<ChunkKey> take_departed() noexcept;

  // Takes a bad chunk and all that follow it out at once; slots in use are freed when their holds end.
  // Returns how many READY chunks went; a chunk that is just being written is not dropped for its own sake.
  uint64_t drop(const ChunkKey& key);
  // The same for a good chunk that nobody wants any more: it counts as flushed.
  uint64_t discard(const ChunkKey& key);
  // Removes what nobody holds and was last used before `before_ns`, in one namespace or (absent) in all.
  FlushResult flush(std::optional<NamespaceId> owner, uint64_t before_ns);

  // Every chunk that comes to this tier or leaves it is told to the feed from now on; what is restored only as a gap.
  void report_to(std::shared_ptr<ChangeFeed> feed) noexcept { feed_ = std::move(feed); }
  // READY chunks from the cursor (0 = start) on, `limit` at most, as changes; returns the cursor to go on from, 0 at the end.
  [[nodiscard]] uint32_t list(uint32_t cursor, size_t limit, std::vector<Change>& rows) const;
  [[nodiscard]] std::optional<Change> find(const ChunkKey& key) const noexcept;
  // Where a READY chunk lies in this tier, as of now: nothing is held for whoever asks.
  [[nodiscard]] std::optional<ChunkPlace> place_of(const ChunkKey& key) const noexcept;

  // Up to `limit` READY chunks at places from the cursor on (0 = start) and before `end`, held with their ancestors while
  // they are examined.
  [[nodiscard]] RecordPage records(uint32_t cursor, uint32_t limit, uint32_t end = UINT32_MAX);
  // How many places there are: every record is at one before this.
  [[nodiscard]] uint32_t places() const noexcept { return records_.end(); }
  // Token ids of a chunk, READY or being read or written; empty where it is not here or none were given.
  [[nodiscard]] std::span<const int32_t> tokens_of(const ChunkKey& key) const noexcept;
  [[nodiscard]] const ChunkRecord& record(RecordId id) const noexcept { return records_[id]; }

  [[nodiscard]] NamespaceCounts namespace_counts(NamespaceId owner) const noexcept;
  [[nodiscard]] uint32_t namespaces() const noexcept { return static_cast<uint32_t>(namespaces_.size()); }
  [[nodiscard]] DirectoryStats stats() const noexcept;
  [[nodiscard]] const SlotArena& arena() const noexcept { return arena_; }
  [[nodiscard]] const DirectoryGeometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] bool is_behind() const noexcept { return arena_.is_behind(); }

  // Recounts everything from the records, holds, table and arena; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  // Ancestors looked at for all wishes of a call: far more than a frame's chunks have where each is looked at once.
  static constexpr uint32_t STEPS_TO_KEEP = 1U << 17;

  struct ReservationState {
    size_t ancestors = 0;       // records before the first key's
    size_t first_reserved = 0;  // keys before this were PRESENT
    uint32_t layers = 0;
    bool expired = false;
    std::vector<RecordId> records;  // ancestors, present, reserved; once expired: the zombies
  };
  // The window a reservation would clear, searched once and then kept while it is still good.
  struct WindowSearch {
    bool searched = false;
    std::optional<SegmentWindow> window;
  };

  [[nodiscard]] uint64_t chunk_bytes(const ChunkRecord& record) const noexcept;
  [[nodiscard]] bool has_bytes(ChunkState state) const noexcept {
    return state == ChunkState::READY || state == ChunkState::PROMOTING;
  }

  // directory_tiers.cpp: what another tier holds.
  [[nodiscard]] bool note_slower(const ChunkKey& key, bool is_held) noexcept;
  [[nodiscard]] bool is_foreign_below(NamespaceId owner, const ChunkKey& key) const noexcept;
  void become_ready(ChunkRecord& record) noexcept;
  [[nodiscard]] bool is_elsewhere(const ChunkKey& key) const noexcept;
  void enter(const ChunkKey& key, RecordId id) noexcept;
  void leave(const ChunkKey& key) noexcept;
  void count_departure(const ChunkRecord& record);
  [[nodiscard]] bool is_admitted(const ChunkRecord& record) const noexcept;
  [[nodiscard]] bool wants_place_below(const ChunkRecord& record) const noexcept {
    return !record.was_below && is_admitted(record) && !is_elsewhere(record.key);
  }
  [[nodiscard]] Declined why_declined(const ChunkRecord& record) const noexcept;

  // directory_changes.cpp
  [[nodiscard]] const ChunkRecord* find_ready(const ChunkKey& key) const noexcept;
  [[nodiscard]] Change describe(const ChunkRecord& record) const noexcept;
  void report(const ChunkRecord& record, ChangeKind kind, Cause cause) noexcept;
  void report_priority(const ChunkRecord& record, uint8_t before) noexcept;

  // directory.cpp: removal. Every removal of a READY chunk goes through `remove_idle` or `make_zombie`.
  void make_idle(RecordId id, uint64_t now_ns) noexcept;
  void make_busy(RecordId id) noexcept;
  void hide(RecordId id) noexcept;
  void remove_idle(RecordId id) noexcept;
  void evict(RecordId leaf, Eviction reason) noexcept;
  void make_zombie(RecordId id) noexcept;
  void free_slot(RecordId id) noexcept;
  uint64_t remove_subtree(RecordId top) noexcept;
  uint64_t remove_named(const ChunkKey& key) noexcept;
  void evict_subtree(RecordId top, Eviction reason) noexcept;
  [[nodiscard]] RecordId leftmost_leaf(RecordId top) const noexcept;
  uint64_t flush_subtree(RecordId top) noexcept;
  void settle_widow(RecordId parent) noexcept;

  // directory_retention.cpp
  [[nodiscard]] RetainState keep(RecordId id, Retention wish) noexcept;
  [[nodiscard]] RetainState keep_in_queue(RecordId id, Retention wish) noexcept;
  void hand_down(const ChunkRecord& record) noexcept;
  void forget_retention(RecordId id) noexcept;
  void requeue(RecordId id) noexcept;
  void mark_kept(RecordId id) noexcept;
  void unmark_kept(RecordId top) noexcept;
  [[nodiscard]] bool has_room_to_keep(RecordId id) noexcept;
  void start_timer(RecordId id) noexcept;
  [[nodiscard]] uint64_t kept_since(const ChunkRecord& record) const noexcept;
  [[nodiscard]] uint64_t lapses_at(const ChunkRecord& record) const noexcept;
  [[nodiscard]] RecordId find_alike(const ChunkKey& key, Retention kept) const noexcept;
  void lapse(RecordId id);
  [[nodiscard]] bool is_listed(const ChunkRecord& record) const noexcept {
    return record.state == ChunkState::READY && record.holds == 0;
  }

  // directory_holds.cpp
  [[nodiscard]] size_t find_prefix(NamespaceId owner, const uint8_t* keys, size_t n, std::vector<RecordId>& out) const;
  [[nodiscard]] Hold make_hold(std::vector<RecordId> records);
  void add_hold(RecordId id) noexcept;
  void note_reuse(const std::vector<RecordId>& records, uint64_t now_ns) noexcept;
  void end_holds(const std::vector<RecordId>& records, uint64_t now_ns) noexcept;
  void append_chain(RecordId leaf, std::vector<RecordId>& records) const;
  [[nodiscard]] Hold hold_chain_of(RecordId leaf, size_t& saved);
  [[nodiscard]] std::vector<RecordId> whole_chain(NamespaceId owner, const uint8_t* leaf, size_t n) const;

  // directory_reserve.cpp
  [[nodiscard]] SaveState place(NamespaceId owner, ClassId size_class, RecordId parent, const ChunkKey& key,
                                WindowSearch& search, ChunkState as, RecordId& record) noexcept;
  [[nodiscard]] SaveState present_state(NamespaceId owner, ClassId size_class, RecordId parent,
                                        const TableEntry& entry) const noexcept;
  void occupy(RecordId id, ChunkState as) noexcept;
  [[nodiscard]] SaveState make_room(ClassId size_class, WindowSearch& search) noexcept;
  [[nodiscard]] SaveState make_slot(ClassId size_class, WindowSearch& search) noexcept;
  [[nodiscard]] bool is_cheaper(const SegmentWindow& window, RecordId own) const noexcept;
  void note_chain(const ReservationState& state) noexcept;
  [[nodiscard]] bool may_evict(RecordId id) const noexcept;
  void find_window(ClassId size_class, WindowSearch& search) const noexcept;
  void abort_writing(RecordId id) noexcept;
  void finish_reserve(ReservationState state, Reservation& answer, uint64_t now_ns);
  [[nodiscard]] ReservationState place_chain(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                                             const uint8_t* keys, size_t n, ChunkState as, Reservation& answer);

  // directory_verify.cpp
  void verify_records(std::vector<std::string>& broken) const;
  void verify_record(RecordId id, std::vector<std::string>& broken) const;
  void verify_tree(RecordId id, std::vector<std::string>& broken) const;
  void verify_queues(std::vector<std::string>& broken) const;
  void verify_retention(std::vector<std::string>& broken) const;
  void verify_holds(std::vector<std::string>& broken) const;
  void verify_sums(std::vector<std::string>& broken) const;

  const DirectoryGeometry geometry_;
  const Tier tier_;
  Directory* slower_ = nullptr;
  Directory* faster_ = nullptr;
  bool protects_unsaved_ = false;
  Admitted admitted_ = Admitted::ALL;
  double least_chance_ = 0;
  std::optional<GhostFilter> ghosts_;
  std::shared_ptr<ChangeFeed> feed_;
  Cause departure_ = Cause::DROPPED;  // of the chunks that are being removed
  std::vector<ChunkKey> departed_;  // of a slower tier: bounded by its caller, who takes them
  std::vector<ChunkKey> lapsed_;    // likewise
  const std::shared_ptr<const Mapping> arena_mapping_;  // the slots' memory lives as long as their directory
  ChunkTable table_;
  SlotArena arena_;
  ChunkRecords records_;
  TokenIds tokens_;
  const std::unique_ptr<EvictionPolicy> policy_;
  EvictionQueues queues_;
  RetentionTimers timers_;
  uint64_t kept_bytes_max_ = 0;
  uint32_t steps_to_keep_ = STEPS_TO_KEEP;  // left in this call
  std::vector<NamespaceCounts> namespaces_;
  std::unordered_map<HoldId, std::vector<RecordId>> holds_;
  std::unordered_map<HoldId, ReservationState> reservations_;
  DirectoryStats stats_;
  HoldId last_id_ = 0;
  uint64_t last_generation_ = 0;
  uint64_t latest_ns_ = 0;  // latest time seen: a clock that steps back must not break the order of the lists
};

}  // namespace kvpool
