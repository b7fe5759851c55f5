// The shared index: a hash table of chunks in a memfd, written by the daemon alone, probed by every client.
//
// What it is: key -> (generation, slot, tiers), the same for further tiers of arenas, and the words of each slot. What it is not: a
// right to anything. A hit is a hint that carries a generation; who copied bytes checks afterwards that `generation_at` is still
// the same. Where the parts lie: index_format.h.
//
// Table: linear probing from the key's home, at most MAX_PROBE slots, behind the last one comes the first, load at most 5/8,
// erase by backward shift, so there are no tombstones and no empty slot lies between a key and its home. A key's home depends on
// `seed`, drawn by each daemon: nobody can choose keys beforehand that crowd one home. A client that reads the seed can: a key that finds
// no free slot in reach takes the slot of another one (`bequeath`), whose chunk has been evicted for it.
//
// Reading while the writer writes. All shared words are atomics; data words are stored with release and loaded
// with acquire, which makes the sequence counter below correct without fences.
//   1. A slot, with the line of its further residencies: the writer makes `seq` odd, stores the words, makes it even. A reader that
//      saw an odd or a changed `seq` takes the slot as occupied by something else and goes on. (`tiers` alone changes without `seq`.)
//   2. A shift copies an entry to its new place, bumps `moves`, and only then overwrites the old place. At every
//      moment a key that is not itself being inserted or erased therefore stands whole in at least one slot. A
//      reader that found nothing looks at `moves`: if it changed, or a slot was in flux, it looks again (at most
//      MAX_LOOKS times; then it answers "miss", which is always allowed).
//
// Reading a chunk that is just being promoted: its generation word is set from the start, its landing word rises extent by
// extent after the extent's bytes and checksum are there. Readers wait on that word (futex, landing_wait.h). The words of a chunk that is
// just being saved rise alike, but for the last extent, which lands when the chunk is committed.
//
// Threads: ChunkTable is the daemon's control thread's. IndexView may be used from any thread of any process.
#pragma once

#include <cstdint>
#include <memory>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hash/keyed_hash.h"
#include "base/memory.h"
#include "base/types.h"
#include "remote_index/remote_view.h"
#include "shared_index/index_words.h"
#include "shared_index/life_page.h"

namespace kvpool {

inline constexpr uint32_t MAX_PROBE = 256;
inline constexpr uint32_t MAX_LOOKS = 64;

// One answer of the table. `slot`: in the tier of the first region, unset where the key is in none of its slots.
struct TableEntry {
  RecordId record;
  uint64_t generation;
  SlotAddress slot;
  uint8_t tiers;
};

// The same of a look for a key that may be new. `has_place`: it is in the table, or a free slot is near enough to its home.
struct TableLook {
  std::optional<TableEntry> entry;
  bool has_place = false;
};

// Where a key is in one tier of arenas.
struct Residency {
  uint64_t generation;
  SlotAddress slot;
  friend bool operator==(const Residency&, const Residency&) noexcept = default;
};

// Whose index it is, of the lives that have one arena.
struct IndexLife {
  LifePage page;
  uint64_t number;
};

// A reader's view of an index, in any process. Everything read is untrusted: offsets are checked, waits are bounded. Shares itself,
// as a Mapping does.
class IndexView : public std::enable_shared_from_this<IndexView> {
 public:
  // Returns nothing if the region is not an index of this version, or is too small for the sizes in its header.
  // `remote`: where chunks are looked up that no tier of this node has; nullptr: nowhere. `life`: of the daemon that writes the region,
  // where a later one may take the arena over; nothing: none may.
  [[nodiscard]] static std::shared_ptr<const IndexView> attach(std::shared_ptr<const Mapping> mapping,
                                                               std::shared_ptr<const RemoteView> remote = nullptr,
                                                               std::optional<IndexLife> life = {});

  // Length of the run of readable chunks from the first key on; `levels[i]` = fastest tier of each chunk of it, PEER where only
  // another node is known to have it.
  // `keys` are n packed keys, `levels` has room for n.
  [[nodiscard]] size_t lookup(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept;

  // The largest end <= `end` before which `length` chunks in a row are readable, or all where there are fewer; 0 where there is
  // none. `levels[i]` = fastest tier of each chunk of that run. `here`: on this node alone; otherwise as `lookup` counts them.
  // REQUIRES: `keys` are at least `end` packed keys, `levels` has room for `end`, `length` > 0.
  [[nodiscard]] size_t last_run(const uint8_t* keys, size_t end, size_t length, bool here, uint8_t* levels) const noexcept;

  // Of each of n packed keys the fastest tier from DRAM on, PEER where only another node is known to have it; 0: nobody is.
  void probe(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept;
  // The same of chunks without a parent by the names that engines have for them (name_keys), behind each of `ranks` packed roots: the
  // slowest of these, 0 where one has it not.
  void probe_names(const uint8_t* roots, size_t ranks, const uint8_t* names, size_t n, uint8_t* levels) const noexcept;

  [[nodiscard]] std::optional<TableEntry> find(const ChunkKey& key) const noexcept;

  // Whether a slot of the arena is lent to the chunk and not whole yet: somebody is saving it, or it is read from another tier.
  [[nodiscard]] bool is_being_written(const ChunkKey& key) const noexcept;

  // Where a key is in a tier that has regions; nothing where it is in no slot of it. It may be just being written there.
  [[nodiscard]] std::optional<Residency> residency(const ChunkKey& key, Tier tier) const noexcept;

  // Generation of the readable chunk in the slot; 0 where there is none (or no such slot), and in all slots once a later life has taken
  // the arena over.
  [[nodiscard]] uint64_t generation_at(SlotAddress slot) const noexcept;

  // CRC-32C of an extent of the slot; 0 where there is none: check with `covers` beforehand.
  [[nodiscard]] uint32_t checksum_at(SlotAddress slot, uint32_t extent) const noexcept;

  // Extents in place of the slot, or LANDING_FAILED; 0 where there is no such slot.
  [[nodiscard]] uint32_t landed_at(SlotAddress slot) const noexcept;
  // The word that has this number, to wait on (landing_wait.h); nullptr where there is no such slot.
  [[nodiscard]] const uint32_t* landing_word(SlotAddress slot) const noexcept;

  // Whether the slot has words in the index, and as many extents have checksums there now.
  [[nodiscard]] bool covers(SlotAddress slot, uint32_t extents) const noexcept;

  // Whether a later life has the arena: nothing of this index counts any more.
  [[nodiscard]] bool is_taken_over() const noexcept { return life_ && life_->page.life() != life_->number; }

  [[nodiscard]] const IndexShape& shape() const noexcept { return shape_; }
  [[nodiscard]] uint64_t count() const noexcept;
  [[nodiscard]] std::string epoch() const;  // 16 bytes

 private:
  IndexView(std::shared_ptr<const Mapping> mapping, FoundIndex found, std::shared_ptr<const RemoteView> remote,
            std::optional<IndexLife> life);
  [[nodiscard]] size_t lookup_here(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept;
  [[nodiscard]] size_t lookup_anywhere(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept;
  [[nodiscard]] const SlotWords* words_at(SlotAddress slot) const noexcept {
    return slot.region < regions_.size() ? regions_[slot.region].find(slot.number) : nullptr;
  }
  [[nodiscard]] std::optional<TableEntry> find_from(uint64_t home, const ChunkKey& key) const noexcept;
  // The tiers of the key's entry; 0 where there is none. `slots`: slots_.
  [[nodiscard]] uint8_t tiers_from(const TableSlot* slots, uint64_t home, const uint8_t* packed) const noexcept;
  // The same for a key that one walk has not found.
  [[nodiscard]] uint8_t tiers_behind(uint64_t home, const uint8_t* packed) const noexcept;
  // Whether the key has an entry. `take(slot, generation)` reads what is wanted of it, and is right where this is true.
  template <typename Take>
  [[nodiscard]] bool find_with(uint64_t home, const ChunkKey& key, const Take& take) const noexcept;

  const std::shared_ptr<const Mapping> mapping_;
  const IndexShape shape_;
  const IndexHeader* const header_;
  const TableSlot* const slots_;
  const FurtherSlot* const further_;  // nullptr: all regions have one tier
  std::vector<RegionWords> regions_;
  const HashSeed seed_;
  const std::shared_ptr<const RemoteView> remote_;
  const std::optional<IndexLife> life_;
};

// The writer. Control thread only.
class ChunkTable {
 public:
  // Formats a zeroed writable region. `seed` places the keys. REQUIRES: shape.valid(); mapping->size() >= shape.total_bytes().
  ChunkTable(std::shared_ptr<const Mapping> mapping, IndexShape shape, const uint8_t epoch[16],
             const HashSeed& seed = HashSeed::random());
  ChunkTable(const ChunkTable&) = delete;
  ChunkTable& operator=(const ChunkTable&) = delete;

  [[nodiscard]] std::optional<TableEntry> find(const ChunkKey& key) const noexcept;
  // Prefetches where the probe for a key begins; `find_from` and `look_from` go on from there.
  uint64_t prefetch(const ChunkKey& key) const noexcept;
  [[nodiscard]] std::optional<TableEntry> find_from(uint64_t home, const ChunkKey& key) const noexcept;
  [[nodiscard]] TableLook look_from(uint64_t home, const ChunkKey& key) const noexcept;

  // Whether a free slot is near enough to the key's home. Erasing other keys never makes this false.
  [[nodiscard]] bool is_in_reach(const ChunkKey& key) const noexcept { return free_position(key).has_value(); }
  // The keys that stand in all the slots where this one could.
  [[nodiscard]] std::vector<ChunkKey> keys_in_reach(const ChunkKey& key) const;
  // When `from` is erased next, `to` gets its slot, in no slot of the arena and with tiers = 0. False, and nothing is changed, where
  // `from` does not stand in reach of `to`. REQUIRES: `from` is present, `to` absent.
  [[nodiscard]] bool bequeath(const ChunkKey& from, const ChunkKey& to) noexcept;
  // Whether insert would take the key: in reach, and below the largest load.
  [[nodiscard]] bool has_room(const ChunkKey& key) const noexcept;

  // The same of a key that is absent as well; false for one that is here.
  [[nodiscard]] bool may_insert(const ChunkKey& key) const noexcept {
    const Probe found = probe(home(key), key);
    return !found.is_found && found.position.has_value() && count_ < shape_.max_entries();
  }

  // Adds a key with tiers = 0; `slot` unset where it is in no slot. Returns false, and does nothing, where `has_room` is false.
  // REQUIRES: the key is absent; generation != 0; the slot is in a region of the first one's tier.
  [[nodiscard]] bool insert(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept;
  // Moves the entry of a key that is here, else inserts it: the tiers that it had. Nothing where there is no room for a new one.
  [[nodiscard]] std::optional<uint8_t> enter(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept;

  // REQUIRES: the key is present. `move` gives its chunk another slot and generation in the tier of the first region; its tiers and
  // further residencies stay.
  void move(const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept;
  void set_tiers(const ChunkKey& key, uint8_t tiers) noexcept;
  void add_tiers(const ChunkKey& key, uint8_t tiers) noexcept;
  void erase(const ChunkKey& key) noexcept;
  // Where the key is in a further tier; generation 0: no more. REQUIRES: the key is present; the slot's region has that tier.
  void set_residency(const ChunkKey& key, Tier tier, Residency residency) noexcept;
  [[nodiscard]] std::optional<Residency> residency(const ChunkKey& key, Tier tier) const noexcept;

  // The words of a slot. `open_slot`: it is lent to a chunk, nothing can be read, its checksums begin there. A generation word is
  // stored with release, after the slot's bytes and checksums. REQUIRES: the slot is one of the index.
  void open_slot(SlotAddress slot, uint32_t first_checksum) noexcept;
  void prefetch_words(SlotAddress slot) const noexcept;
  void set_generation(SlotAddress slot, uint64_t generation) noexcept;
  void set_checksums(SlotAddress slot, const uint32_t* checksums, uint32_t extents) noexcept;
  // How many extents of a slot can be read: stored with release, after their bytes and checksums. Wakes who follows the slot.
  void set_landed(SlotAddress slot, uint32_t extents) noexcept;
  // No more extents come into a slot: wakes who follows it.
  void end_landing(SlotAddress slot) noexcept;
  // Extents first .. first+count of a slot are in place, with these checksums; wakes who follows it. REQUIRES: `first` have landed.
  void land(SlotAddress slot, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept;
  [[nodiscard]] uint32_t landed(SlotAddress slot) const noexcept;
  [[nodiscard]] uint64_t generation(SlotAddress slot) const noexcept;
  [[nodiscard]] uint32_t checksum(SlotAddress slot, uint32_t extent) const noexcept;

  // Slots that a probe for the key looks at; nothing where it is absent.
  [[nodiscard]] std::optional<uint64_t> probe_length(const ChunkKey& key) const noexcept;
  [[nodiscard]] uint64_t count() const noexcept { return count_; }
  [[nodiscard]] const IndexShape& shape() const noexcept { return shape_; }

  // Where so many keys will be written to, with slots in the first region; nothing of parts that most of it will not be.
  [[nodiscard]] std::vector<WrittenSoon> pages_for(uint64_t count) const;

  // Counted by looking at every slot: entries in no slot of the arena, and entries with one of these tiers.
  [[nodiscard]] uint64_t count_placeless() const noexcept;
  [[nodiscard]] uint64_t count_in(uint8_t tiers) const noexcept;
  // Slots of a region that have a generation, counted alike.
  [[nodiscard]] uint64_t count_published(uint32_t region) const noexcept;

  // Recounts everything; one line per broken invariant. Takes no memory for parts of the table that were never used.
  [[nodiscard]] std::vector<std::string> verify() const;
  // The same of `limit` places from `position` on: entries where they are found, and named rightly. Returns where to go on, 0 at
  // the end. `is_right(key, record)`: whether an entry may name this record, or none.
  [[nodiscard]] uint64_t verify_part(uint64_t position, uint32_t limit, std::vector<std::string>& broken,
                                     const std::function<bool(const ChunkKey&, RecordId)>& is_right) const;

 private:
  // Calls `visit` with every position that may have an entry; those in pages that were never touched have none.
  template <typename Visit>
  void visit_touched(Visit visit) const;
  void verify_slot(uint64_t position, std::vector<std::string>& broken) const;
  struct Bequest {
    ChunkKey from;
    ChunkKey to;
  };

  [[nodiscard]] uint64_t home(const ChunkKey& key) const noexcept { return home_of(key, seed_, shape_.slots); }
  [[nodiscard]] uint64_t behind(uint64_t position) const noexcept {
    return position + 1 == shape_.slots ? 0 : position + 1;
  }
  // Slots from the first to the second, in probe order.
  [[nodiscard]] uint64_t distance(uint64_t first, uint64_t second) const noexcept {
    return second >= first ? second - first : second + shape_.slots - first;
  }
  // A chunk that is looked up is mostly asked for again at once, by what is done with it: where one was found last is looked at first.
  [[nodiscard]] std::optional<uint64_t> position_of(const ChunkKey& key) const noexcept {
    const TableSlot& last = slots_[last_position_];
    return last.generation != 0 && last.key == key ? std::optional(last_position_) : position_from(home(key), key);
  }
  // Where a key stands, or, where it does not, the free slot in which it would; nothing where there is none in reach.
  struct Probe {
    std::optional<uint64_t> position;
    bool is_found = false;
  };
  [[nodiscard]] Probe probe(uint64_t home, const ChunkKey& key) const noexcept;
  [[nodiscard]] std::optional<uint64_t> position_from(uint64_t home, const ChunkKey& key) const noexcept {
    const Probe found = probe(home, key);
    return found.is_found ? found.position : std::nullopt;
  }
  [[nodiscard]] std::optional<TableEntry> entry_at(std::optional<uint64_t> position) const noexcept;
  void move_entry(uint64_t position, RecordId record, uint64_t generation, SlotAddress slot) noexcept;
  void fill_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept;
  void write_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation, SlotAddress slot) noexcept;
  void store_further(uint64_t position, const FurtherSlot& further) noexcept;
  [[nodiscard]] SlotWords& words_at(SlotAddress slot) const noexcept;
  [[nodiscard]] bool is_slot_of(SlotAddress slot, Tier tier) const noexcept {
    return shape_.has(slot) && shape_.regions[slot.region].tier == tier;
  }
  [[nodiscard]] std::optional<uint64_t> free_position(const ChunkKey& key) const noexcept;
  void copy_slot(uint64_t target, uint64_t source) noexcept;
  void clear_slot(uint64_t position) noexcept;

  const std::shared_ptr<const Mapping> mapping_;
  const IndexShape shape_;
  const HashSeed seed_;
  IndexHeader* const header_;
  TableSlot* const slots_;
  FurtherSlot* further_ = nullptr;  // all regions have one tier
  std::vector<RegionWords> regions_;
  std::optional<Bequest> bequest_;
  uint64_t count_ = 0;  // equals header_->count
  mutable uint64_t last_position_ = 0;  // any; where the last key was found
};

}  // namespace kvpool
