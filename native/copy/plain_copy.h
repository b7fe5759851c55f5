// Floors of the benchmarks: the addressing of a save or load with memcpy of each piece and no checksum.
//
// What it is: what somebody would write who does not verify. What it is not: a way that stores anything.
// Any thread; the memory belongs to the caller.
#pragma once

#include <cstdint>
#include <span>

#include "copy/extent_copy.h"

namespace kvpool {

enum class PlainCopy : uint8_t { GATHER, SCATTER };

// What is wrong with the ids or the size of `chunks`, or nullptr.
[[nodiscard]] const char* plain_fault(const CacheView& view, std::span<const int64_t> block_ids, uint64_t chunk_blocks,
                                      uint64_t bytes) noexcept;

// All extents between the view and whole chunks, one behind the other, in the order of a save: extent by extent, each of all
// chunks. REQUIRES: no plain_fault.
void copy_blocks_plain(PlainCopy way, const CacheView& view, std::span<const int64_t> block_ids, uint64_t chunk_blocks,
                       uint8_t* chunks) noexcept;

}  // namespace kvpool
