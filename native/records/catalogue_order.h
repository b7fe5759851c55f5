// The order in which an earlier life's chunks are restored: the most recent first, ancestors before descendants.
//
// Rows come from a disk and may say anything: what is asked of one is its checksum, what is done with it must end.
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace kvpool {

// A row as the catalogue keeps it, its key in front. Little endian; see docs/ssd-format.md.
struct CatalogueRow {
  uint8_t key[KEY_BYTES];
  uint8_t parent[KEY_BYTES];  // zeros: the chunk is the first of its prompt
  uint64_t offset;
  uint64_t generation;
  uint64_t recency;
  uint64_t extent_bytes;
  uint32_t extents;
  uint32_t name_space;
  uint32_t priority;
  uint32_t duration_s;
  uint32_t crc;
  uint32_t pad;
};
static_assert(sizeof(CatalogueRow) == 120);

// Whether a row is what was written: its checksum, over all that stands before it, and a generation that can have been given.
[[nodiscard]] bool is_good(const CatalogueRow& row) noexcept;

// Numbers of the good rows, in restoring order. A chunk counts as used when a descendant was, whatever order they were written in.
// Rows whose ancestors are lacking, or are their own descendants, stand where they may; of rows of one key the first counts.
// O(n log n). REQUIRES: n < 2^32 - 1.
[[nodiscard]] std::vector<uint32_t> restoring_order(const CatalogueRow* rows, size_t n);

}  // namespace kvpool
