#include "copy/plain_copy.h"

#include <algorithm>
#include <cstring>

#include "copy/copy_checks.h"

namespace kvpool {

const char* plain_fault(const CacheView& view, std::span<const int64_t> block_ids, uint64_t chunk_blocks,
                        uint64_t bytes) noexcept {
  if (const char* fault = view_fault(view)) {
    return fault;
  }
  if (chunk_blocks == 0 || block_ids.size() % chunk_blocks != 0) {
    return "block_ids are no multiple of chunk_blocks";
  }
  uint64_t expected = 0;
  if (__builtin_mul_overflow(view.planes, view.plane_block_bytes, &expected) ||
      __builtin_mul_overflow(expected, view.bases.size() * block_ids.size(), &expected) || expected != bytes) {
    return "the chunks have another size than the blocks";
  }
  const auto is_outside = [&](int64_t id) { return id < 0 || id >= static_cast<int64_t>(view.blocks); };
  return std::any_of(block_ids.begin(), block_ids.end(), is_outside) ? "a block id lies outside the view" : nullptr;
}

void copy_blocks_plain(PlainCopy way, const CacheView& view, std::span<const int64_t> block_ids, uint64_t chunk_blocks,
                       uint8_t* chunks) noexcept {
  const uint64_t payload_bytes = view.payload_bytes(chunk_blocks);
  const uint64_t run_bytes = view.plane_block_bytes / view.runs;
  const uint64_t chunk_bytes = payload_bytes * view.bases.size();
  for (size_t own = 0; own < view.bases.size(); ++own) {
    for (size_t first = 0; first < block_ids.size(); first += chunk_blocks) {
      uint8_t* extent = chunks + first / chunk_blocks * chunk_bytes + own * payload_bytes;
      for (uint32_t plane = 0; plane < view.planes; ++plane) {
        for (const int64_t id : block_ids.subspan(first, chunk_blocks)) {
          for (uint64_t run = 0; run < view.runs; ++run, extent += run_bytes) {
            uint8_t* block = view.block(own, plane, id) + run * view.run_stride;
            std::memcpy(way == PlainCopy::GATHER ? extent : block, way == PlainCopy::GATHER ? block : extent, run_bytes);
          }
        }
      }
    }
  }
}

}  // namespace kvpool
