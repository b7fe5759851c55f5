// The sizes of a directory: of its index, its arena or files, and how they are cut. A plain value; any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "shared_index/chunk_table.h"
#include "arena/slot_arena.h"

namespace kvpool {

// The most bytes of an arena, and of a tier in files: where configurations end.
inline constexpr uint64_t ARENA_BYTES_MAX = uint64_t{4} << 40;
inline constexpr uint64_t FILES_BYTES_MAX = uint64_t{64} << 40;

// All sizes of a directory, computed before memory is mapped.
struct DirectoryGeometry {
  uint64_t capacity;  // payload bytes
  uint32_t max_chunks;
  ArenaShape arena;
  IndexShape index;  // of a tier on disk: nothing, clients do not look into it

  // One segment more than the capacity needs, so that a second size class finds a place beside a full first one.
  // Nothing where the numbers are out of range.
  // `further_entries`: table entries for chunks of lower tiers.
  [[nodiscard]] static std::optional<DirectoryGeometry> plan(uint64_t capacity, uint64_t segment_bytes,
                                                             uint32_t max_chunks, uint32_t further_entries = 0);
  // Of a tier on disk: whole segments of exactly this size, none more than the capacity, no slot over two of them.
  [[nodiscard]] static std::optional<DirectoryGeometry> plan_files(uint64_t segment_bytes, uint32_t segments,
                                                                   uint32_t max_chunks);
};

}  // namespace kvpool
