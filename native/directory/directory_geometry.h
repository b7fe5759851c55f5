// The sizes of a directory: of its index, its arena or files, and how they are cut. A plain value; any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "shared_index/chunk_table.h"
#include "arena/slot_arena.h"
#include "records/kept_region.h"

namespace kvpool {

// The most bytes of an arena, and of a tier in files: where configurations end.
inline constexpr uint64_t ARENA_BYTES_MAX = uint64_t{4} << 40;
inline constexpr uint64_t FILES_BYTES_MAX = uint64_t{64} << 40;

// All sizes of a directory, computed before memory is mapped.
struct DirectoryGeometry {
  uint64_t capacity;  // payload bytes
  uint32_t max_chunks;
  ArenaShape arena;
  IndexShape index;  // of a tier on disk, which clients do not look into, and of a device, which is a region of DRAM's: nothing

  // One segment more than the capacity needs, so that a second size class finds a place beside a full first one.
  // Nothing where the numbers are out of range.
  // `further_entries`: table entries for chunks of lower tiers. `device`: the tier of copies, whose slots' words are in this index.
  [[nodiscard]] static std::optional<DirectoryGeometry> plan(uint64_t capacity, uint64_t segment_bytes, uint32_t max_chunks,
                                                             uint32_t further_entries = 0,
                                                             const DirectoryGeometry* device = nullptr);
  // Of a tier of copies in the memory of a device: whole segments of exactly this size, a multiple of huge pages, none more than
  // the capacity.
  [[nodiscard]] static std::optional<DirectoryGeometry> plan_device(uint64_t capacity, uint64_t segment_bytes, uint32_t max_chunks);
  // Of a tier on disk: whole segments of exactly this size, none more than the capacity, no slot over two of them.
  [[nodiscard]] static std::optional<DirectoryGeometry> plan_files(uint64_t segment_bytes, uint32_t segments,
                                                                   uint32_t max_chunks);
  // Of the region that its records lie in where they are to outlive the process.
  [[nodiscard]] KeptShape kept() const noexcept;
  // As a region of an index.
  [[nodiscard]] RegionShape region(Tier tier, Backing backing) const noexcept;
};

}  // namespace kvpool
