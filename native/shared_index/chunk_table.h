// The shared index: a hash table of chunks in a memfd, written by the daemon alone, probed by every client.
//
// What it is: key -> (generation, place, tiers), one generation word and one landing word per arena page, and one CRC-32C
// per layer of a slot. What it is not: a right to anything. A hit is a hint that carries a generation; who copied bytes checks
// afterwards that `generation_at` still says the same.
//
// Layout of the region, little endian:
//
//   offset 0      IndexHeader, one page
//   4096          TableSlot[slots], one cache line each
//   then          u64 generations[pages]    generation of the chunk whose slot starts at that page; 0: do not read
//   then          u32 checksums[4 * pages]  layer l of the slot at page p is word 4*p + l
//   then          u32 landings[pages]       layers in place of the slot that starts there; LANDING_FAILED: no more come
//
// Table: linear probing from the key's home, at most MAX_PROBE slots, behind the last one comes the first, load at most 5/8,
// erase by backward shift, so there are no tombstones and no empty slot lies between a key and its home. A key's home depends on
// `seed`, drawn by each daemon: nobody can choose keys beforehand that crowd a place. Who reads the seed can: a key that finds
// no free slot in reach takes the slot of another one (`bequeath`), whose chunk has been evicted for it.
//
// Reading while the writer writes. All shared words are atomics; data words are stored with release and loaded
// with acquire, which makes the sequence counter below correct without fences.
//   1. A slot: the writer makes `seq` odd, stores the words, makes it even. A reader that saw an odd or a changed
//      `seq` takes the slot as occupied by something else and goes on. (`tiers` alone changes without `seq`.)
//   2. A shift copies an entry to its new place, bumps `moves`, and only then overwrites the old place. At every
//      moment a key that is not itself being inserted or erased therefore stands whole in at least one slot. A
//      reader that found nothing looks at `moves`: if it changed, or a slot was in flux, it looks again (at most
//      MAX_LOOKS times; then it answers "miss", which is always allowed).
//
// Reading a chunk that is just being promoted: its generation word is set from the start, its landing word rises layer by
// layer after the layer's bytes and checksum are there. Readers wait on that word (futex, landing_wait.h).
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

namespace kvpool {

inline constexpr char INDEX_MAGIC[8] = {'K', 'V', 'P', 'I', 'N', 'D', 'X', '1'};
inline constexpr uint32_t INDEX_VERSION = 3;
inline constexpr uint64_t MIN_TABLE_SLOTS = 64;
inline constexpr uint64_t MAX_TABLE_SLOTS = uint64_t{1} << 30;
inline constexpr uint32_t MAX_PROBE = 256;
inline constexpr uint32_t MAX_LOOKS = 64;
inline constexpr uint32_t CHECKSUMS_PER_PAGE = 4;
inline constexpr uint32_t LANDING_FAILED = 0x80000000U;
// The page of an entry that is in no slot of the arena.
inline constexpr uint32_t NO_PAGE = UINT32_MAX;

struct alignas(64) IndexHeader {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint64_t slots;
  uint64_t arena_bytes;
  uint64_t epoch[2];
  HashSeed seed;
  alignas(64) uint64_t moves;  // read by every probe that misses: a line of its own
  alignas(64) uint64_t count;  // entries
};
static_assert(sizeof(IndexHeader) == 192);
static_assert(sizeof(IndexHeader) <= PAGE_BYTES);

struct alignas(64) TableSlot {
  uint32_t seq;         // odd while the words below change
  uint32_t record;      // the daemon's record; means nothing to a client
  uint64_t generation;  // 0: empty
  ChunkKey key;
  uint32_t page;  // arena offset / PAGE_BYTES, or NO_PAGE
  uint8_t tiers;  // bit t: readable in tier t; 0: being written
  uint8_t reserved[11];
};
static_assert(sizeof(TableSlot) == 64);
static_assert(offsetof(TableSlot, key) == 16);
static_assert(offsetof(TableSlot, page) == 48);

// Where the parts of an index lie, for a table of so many slots over an arena of `arena_bytes`.
struct IndexShape {
  uint64_t slots = 0;
  uint64_t arena_bytes = 0;

  // How many entries a table may have, so that probes stay short: at 5/8 they look at 1.8 slots for a key that is there and 4.1
  // for one that is not, at most 94 (simulated: 10 million random homes).
  [[nodiscard]] uint64_t max_entries() const noexcept { return slots / 8 * 5; }
  [[nodiscard]] uint64_t page_count() const noexcept { return arena_bytes / PAGE_BYTES; }
  [[nodiscard]] uint64_t generations_offset() const noexcept { return PAGE_BYTES + slots * sizeof(TableSlot); }
  [[nodiscard]] uint64_t checksums_offset() const noexcept {
    return round_up(generations_offset() + page_count() * sizeof(uint64_t), 64);
  }
  [[nodiscard]] uint64_t landings_offset() const noexcept {
    return round_up(checksums_offset() + page_count() * CHECKSUMS_PER_PAGE * sizeof(uint32_t), 64);
  }
  [[nodiscard]] uint64_t total_bytes() const noexcept {
    return round_up(landings_offset() + page_count() * sizeof(uint32_t), PAGE_BYTES);
  }
  // The smallest number of slots for so many entries.
  [[nodiscard]] static uint64_t slots_for(uint64_t entries) noexcept;
  // False where the numbers are out of the format's range, so that the sums above cannot overflow.
  [[nodiscard]] bool valid() const noexcept;
};

// One answer of the table.
struct TableEntry {
  RecordId record;
  uint64_t generation;
  PageIndex page;
  uint8_t tiers;
};

// A reader's view of an index, in any process. Everything read is untrusted: offsets are checked, waits are bounded.
class IndexView {
 public:
  // Returns nothing if the region is not an index of this version, or is too small for what its header says.
  [[nodiscard]] static std::shared_ptr<const IndexView> attach(std::shared_ptr<const Mapping> mapping);

  // Length of the run of readable chunks from the first key on; `levels[i]` = fastest tier of each chunk of it.
  // `keys` are n packed keys, `levels` has room for n.
  [[nodiscard]] size_t lookup(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept;

  [[nodiscard]] std::optional<TableEntry> find(const ChunkKey& key) const noexcept;

  // Whether somebody has reserved the chunk and not committed it yet.
  [[nodiscard]] bool is_being_written(const ChunkKey& key) const noexcept;

  // Generation of the readable chunk whose slot starts at `offset`; 0 where there is none (or no such slot).
  [[nodiscard]] uint64_t generation_at(uint64_t offset) const noexcept;

  // CRC-32C of a layer of the slot at `offset`; 0 outside the arena: check with `covers` beforehand.
  [[nodiscard]] uint32_t checksum_at(uint64_t offset, uint32_t layer) const noexcept;

  // Layers in place of the slot at `offset`, or LANDING_FAILED; 0 outside the arena.
  [[nodiscard]] uint32_t landed_at(uint64_t offset) const noexcept;
  // The word that says so, to wait on (landing_wait.h); nullptr outside the arena.
  [[nodiscard]] const uint32_t* landing_word(uint64_t offset) const noexcept;

  // Whether a slot at `offset` with `layers` layers has its words inside the index.
  [[nodiscard]] bool covers(uint64_t offset, uint32_t layers) const noexcept;

  [[nodiscard]] uint64_t arena_bytes() const noexcept { return shape_.arena_bytes; }
  [[nodiscard]] uint64_t count() const noexcept;
  [[nodiscard]] std::string epoch() const;  // 16 bytes

 private:
  IndexView(std::shared_ptr<const Mapping> mapping, IndexShape shape) noexcept;
  [[nodiscard]] std::optional<TableEntry> find_from(uint64_t home, const ChunkKey& key) const noexcept;

  const std::shared_ptr<const Mapping> mapping_;
  const IndexShape shape_;
  const IndexHeader* const header_;
  const TableSlot* const slots_;
  const uint64_t* const generations_;
  const uint32_t* const checksums_;
  const uint32_t* const landings_;
  const HashSeed seed_;
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
  // Asks the cache for where the probe for a key begins; `find_from` goes on from there.
  [[nodiscard]] uint64_t prefetch(const ChunkKey& key) const noexcept;
  [[nodiscard]] std::optional<TableEntry> find_from(uint64_t home, const ChunkKey& key) const noexcept;

  // Whether a free slot is near enough to the key's home. Erasing other keys never makes this false.
  [[nodiscard]] bool is_in_reach(const ChunkKey& key) const noexcept { return free_position(key).has_value(); }
  // The keys that stand in all the slots where this one could.
  [[nodiscard]] std::vector<ChunkKey> keys_in_reach(const ChunkKey& key) const;
  // When `from` is erased next, `to` gets its slot, in no slot of the arena and with tiers = 0. False, and nothing is changed, where
  // `from` does not stand in reach of `to`. REQUIRES: `from` is present, `to` absent.
  [[nodiscard]] bool bequeath(const ChunkKey& from, const ChunkKey& to) noexcept;
  // Whether insert would take the key: in reach, and below the largest load.
  [[nodiscard]] bool has_room(const ChunkKey& key) const noexcept;

  // Adds a key with tiers = 0; `page` unset where it is in no slot. Returns false, and does nothing, where `has_room` is false.
  // REQUIRES: the key is absent; generation != 0.
  [[nodiscard]] bool insert(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept;

  // REQUIRES: the key is present. `move` gives its chunk another place and generation, its tiers stay.
  void move(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept;
  void set_tiers(const ChunkKey& key, uint8_t tiers) noexcept;
  void erase(const ChunkKey& key) noexcept;

  // The words of a slot. A generation word is stored with release, after the slot's bytes and checksums.
  void set_generation(PageIndex page, uint64_t generation) noexcept;
  void set_checksums(PageIndex page, const uint32_t* checksums, uint32_t layers) noexcept;
  // How many layers of a slot can be read: stored with release, after their bytes and checksums.
  void set_landed(PageIndex page, uint32_t layers) noexcept;
  [[nodiscard]] uint64_t generation(PageIndex page) const noexcept;
  [[nodiscard]] uint32_t checksum(PageIndex page, uint32_t layer) const noexcept;

  // Slots that a probe for the key looks at; nothing where it is absent.
  [[nodiscard]] std::optional<uint64_t> probe_length(const ChunkKey& key) const noexcept;
  [[nodiscard]] uint64_t count() const noexcept { return count_; }
  [[nodiscard]] const IndexShape& shape() const noexcept { return shape_; }

  // Counted by looking at every slot: entries in no slot of the arena, and entries with one of these tiers.
  [[nodiscard]] uint64_t count_placeless() const noexcept;
  [[nodiscard]] uint64_t count_in(uint8_t tiers) const noexcept;

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
  [[nodiscard]] std::optional<uint64_t> position_of(const ChunkKey& key) const noexcept {
    return position_from(home(key), key);
  }
  [[nodiscard]] std::optional<uint64_t> position_from(uint64_t home, const ChunkKey& key) const noexcept;
  void write_slot(uint64_t position, const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept;
  [[nodiscard]] std::optional<uint64_t> free_position(const ChunkKey& key) const noexcept;
  void copy_slot(uint64_t target, uint64_t source) noexcept;
  void clear_slot(uint64_t position) noexcept;

  const std::shared_ptr<const Mapping> mapping_;
  const IndexShape shape_;
  const HashSeed seed_;
  IndexHeader* const header_;
  TableSlot* const slots_;
  uint64_t* const generations_;
  uint32_t* const checksums_;
  uint32_t* const landings_;
  std::optional<Bequest> bequest_;
  uint64_t count_ = 0;  // equals header_->count
};

}  // namespace kvpool
