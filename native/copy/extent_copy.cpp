#include "copy/extent_copy.h"

#include <cstring>

#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

// Calls `visit(run, extent)` with where each run of a payload lies in engine memory, nullptr in a skipped block, and in the
// extent.
template <typename Byte, typename Visit>
void visit_runs(const CacheView& view, size_t own, std::span<const int64_t> block_ids, Byte* extent, Visit visit) noexcept {
  const uint64_t run_bytes = view.plane_block_bytes / view.runs;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : block_ids) {
      for (uint64_t run = 0; run < view.runs; ++run, extent += run_bytes) {
        visit(id == SKIP_BLOCK ? nullptr : view.block(own, plane, id) + run * view.run_stride, extent);
      }
    }
  }
}

uint32_t gather_runs(const CacheView& view, size_t own, std::span<const int64_t> block_ids, uint8_t* extent) noexcept {
  const uint64_t run_bytes = view.plane_block_bytes / view.runs;
  const size_t variant = copy_variant(CopyKind::SAVE, run_bytes);
  uint32_t crc = 0;
  visit_runs(view, own, block_ids, extent, [&](const uint8_t* run, uint8_t* target) {
    crc = copy_piece(variant, crc, target, run, run_bytes, run);
  });
  copy_fence();
  return crc;
}

uint32_t scatter_runs(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                      const uint8_t* extent) noexcept {
  const uint64_t run_bytes = view.plane_block_bytes / view.runs;
  const size_t variant = copy_variant(CopyKind::LOAD, run_bytes);
  uint32_t crc = 0;
  visit_runs(view, own, block_ids, extent, [&](uint8_t* run, const uint8_t* source) {
    crc = run == nullptr ? crc32c(crc, source, run_bytes)
                         : copy_piece(variant, crc, run, source, run_bytes, source + run_bytes);
  });
  copy_fence();
  return crc;
}

}  // namespace

uint32_t gather_payload(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                        uint8_t* extent) noexcept {
  if (view.runs > 1) {
    return gather_runs(view, own, block_ids, extent);
  }
  const size_t variant = copy_variant(CopyKind::SAVE, view.plane_block_bytes);
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (size_t number = 0; number < block_ids.size(); ++number) {
      const uint8_t* const block = view.block(own, plane, block_ids[number]);
      const uint8_t* const next = number + 1 < block_ids.size() ? view.block(own, plane, block_ids[number + 1])
                                  : plane + 1 < view.planes     ? view.block(own, plane + 1, block_ids[0])
                                                                : block;
      crc = copy_piece(variant, crc, extent, block, view.plane_block_bytes, next);
      extent += view.plane_block_bytes;
    }
  }
  copy_fence();
  return crc;
}

uint32_t scatter_payload(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                         const uint8_t* extent) noexcept {
  if (view.runs > 1) {
    return scatter_runs(view, own, block_ids, extent);
  }
  const size_t variant = copy_variant(CopyKind::LOAD, view.plane_block_bytes);
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : block_ids) {
      const uint8_t* const next = extent + view.plane_block_bytes;
      crc = id == SKIP_BLOCK ? crc32c(crc, extent, view.plane_block_bytes)
                             : copy_piece(variant, crc, view.block(own, plane, id), extent, view.plane_block_bytes, next);
      extent = next;
    }
  }
  copy_fence();
  return crc;
}

uint32_t gather_extent(const CacheView& view, size_t own, std::span<const int64_t> block_ids, uint8_t* extent,
                       uint64_t extent_bytes) noexcept {
  const uint32_t crc = gather_payload(view, own, block_ids, extent);
  const uint64_t filled = view.payload_bytes(block_ids.size());
  if (filled == extent_bytes) {
    return crc;
  }
  std::memset(extent + filled, 0, extent_bytes - filled);
  return crc32c(crc, extent + filled, extent_bytes - filled);
}

uint32_t scatter_extent(const CacheView& view, size_t own, std::span<const int64_t> block_ids, const uint8_t* extent,
                        uint64_t extent_bytes) noexcept {
  const uint32_t crc = scatter_payload(view, own, block_ids, extent);
  const uint64_t filled = view.payload_bytes(block_ids.size());
  if (filled == extent_bytes) {
    return crc;
  }
  const uint32_t whole = crc32c(crc, extent + filled, extent_bytes - filled);
  copy_fence();
  return whole;
}

void copy_whole_extents(uint8_t* target, const uint8_t* source, uint32_t extents, uint64_t extent_bytes,
                        uint32_t* crcs) noexcept {
  for (uint32_t extent = 0; extent < extents; ++extent) {
    crcs[extent] = copy_crc32c(0, target + extent * extent_bytes, source + extent * extent_bytes, extent_bytes);
  }
  copy_fence();
}

}  // namespace kvpool
