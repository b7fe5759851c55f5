#include "directory/directory_geometry.h"

#include <algorithm>
#include <bit>

#include "eviction/eviction_policy.h"
#include "records/chunk_records.h"
#include "records/kept_tokens.h"

namespace kvpool {
namespace {

// From this size on segments are multiples of huge pages; below, rounding would waste the arena.
constexpr uint64_t HUGE_SEGMENT_BYTES = uint64_t{16} << 20;
constexpr uint64_t SEGMENTS_AT_LEAST = 8;
constexpr uint64_t MAX_ENTRIES = MAX_TABLE_SLOTS / 8 * 5;
// In an arena of up to so many slots of 4 KiB the words of slots take little memory; a larger arena has larger slots.
constexpr uint64_t SMALL_SLOTS_MAX = uint64_t{1} << 18;
constexpr uint64_t LEAST_SLOT_BYTES_MAX = uint64_t{32} << 10;
// Of a slot of the least size: extents of less than 2 KiB take more room than their bytes in a large arena.
constexpr uint64_t SLOT_EXTENTS = 16;
// Checksums of an arena: their numbers have 32 bits.
constexpr uint64_t CHECKSUMS_MAX = uint64_t{1} << 31;
// Address space for token ids that are kept: twice what configurations allow them without a word, for cells of several sizes. Their
// numbers have 32 bits.
constexpr uint64_t KEPT_TOKENS_PART = 8;
constexpr uint64_t KEPT_TOKENS_MAX = uint64_t{32} << 30;

// No more chunks than `max_chunks` have entries, so a slot may be as large as the capacity gives each of them: as many smaller chunks
// fit as before. A power of two of pages, so that segments are whole slots.
uint64_t least_slot_bytes(uint64_t capacity, uint32_t max_chunks) noexcept {
  const uint64_t of_chunk = std::bit_floor(std::min(capacity / max_chunks, capacity / SMALL_SLOTS_MAX) | 1);
  return std::clamp(of_chunk, PAGE_BYTES, LEAST_SLOT_BYTES_MAX);
}

// Segments whose slots readers know: as many words as `max_chunks` chunks can need.
ArenaShape shape_of(uint64_t segment_bytes, uint64_t segments, uint64_t capacity, uint32_t max_chunks) noexcept {
  ArenaShape arena{segment_bytes, static_cast<uint32_t>(segments)};
  arena.slot_bytes_min = least_slot_bytes(capacity, max_chunks);
  arena.checksum_bytes_min = std::max({arena.slot_bytes_min / SLOT_EXTENTS, std::bit_ceil(capacity / CHECKSUMS_MAX),
                                       ArenaShape{}.checksum_bytes_min});
  return arena;
}

}  // namespace

std::optional<DirectoryGeometry> DirectoryGeometry::plan(uint64_t capacity, uint64_t segment_bytes,
                                                         uint32_t max_chunks, uint32_t further_entries,
                                                         const DirectoryGeometry* device) {
  const uint64_t entries = uint64_t{max_chunks} + further_entries;
  if (capacity == 0 || capacity > ARENA_BYTES_MAX || segment_bytes == 0 || max_chunks == 0 ||
      entries > MAX_ENTRIES) {
    return std::nullopt;
  }
  const uint64_t share = (capacity + SEGMENTS_AT_LEAST - 1) / SEGMENTS_AT_LEAST;
  uint64_t bytes = round_up(std::min(segment_bytes, share), PAGE_BYTES);
  if (bytes >= HUGE_SEGMENT_BYTES) {
    bytes = round_up(bytes, HUGE_PAGE_BYTES);
  }
  const uint64_t segments = (capacity + bytes - 1) / bytes + 1;
  if (segments > UINT32_MAX) {
    return std::nullopt;
  }
  DirectoryGeometry planned{capacity, max_chunks, shape_of(bytes, segments, capacity, max_chunks), {IndexShape::slots_for(entries)}};
  planned.index.regions.push_back(planned.region(Tier::DRAM, Backing::MEMFD));
  if (device != nullptr) {
    planned.index.regions.push_back(device->region(Tier::HBM, Backing::DEVICE));
  }
  return planned.index.valid() ? std::optional(std::move(planned)) : std::nullopt;
}

std::optional<DirectoryGeometry> DirectoryGeometry::plan_device(uint64_t capacity, uint64_t segment_bytes, uint32_t max_chunks) {
  if (capacity > ARENA_BYTES_MAX || segment_bytes == 0 || segment_bytes % HUGE_PAGE_BYTES != 0 || capacity < segment_bytes ||
      max_chunks == 0 || max_chunks > MAX_ENTRIES) {
    return std::nullopt;
  }
  const ArenaShape arena = shape_of(segment_bytes, capacity / segment_bytes, capacity, max_chunks);
  return DirectoryGeometry{arena.total_bytes(), max_chunks, arena, IndexShape{}};
}

KeptShape DirectoryGeometry::kept() const noexcept {
  const uint64_t token_bytes = round_up(std::min(capacity / KEPT_TOKENS_PART + 1, KEPT_TOKENS_MAX), KeptTokens::SLAB_BYTES);
  return {capacity,    arena.segment_bytes, arena.slot_bytes_min,   arena.checksum_bytes_min,
          token_bytes, learned_bytes(max_chunks), arena.segments, arena.max_run_segments,
          max_chunks,  sizeof(ChunkRecord)};
}

RegionShape DirectoryGeometry::region(Tier tier, Backing backing) const noexcept {
  return {arena.total_bytes(), arena.segments * arena.slots_per_segment(), arena.segments * arena.checksums_per_segment(), tier, backing};
}

std::optional<DirectoryGeometry> DirectoryGeometry::plan_files(uint64_t segment_bytes, uint32_t segments,
                                                               uint32_t max_chunks) {
  const bool is_in_range = segment_bytes != 0 && segment_bytes % PAGE_BYTES == 0 && segments != 0 &&
                           segment_bytes <= FILES_BYTES_MAX / segments;
  if (!is_in_range || max_chunks == 0 || max_chunks > MAX_ENTRIES) {
    return std::nullopt;
  }
  const ArenaShape arena{segment_bytes, segments, 1};
  return DirectoryGeometry{arena.total_bytes(), max_chunks, arena, IndexShape{}};
}

}  // namespace kvpool
