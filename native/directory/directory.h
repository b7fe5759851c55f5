// Directory of one tier: which chunks are stored, for which namespace, in which slot, and which of them are evicted first.
//
// What it is: the state of one tier. It joins the shared table, the slot arena and the records, and composes what has a noun of its
// own: holds (hold_table.h, holder_shares.h), who is evicted (eviction_queues.h, standings.h, room_planner.h) or written below
// (demotion_order.h), retention (tier_retention.h), promotions (promotions.h), copies (copy_link.h), runs of chunks that wait
// (waiting_runs.h) and reports (chunk_reports.h). What it is not: a mover of bytes, a clock (`now_ns` is an argument), or a timer for
// deadlines: those of leases and reservations are the caller's.
//
// A chunk's life is drawn in chunk_records.h. Its bytes may be read while its generation word in the index is its
// generation; the word is cleared before the slot can be given to anybody else.
//
// Invariants (recounted by `verify`):
//   1. Who reads a chunk holds its ancestors. Who writes behind one holds the nearest HELD_ANCESTORS: no chunk goes before its
//      children anyway (hold_table.h). The parent of a READY chunk is READY.
//   2. The eviction queues hold exactly the READY chunks that nobody holds; those of them without a pin, and only these, are
//      idle in the arena. A chunk without a copy below stands as UNSAVED, one that is being written as BEING_SAVED.
//   3. A victim has no children: one that has is moved beside a child first (eviction_queues.h), so no chunk is ever
//      stored without its parent. Holds end from the leaf to the root, so a parent was used no earlier than what
//      follows it, and under LRU the oldest is a leaf without a move. An ancestor that a writer does
//      not hold takes over the last use of its child when the child leaves.
//   4. A chunk and its parent have the same namespace and size class, and it is one deeper.
//   5. used_bytes, the payload of all allocated slots, is at most the capacity.
//   6. Generations are positive and never repeat.
//   7. A tier has each of its chunks with all that precedes it: its chunks are whole prefixes.
//
// Several tiers are a directory each, joined by a TierSet (tier_set.h). A chunk that leaves a tier keeps its entry in the shared
// table while another tier has it; one that returns is promoted into a slot and read extent by extent.
// A hold means that somebody reads; its end is a use. A pin means that hardware reads the slot, for a copy or a check, and a writer
// that a client, a disk or a peer writes to it: only these two gate the slot's reuse.
//
// Threads: the control thread only. O(1) per chunk, but for lending memory to a class: O(log segments).
// Unknown hold ids and unknown namespaces are answers, not errors; broken invariants end the process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "records/change_feed.h"
#include "shared_index/chunk_index.h"
#include "directory/chunk_reports.h"
#include "directory/copy_link.h"
#include "directory/demotion_order.h"
#include "directory/directory_answers.h"
#include "directory/directory_geometry.h"
#include "directory/former_life.h"
#include "eviction/eviction_queues.h"
#include "holds/hold_table.h"
#include "holds/holder_shares.h"
#include "base/memory.h"
#include "directory/promotions.h"
#include "directory/room_planner.h"
#include "directory/standings.h"
#include "directory/tier_retention.h"
#include "directory/tier_set.h"
#include "directory/waiting_runs.h"
#include "directory/withheld_slots.h"
#include "records/token_ids.h"

namespace kvpool {

// See ChunkRecords::copy_for_child.
using CopyRoom = LazyArray<ChunkRecord>;

class Directory {
 public:
  // Without an `arena` the slots are elsewhere, without an `index` (and `epoch`) no client looks in. `seed` is the policy's. `records`:
  // where the records lie that are to outlive the process; without it in its own memory.
  // REQUIRES: regions writable, index and records zeroed, sizes as in the geometry.
  Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index,
            const DirectoryGeometry& geometry, const uint8_t epoch[16], Tier tier = Tier::DRAM,
            PolicyKind policy = PolicyKind::LRU, const HashSeed& seed = HashSeed::random(),
            std::shared_ptr<const Mapping> records = nullptr);
  // Of copies of what `originals` has READY; the words of its slots are in that one's index. REQUIRES: as CopyLink does.
  Directory(Directory& originals, const DirectoryGeometry& geometry, PolicyKind policy = PolicyKind::LRU,
            const HashSeed& seed = HashSeed::random());
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // No chain gets more chunks than this, which bounds what a request about one costs. REQUIRES: not 0.
  void bound_chains(uint32_t chunks) noexcept { max_chain_ = chunks; }
  // The class of chunks of this geometry: known, new, or `instead` of one without chunks. Nothing where such a chunk cannot fit.
  [[nodiscard]] std::optional<ClassId> add_class(uint64_t chunk_bytes, uint32_t extents, bool has_place_below = true, ClassId instead = {});
  [[nodiscard]] NamespaceId add_namespace();
  // How many token ids each chunk of a namespace has, from now on; 0 until then. REQUIRES: the namespace is known.
  void set_chunk_tokens(NamespaceId owner, uint32_t tokens) noexcept { chunk_tokens_[owner.value()] = tokens; }
  [[nodiscard]] uint32_t chunk_tokens(NamespaceId owner) const noexcept { return chunk_tokens_[owner.value()]; }
  void mark_segment_ready(uint32_t segment) noexcept { arena_.mark_ready(segment); }

  // Holds the longest stored prefix; id 0 where that is empty. `keys` are n packed keys from the root on. `now_ns` here and in
  // commit serves the statistics alone; 0 is the latest time seen. Behind `parent`, which the caller holds: what follows it alone.
  [[nodiscard]] Hold acquire(NamespaceId owner, const uint8_t* keys, size_t n, uint64_t now_ns = 0,
                             const std::optional<ChunkKey>& parent = std::nullopt);
  // Has a hold that counts for nobody yet cover what is stored of the chunks that follow its last one: how many there are.
  size_t extend(HoldId hold, const uint8_t* keys, size_t n, uint64_t now_ns = 0);
  // Leaves a hold its `chunks` leading chunks. False where it is unknown, counts for somebody or would have none.
  bool shorten(HoldId hold, size_t chunks, uint64_t now_ns);
  // A hold for each of these runs, counted for a holder, where one is named. Nothing is held, and no use is noted, unless all chunks
  // are here, and the holder may protect them all.
  [[nodiscard]] std::vector<Hold> hold_hit(std::span<const HitRun> runs, HolderId holder, uint64_t now_ns = 0);
  // One hold on what is here of chunks without a parent, each once, counted for the holder; released together, the first key of them is
  // used last, or with `is_last_newest` the last one. Nothing, and no use is noted, where it may not protect all of them, or a lower tier
  // has what is not here.
  [[nodiscard]] std::optional<HeldSet> hold_set(NamespaceId owner, std::span<const uint8_t> keys, HolderId holder, bool is_last_newest,
                                                uint64_t now_ns = 0);
  // A hold on what is here of each of these parts of a set, counted for the holder, where one is named; 0 where there is nothing. What it
  // may not protect of all of them together is left out, the last places first.
  [[nodiscard]] std::vector<HeldSet> hold_each(std::span<const SetPart> parts, HolderId holder, uint64_t now_ns = 0);
  // One hold on each rank in place of those of parts of a set of `count` keys: on what all ranks hold and nobody has dropped since; the
  // rest is released. In the order of `hold_set`. REQUIRES: each place is in one hold of a rank at most.
  [[nodiscard]] JoinedSet join_sets(std::span<const std::vector<HeldSet>> ranks, size_t count, bool is_last_newest, uint64_t now_ns = 0);
  // One hold in place of several on chunks without a parent, of one namespace, which counts for whom the first one does. 0 where one
  // is unknown.
  [[nodiscard]] HoldId join_holds(const std::vector<HoldId>& holds);
  // A hold on the same chunks for each of these. Nothing is held where one is unknown.
  [[nodiscard]] std::optional<std::vector<HoldId>> duplicate(const std::vector<HoldId>& holds);
  // Where the chunks of these holds and pins lie, of one after the other; nothing where one is unknown.
  [[nodiscard]] std::optional<Columns> columns(const std::vector<HoldId>& holds) const;
  // The same of one, written into rows that are as many as its chunks. REQUIRES: the hold is known.
  void locate(HoldId hold, ColumnRows rows) const;
  [[nodiscard]] bool has_words() const noexcept { return table_.has_words(); }  // otherwise readers know no slots: they get no column
  // The same of their copies; generation 0: none, at NO_LEVEL.
  [[nodiscard]] std::optional<Columns> copies(const std::vector<HoldId>& holds) const;
  // Which chunks each hold, pin and reservation has, for whoever asks; and how much of them a holder may protect.
  [[nodiscard]] const HoldTable& holds() const noexcept { return holds_; }
  [[nodiscard]] HolderShares& shares() noexcept { return shares_; }
  // Ends a hold; its chunks become the newest. Returns false where the hold is unknown.
  bool release(HoldId hold, uint64_t now_ns);
  // The same for its last `limit` chunks, or the first ones of those without a parent: how many they are. Where it had none any more it
  // has ended.
  size_t release_part(HoldId hold, size_t limit, uint64_t now_ns);

  // Makes room for the chunks that follow `parent` (absent: the root), and gives them slots. The reservation holds the ancestors, the
  // chunks that are there or that others write, and its own. Evicts exactly what is missing, or nothing for a chunk that cannot be
  // placed. It counts for `holder`, where one is named: QUOTA, once it protects all that it may. Where `bounds` end it, the answer
  // has fewer states.
  [[nodiscard]] Reservation reserve(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                                    const uint8_t* keys, size_t n, uint64_t now_ns, HolderId holder = {},
                                    ReserveBounds bounds = {});
  // Whether so many new chunks of a class get slots without a wait, whatever else decides about them. May be false where they would.
  [[nodiscard]] bool has_room_for(ClassId size_class, uint64_t chunks) const noexcept;
  // The same for the chunks that follow a reservation's last one; NO_PARENT where it is unknown or has expired.
  [[nodiscard]] Reservation reserve_more(HoldId reservation, const uint8_t* keys, size_t n, uint64_t now_ns, ReserveBounds bounds = {});
  // Makes chunks first .. first+count readable, of the RESERVED ones, parents before children. PART where one that another
  // reservation writes precedes it: it is readable when that is, or is lost with that. `checksums`: [count][extents]; `ids`, where they
  // are stored: tokens [count][n / count], and the scope of all of them. Committing twice is STORED twice. `sources`, of a lower tier or of copies: one that is not
  // READY there with its generation any more is EXPIRED: what is dropped while it is copied is not published in the other tier.
  [[nodiscard]] std::vector<uint8_t> commit(HoldId reservation, size_t first, size_t count, const uint32_t* checksums,
                                            uint64_t now_ns = 0, PackedIds ids = {}, CopySources sources = {});
  // directory_following.cpp. Saves that are followed before their commit. Extents first_extent .. of the reserved chunks
  // first .. first+count lie in their slots: `checksums` [count][extents]. A last extent is left out, which lands with the commit. A chunk
  // that has another number of extents in place, or is committed, stays as it is. False where the reservation is unknown or has expired.
  bool land_saved(HoldId reservation, size_t first, size_t count, uint32_t first_extent, std::span<const uint32_t> checksums);
  // The run of chunks that are being saved after `parent` (absent: the root), to be followed: their slots have generation words from now
  // on. Nothing is held, they may be aborted at any time.
  [[nodiscard]] Columns follow_saves(NamespaceId owner, const std::optional<ChunkKey>& parent, const uint8_t* keys, size_t n);
  // Frees what was not committed and drops the hold: the writer has stopped. False where it is unknown.
  bool end_reservation(HoldId reservation, uint64_t now_ns);
  // The same for `limit` chunks at most, the last ones first: whether nothing is left to do.
  bool end_part(HoldId reservation, size_t limit, uint64_t now_ns);
  // Takes `limit` chunks that were not committed out of sight, the last ones first, but their slots stay taken until the reservation
  // ends: the writer may still write. Whether nothing is left to do; once begun, nothing is committed.
  bool expire_part(HoldId reservation, size_t limit, uint64_t now_ns);

  // What is read from other tiers into this one.
  [[nodiscard]] Promotions& promotions() noexcept { return promotions_; }
  [[nodiscard]] const Promotions& promotions() const noexcept { return promotions_; }
  // What is retained, and until when.
  [[nodiscard]] TierRetention& retention() noexcept { return retention_; }
  [[nodiscard]] const TierRetention& retention() const noexcept { return retention_; }
  // What is admitted to lower tiers, and what `reserve` and `promote` may evict for their room.
  [[nodiscard]] DemotionOrder& demotion() noexcept { return demotion_; }
  [[nodiscard]] RoomPlanner& room() noexcept { return room_; }

  // directory_pins.cpp. Pins what every lower tier lacks of a chain and is admitted there, up to one of the first `scan`
  // in this order (unsaved_order.h). Id 0: none is lacking, but `chunks` count as evicted with others. Read as a hold is.
  [[nodiscard]] Hold pin_unsaved(uint32_t scan, WriteOrder order);
  // The same of the longest stored prefix, or of a hold or a reservation, admitted or not; and one chunk of a hold, nothing where
  // it is gone.
  [[nodiscard]] Hold pin_unsaved_prefix(NamespaceId owner, const uint8_t* keys, size_t n,
                                        const std::optional<ChunkKey>& parent = std::nullopt);
  [[nodiscard]] Hold pin_unsaved_hold(HoldId holder, size_t position);
  // Where a hold or a reservation has its last stored chunk before `end` that every lower tier lacks.
  [[nodiscard]] std::optional<size_t> last_unsaved(HoldId holder, size_t end = SIZE_MAX) const noexcept;
  // Those that have any: of chunks that somebody holds `pin_unsaved` finds none. One look at each of them, and at each of its chunks
  // that has no parent.
  [[nodiscard]] std::vector<HoldId> unsaved_holders() const;
  [[nodiscard]] std::optional<HoldId> pin_chunk(HoldId hold, size_t position);
  [[nodiscard]] std::optional<HoldId> pin_key(NamespaceId owner, const ChunkKey& key);  // nothing where it is not stored here
  // One pin on those of these chunks that are stored here; nothing where none is.
  [[nodiscard]] std::optional<HoldId> pin_keys(NamespaceId owner, std::span<const uint8_t> keys);
  bool unpin(HoldId pin);  // false where it is unknown
  [[nodiscard]] uint64_t count_unsaved() const noexcept { return stats_.unsaved_chunks; }  // stored, and not below

  // Makes a chunk of an earlier life READY where it lies, as if used before everything that is here: ancestors come before
  // descendants, the most recent first. False where its parent, its place or room is lacking.
  bool restore(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent, const ChunkKey& key,
               PageIndex page, uint64_t generation, Retention request = {}, uint64_t now_ns = 0);
  // Reports a gap to the feed: much has come at once. An earlier life may have given generations up to `generation`.
  void finish_restore(uint64_t generation = 0) noexcept;
  // directory_former.cpp. Takes over what a former life of the process has left in the same arena: READY chunks with their order of
  // eviction, uses and priorities, by `namespaces` (former number -> number here; unset: not known), and slots that somebody may still
  // write to, which nobody gets. REQUIRES: nothing is here but classes and namespaces; FormerLife::why_refused is nullptr.
  [[nodiscard]] FormerCounts restore_former(const FormerLife& former, std::span<const NamespaceId> namespaces, uint64_t now_ns);
  // Such slots, by the holder whose reservation they were. That one's writers have ended: how many slots are free again.
  [[nodiscard]] const WithheldSlots& withheld() const noexcept { return withheld_; }
  size_t release_withheld(HolderId holder);
  // What is withheld for a holder is withheld for `instead` from now on, in what a later life reads, too.
  void rename_withheld(HolderId holder, HolderId instead);
  // A forked child has nothing of kept records but the copy that was made before; it is the child's from `use_copy` on.
  void copy_for_child(std::shared_ptr<CopyRoom> room = nullptr) { records_.copy_for_child(std::move(room)); }
  void forget_copy() noexcept { records_.forget_copy(); }
  void use_copy() noexcept { records_.use_copy(); }
  void begin_count() noexcept { counted_from_ = last_generation_, counted_ = 0; }  // what is reserved here from now on
  [[nodiscard]] uint64_t counted() const noexcept { return counted_; }             // READY chunks of that
  // The keys that left this lower tier since the last call, in their order, packed.
  [[nodiscard]] std::vector<ChunkKey> take_departed() noexcept;

  // Takes a chunk whose bytes were found bad out at once, with all that follow it; a slot that somebody is at is freed later.
  // `generation`: of the bytes that were read. A verdict about an older one, or about a chunk that has not landed or is just
  // being written, takes nothing. Returns how many READY chunks went.
  uint64_t drop(const ChunkKey& key, uint64_t generation);
  // The same for a chunk that nobody wants any more, whatever its generation: it counts as flushed.
  uint64_t discard(const ChunkKey& key);

  // What comes, leaves and is here, as changes.
  [[nodiscard]] ChunkReports& reports() noexcept { return reports_; }
  [[nodiscard]] const ChunkReports& reports() const noexcept { return reports_; }
  // Where a READY chunk lies in this tier, as of now: nothing is held for whoever asks.
  [[nodiscard]] std::optional<ChunkPlace> place_of(const ChunkKey& key) const noexcept;

  // Up to `limit` READY chunks at places from the cursor (0 = start) on and before `end`, pinned while they are examined.
  [[nodiscard]] RecordPage records(uint32_t cursor, uint32_t limit, uint32_t end = UINT32_MAX);
  [[nodiscard]] uint32_t places() const noexcept { return records_.end(); }  // every record is at one before this
  void limit_token_ids(uint64_t bytes) noexcept { tokens_.limit(bytes); }
  // Token ids of a chunk, READY or being read or written; empty where it is not here or none were given. `hint`: its record, if that is
  // still its own.
  [[nodiscard]] std::span<const int32_t> tokens_of(const ChunkKey& key, RecordId hint = {}) const noexcept;
  [[nodiscard]] const ChunkRecord& record(RecordId id) const noexcept { return records_[id]; }

  [[nodiscard]] NamespaceCounts namespace_counts(NamespaceId owner) const noexcept;
  [[nodiscard]] uint32_t namespaces() const noexcept { return static_cast<uint32_t>(namespaces_.size()); }
  [[nodiscard]] DirectoryStats stats() const noexcept;
  [[nodiscard]] uint64_t unsaved_bytes() const noexcept { return standings_.unsaved_bytes(stats_.used_bytes); }
  [[nodiscard]] uint64_t used_bytes() const noexcept { return stats_.used_bytes; }  // `stats` has it too
  [[nodiscard]] uint64_t evicted_chunks() const noexcept { return stats_.evicted_chunks; }  // and this
  [[nodiscard]] Tier tier() const noexcept { return tier_; }
  [[nodiscard]] const SlotArena& arena() const noexcept { return arena_; }
  [[nodiscard]] const DirectoryGeometry& geometry() const noexcept { return geometry_; }

  // Recounts everything from the records, holds, table and arena; one line per broken invariant. A forked child has nothing that
  // clients map: there `with_shared` is false, and `verify_shared` looks at that part by part, from a cursor (0: start) on; 0: done.
  [[nodiscard]] std::vector<std::string> verify(bool with_shared = true) const;
  [[nodiscard]] uint64_t verify_shared(uint64_t cursor, uint32_t limit, std::vector<std::string>& broken) const;

 private:
  // What joins directories, and parts of this one: they remove chunks, move them in the queues, and read all that is here.
  friend class ChunkReports;
  friend class CopyLink;
  friend class CrowdedReach;    // directory_reach.cpp
  friend class DirectoryAudit;  // directory_audit.cpp
  friend class FlushWalk;
  friend class Promotions;
  friend class TierRetention;
  friend class TierSet;

  // Ancestors that a writer holds: those of a long prompt; what is added to a longer one does not cost its length.
  static constexpr size_t HELD_ANCESTORS = 2048;

  Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index, const DirectoryGeometry& geometry,
            const uint8_t epoch[16], Tier tier, PolicyKind policy, const HashSeed& seed, TableRegion region,
            std::shared_ptr<const Mapping> records);

  [[nodiscard]] uint64_t chunk_bytes(const ChunkRecord& of) const noexcept { return arena_.size_class(of.size_class).chunk_bytes; }
  // The record of a key, whatever its state; unset where it is not here.
  [[nodiscard]] RecordId find_record(const ChunkKey& key) const noexcept {
    const auto entry = table_.find(key);
    return entry ? entry->record : RecordId();
  }
  [[nodiscard]] const ChunkRecord* find_ready(const ChunkKey& key) const noexcept;

  // directory_tiers.cpp: what other tiers hold.
  [[nodiscard]] bool is_lower() const noexcept { return upper_bits_ != 0; }  // than another one
  [[nodiscard]] uint8_t copies_bit() const noexcept { return copies_ == nullptr ? uint8_t{0} : copies_->bit(); }
  [[nodiscard]] std::span<Directory* const> lower_tiers() const noexcept;
  void mark_below(RecordId id, bool is_below) noexcept, become_ready(ChunkRecord& record) noexcept;
  [[nodiscard]] std::optional<Tier> uppermost_below(const ChunkKey& key) const noexcept;
  [[nodiscard]] std::optional<SaveState> why_unpublishable(const ChunkRecord& record, Tier from, uint64_t source) const noexcept;
  [[nodiscard]] bool is_restorable(NamespaceId owner, ClassId size_class, RecordId above, const ChunkKey& key) const noexcept;
  [[nodiscard]] RecordId begin_restore(NamespaceId owner, ClassId size_class, RecordId above, const ChunkKey& key, uint64_t generation);
  void enter_restored(RecordId id, RecordId above) noexcept, list_restored(RecordId id) noexcept;
  [[nodiscard]] RecordId restore_former_chunk(const FormerChunk& chunk, NamespaceId owner, RecordId above);
  [[nodiscard]] bool withhold(const FormerChunk& chunk, NamespaceId owner, uint64_t generation);
  [[nodiscard]] bool is_elsewhere(const ChunkKey& key) const noexcept;
  void enter(const ChunkKey& key, RecordId id) noexcept, leave(const ChunkKey& key) noexcept;
  void count_departure(const ChunkRecord& record);

  // directory.cpp: removal. Every removal of a READY chunk goes through `remove_idle` or `make_zombie`.
  void make_idle(RecordId id, uint64_t now_ns) noexcept { make_idle(std::span(&id, 1), now_ns); }
  void make_idle(std::span<const RecordId> chain, uint64_t now_ns) noexcept;
  template <typename Prepare>
  void count_idle(std::span<const RecordId> chain, Prepare prepare) noexcept;
  void count_idle(RecordId id) noexcept;
  void make_busy(RecordId id) noexcept { make_busy(std::span(&id, 1)); }
  void make_busy(std::span<const RecordId> chain) noexcept;
  void hide(RecordId id) noexcept, remove_idle(RecordId id) noexcept;
  void prefetch_chunk(RecordId id) const noexcept, prefetch_victims_behind(RecordId id) const noexcept;
  void evict(RecordId leaf, Eviction reason) noexcept;
  void make_zombie(RecordId id) noexcept, let_zombie_go(RecordId id) noexcept, free_slot(RecordId id) noexcept;
  void vacate(RecordId id) noexcept, give_slot_back(RecordId id) noexcept, end_writer(RecordId id) noexcept;
  uint64_t remove_subtree(RecordId top) noexcept;
  void evict_subtree(RecordId top, Eviction reason) noexcept;
  [[nodiscard]] RecordId leftmost_leaf(RecordId top) const noexcept;
  // directory_pins.cpp, directory_holds.cpp
  void add_pin(RecordId id) noexcept, end_pin(RecordId id) noexcept;
  [[nodiscard]] Hold pin_to_save(std::vector<RecordId> chain);
  [[nodiscard]] Hold pin_unsaved_chain_of(RecordId leaf);
  template <typename MayGoOn>
  void find_records(const uint8_t* keys, size_t n, std::vector<RecordId>& out, MayGoOn may_go_on) const;
  size_t find_prefix(NamespaceId owner, RecordId parent, const uint8_t* keys, size_t n, std::vector<RecordId>& out) const;
  [[nodiscard]] Hold make_hold(std::vector<RecordId> records);
  [[nodiscard]] std::optional<RecordId> find_above(const std::optional<ChunkKey>& parent) const noexcept;
  void note_reuse(std::span<const RecordId> records, std::optional<size_t> preceding, uint64_t now_ns) noexcept;
  void end_holds(std::span<const RecordId> records, uint64_t now_ns) noexcept, end_reading(std::span<const RecordId> records, uint64_t now_ns) noexcept;
  void note_use(std::span<const RecordId> records, uint64_t now_ns) noexcept, unhold_all(std::span<const RecordId> chain, uint64_t now_ns) noexcept;
  void add_hold(RecordId id) noexcept { add_holds({&id, 1}); }
  void add_holds(std::span<const RecordId> chain) noexcept, count_held(std::span<const RecordId> chain, uint64_t by) noexcept;
  void give_up_landing(RecordId id) noexcept;
  void locate_records(std::span<const RecordId> records, ColumnRows rows) const;
  void append_chain(RecordId leaf, size_t limit, std::vector<RecordId>& records) const;
  [[nodiscard]] std::vector<RecordId> whole_run(const HitRun& run) const;
  [[nodiscard]] std::vector<std::pair<RecordId, uint32_t>> find_alone(NamespaceId owner, std::span<const uint8_t> keys, bool& is_elsewhere) const;
  [[nodiscard]] HoldId hold_alone(HoldTable::Records records, HolderId holder, uint64_t now_ns);
  // directory_reserve.cpp, directory_writing.cpp
  [[nodiscard]] SaveState place(NamespaceId owner, ClassId size_class, RecordId parent, const ChunkKey& key, const TableLook& look,
                                WindowSearch& search, const PromotionSource* source, bool may_reserve, bool may_pass,
                                RecordId& record) noexcept;
  [[nodiscard]] SaveState present_state(NamespaceId owner, ClassId of, RecordId parent, const TableEntry& entry) const noexcept;
  [[nodiscard]] SaveState find_room(ClassId size_class, const ChunkKey& key, bool has_place, WindowSearch& search) noexcept;
  void occupy(RecordId id, ChunkState as) noexcept, abort_writing(RecordId id) noexcept;
  // Chunks of lower tiers and copies are committed in their order: what is dropped meanwhile has been dropped in its source.
  [[nodiscard]] bool has_clients() const noexcept { return originals_ == nullptr && !is_lower(); }
  [[nodiscard]] bool may_follow(const ChunkRecord& of) const noexcept { return of.state == ChunkState::WRITING && has_clients(); }
  void publish(RecordId id, const uint32_t* checksums) noexcept, publish_waiting(RecordId parent, uint64_t now_ns);
  void keep_waiting(std::vector<RecordId>& run, std::vector<uint32_t>& checksums, HolderId holder);
  void note_chain(ReservationState& state, size_t from) noexcept;
  [[nodiscard]] bool has_landed_as(const ChunkRecord& record, const uint32_t* checksums) const noexcept;
  void finish_reserve(ReservationState state, const ShareClaim& claim, Reservation& answer, bool is_kept, uint64_t now_ns);
  [[nodiscard]] bool begin_chain(NamespaceId owner, ClassId of, const std::optional<ChunkKey>& parent, ReservationState& state,
                                 bool is_promotion = false) noexcept;
  void place_chain(ReservationState& state, const uint8_t* keys, size_t n, std::span<const PromotionSource> sources,
                   ReserveBounds bounds, ShareClaim& claim, Reservation& answer);
  void complete(Reservation& answer) noexcept;
  [[nodiscard]] SaveState make_room(ClassId size_class, WindowSearch& search) noexcept;
  // directory_reach.cpp
  [[nodiscard]] bool clear_reach(const ChunkKey& key);

  const DirectoryGeometry geometry_;
  const Tier tier_;
  CopyLink* copies_ = nullptr;  // of the originals: the link's own doing
  TierSet* tiers_ = nullptr;  // that it is in; the set's own doing, as are the bits of the tiers above and below in it
  uint8_t upper_bits_ = 0, lower_bits_ = 0;
  uint32_t max_chain_ = UINT32_MAX;
  ChunkReports reports_{*this};
  Cause departure_ = Cause::DROPPED;  // of the chunks that are being removed
  std::vector<ChunkKey> departed_;  // of a lower tier: bounded by its caller, who takes them
  const std::shared_ptr<const Mapping> arena_mapping_;  // the slots' memory lives as long as their directory
  ChunkIndex table_;
  ChunkRecords records_;
  SlotArena arena_;
  TokenIds tokens_{&records_};
  const std::unique_ptr<EvictionPolicy> policy_;
  EvictionQueues queues_;
  Standings standings_;
  DemotionOrder demotion_;
  RoomPlanner room_;
  TierRetention retention_;
  HoldTable holds_;
  HolderShares shares_;
  std::vector<NamespaceCounts> namespaces_;
  std::vector<uint32_t> chunk_tokens_;  // as many
  WaitingRuns waiting_;
  WithheldSlots withheld_;
  Promotions promotions_{*this};
  DirectoryStats stats_;
  uint64_t last_generation_ = 0, counted_from_ = 0, counted_ = 0;
  uint64_t latest_ns_ = 0;  // latest time seen: a clock that steps back must not break the order of the lists
  std::unique_ptr<CopyLink> originals_;  // of a directory of copies: ends first
};

}  // namespace kvpool
