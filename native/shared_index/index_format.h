// The format of the shared index: its header, regions, entries and words, and where each part of it lies.
//
// What it is: fixed layouts, little endian. What it is not: how they are written (chunk_table.h) or read (index_view.cpp).
//
//   offset 0          IndexHeader, one page, which names the regions and where their words lie
//   4096              TableSlot[slots], one cache line each: key, tiers, residency in the tier of region 0
//   further_offset    FurtherSlot[slots], one cache line each: residencies in other arena tiers; only where regions have several
//   for each region   SlotWords[its slots], by slot number: generation, extents in place, where its checksums begin
//                     u32 checksums[its checksums]: CRC-32C of each extent of a slot, one behind the other
//
// A region is memory that slots are cut from. Words belong to slots, not to pages: how many slots a region can have at most is
// decided when it is made: see ArenaShape in slot_arena.h. Each part begins at a multiple of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "hash/keyed_hash.h"

namespace kvpool {

inline constexpr char INDEX_MAGIC[8] = {'K', 'V', 'P', 'I', 'N', 'D', 'X', '1'};
inline constexpr uint32_t INDEX_VERSION = 1;
inline constexpr uint64_t MIN_TABLE_SLOTS = 64;
inline constexpr uint64_t MAX_TABLE_SLOTS = uint64_t{1} << 30;
// Arenas of a node: one for each of eight devices, one for each of some trust domains, and DRAM's.
inline constexpr uint32_t REGIONS_MAX = 32;
// The region of the DRAM tier's arena, which every daemon has, and that of the memory of a device, if it has one.
inline constexpr uint32_t DRAM_REGION = 0;
inline constexpr uint32_t DEVICE_REGION = 1;
inline constexpr uint32_t LANDING_FAILED = 0x80000000U;
inline constexpr uint64_t PART_ALIGNMENT = 64;

// What a region's bytes are.
enum class Backing : uint8_t { MEMFD = 1, DEVICE = 2, FILE = 3 };

struct RegionHeader {
  uint64_t bytes;             // of the region
  uint64_t slots;             // that it can have at most
  uint64_t checksums;         // of all their extents, at most
  uint64_t words_offset;      // SlotWords[slots]
  uint64_t checksums_offset;  // u32[checksums]
  uint8_t tier;
  uint8_t backing;
  uint8_t reserved[22];
};
static_assert(sizeof(RegionHeader) == 64);

struct alignas(64) IndexHeader {
  char magic[8];
  uint32_t version;
  uint32_t regions;
  uint64_t slots;
  uint64_t further_offset;  // FurtherSlot[slots]; 0: no region has another tier than the first one
  uint64_t epoch[2];
  HashSeed seed;
  alignas(64) uint64_t moves;  // read by every probe that misses: a line of its own
  alignas(64) uint64_t count;  // entries
  alignas(64) RegionHeader region[REGIONS_MAX];
};
static_assert(offsetof(IndexHeader, seed) == 48);
static_assert(offsetof(IndexHeader, moves) == 64);
static_assert(offsetof(IndexHeader, count) == 128);
static_assert(offsetof(IndexHeader, region) == 192);
static_assert(sizeof(IndexHeader) <= PAGE_BYTES);

struct alignas(64) TableSlot {
  uint32_t seq;         // odd while the words below, or the key's FurtherSlot, change
  uint32_t record;      // the daemon's record; means nothing to a client
  uint64_t generation;  // of the slot, or any but 0 where the key is in none of this tier; 0: the entry is empty
  ChunkKey key;
  uint32_t number;  // of the slot, UINT32_MAX: none
  uint8_t region;   // of the slot
  uint8_t tiers;    // bit t: readable in tier t, through DRAM where the residency does not name another way; 0: being written
  uint8_t reserved[10];
};
static_assert(sizeof(TableSlot) == 64);
static_assert(offsetof(TableSlot, key) == 16);
static_assert(offsetof(TableSlot, number) == 48);

// Where a key is in one arena tier.
struct StoredResidency {
  uint64_t generation;  // 0: not there
  uint32_t number;
  uint8_t region;
  uint8_t reserved[3];
};
static_assert(sizeof(StoredResidency) == 16);

// By level; that of the first region's tier stands in the TableSlot.
struct alignas(64) FurtherSlot {
  StoredResidency of_level[TIER_LEVELS];
};
static_assert(sizeof(FurtherSlot) == 64);

// What readers of a slot look at: in one cache line.
struct SlotWords {
  uint64_t generation;      // of the chunk in the slot; 0: do not read
  uint32_t landed;          // extents in place; LANDING_FAILED: no more come
  uint32_t first_checksum;  // extent e of the slot has checksum first_checksum + e of its region
};
static_assert(sizeof(SlotWords) == 16);

// A region, before its index is laid out.
struct RegionShape {
  uint64_t bytes = 0;
  uint64_t slots = 0;
  uint64_t checksums = 0;
  Tier tier = Tier::DRAM;
  Backing backing = Backing::MEMFD;
  friend bool operator==(const RegionShape&, const RegionShape&) noexcept = default;
};

// Where the parts of an index begin.
struct IndexLayout {
  uint64_t further_offset = 0;
  std::vector<RegionHeader> regions;
  uint64_t total_bytes = 0;
};

// The numbers that an index is made of: entries of its table, and regions.
struct IndexShape {
  uint64_t slots = 0;
  std::vector<RegionShape> regions{};

  // How many entries a table may have, so that probes stay short: at 5/8 they look at 1.8 slots for a key that is there and 4.1
  // for one that is not, at most 94 (simulated: 10 million random homes).
  [[nodiscard]] uint64_t max_entries() const noexcept { return slots / 8 * 5; }
  [[nodiscard]] uint64_t table_end() const noexcept { return PAGE_BYTES + slots * sizeof(TableSlot); }
  [[nodiscard]] bool has_further_tiers() const noexcept;
  [[nodiscard]] bool has(SlotAddress slot) const noexcept {
    return slot.region < regions.size() && slot.number < regions[slot.region].slots;
  }
  // REQUIRES: valid().
  [[nodiscard]] IndexLayout layout() const;
  [[nodiscard]] uint64_t total_bytes() const { return layout().total_bytes; }
  // The smallest number of slots for so many entries.
  [[nodiscard]] static uint64_t slots_for(uint64_t entries) noexcept;
  // False where the numbers are out of the format's range, so that the sums of a layout cannot overflow.
  [[nodiscard]] bool valid() const noexcept;
};

// The sizes in a header that a reader found in shared memory; nothing where it is no index of this version, or any part of it would
// lie outside `size` bytes. The header is read once: what is answered is the reader's own.
struct FoundIndex {
  IndexShape shape;
  IndexLayout layout;
  HashSeed seed;
};
[[nodiscard]] bool read_index_header(const uint8_t* region, uint64_t size, FoundIndex& found);

}  // namespace kvpool
