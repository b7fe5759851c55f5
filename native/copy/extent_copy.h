// Copies between an engine's paged KV and a chunk's extents, checksummed in the same pass.
//
// What it is: addressing. What it is not: a judge of whether bytes may be copied; its callers have checked ids and
// extents. What a view has for an extent, its payload, is stored plane by plane, each plane's blocks in the chunk's order:
//
//     extent:   | K: block 0 | block 1 | … | V: block 0 | block 1 | … |
//
// and block b of plane p begins at `bases[own] + p * plane_stride + b * block_stride` in engine memory, where `own` is the
// view's number of the extent. A payload is a layer, or one head group of it. A block's plane is one run of bytes, or `runs` of
// them of one length, `run_stride` apart: a head group in blocks that have all heads of a token together.
// What a client has put into memory of its own the daemon copies in the same way, extent by extent.
// A checksum is of the register that is stored, on every path that copies: bytes read twice can differ.
// One copy per byte; each function ends in a copy_fence. Any thread; the memory belongs to the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvpool {

// A block the engine holds already: its bytes are checked, not written.
inline constexpr int64_t SKIP_BLOCK = -1;

struct CacheView {
  std::vector<uint8_t*> bases;  // of each extent's payload
  uint32_t planes = 0;
  uint64_t blocks = 0;
  uint64_t plane_block_bytes = 0;
  uint64_t plane_stride = 0;
  uint64_t block_stride = 0;
  uint64_t runs = 1;  // in a block's plane; plane_block_bytes is the bytes of all of them
  uint64_t run_stride = 0;

  [[nodiscard]] uint8_t* block(size_t own, uint32_t plane, int64_t id) const noexcept {
    return bases[own] + plane * plane_stride + static_cast<uint64_t>(id) * block_stride;
  }
  // Bytes for an extent of a chunk of `chunk_blocks` blocks.
  [[nodiscard]] uint64_t payload_bytes(size_t chunk_blocks) const noexcept {
    return planes * chunk_blocks * plane_block_bytes;
  }
};

// Which extents of a chunk a copy is about: the view's extent j is the chunk's `numbers[j]`, or j where there are no numbers.
// An extent has `bytes` bytes, which a payload fills from the first one on; the rest is zero. `bytes` 0: the payload fills it.
struct ExtentMap {
  std::vector<uint32_t> numbers = {};
  uint64_t bytes = 0;

  [[nodiscard]] uint32_t of(uint32_t own) const noexcept { return numbers.empty() ? own : numbers[own]; }
  [[nodiscard]] uint64_t bytes_for(uint64_t payload_bytes) const noexcept { return bytes == 0 ? payload_bytes : bytes; }
};

// Engine to extent; the CRC-32C of the extent's bytes.
[[nodiscard]] uint32_t gather_payload(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                                      uint8_t* extent) noexcept;

// Extent to engine; the CRC-32C of the extent's bytes, skipped blocks included.
[[nodiscard]] uint32_t scatter_payload(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                                       const uint8_t* extent) noexcept;

// As the two above, of an extent of `extent_bytes`: what the payload leaves of it is made zero, or read, and is part of the CRC.
// REQUIRES: extent_bytes >= view.payload_bytes(block_ids.size()).
[[nodiscard]] uint32_t gather_extent(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                                     uint8_t* extent, uint64_t extent_bytes) noexcept;
[[nodiscard]] uint32_t scatter_extent(const CacheView& view, size_t own, std::span<const int64_t> block_ids,
                                      const uint8_t* extent, uint64_t extent_bytes) noexcept;

// Extents that lie one behind the other, from one region into another; writes the CRC-32C of each, of the bytes that were
// stored. Somebody else may be writing the source.
void copy_whole_extents(uint8_t* target, const uint8_t* source, uint32_t extents, uint64_t extent_bytes,
                        uint32_t* crcs) noexcept;

}  // namespace kvpool
