// Where layers of promoted chunks are announced: words of the shared index, written by I/O threads.
//
// A slot under promotion belongs to the I/O until it has landed or failed; only then does the control thread touch its words
// again. Readers in any process wait for a slot's own word (landing_wait.h): a landing wakes nobody else. Threads: any; calls for one slot one after another.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "shared_index/chunk_table.h"
#include "base/memory.h"

namespace kvpool {

class LandingBoard {
 public:
  // REQUIRES: a writable region that a ChunkTable has formatted.
  explicit LandingBoard(std::shared_ptr<const Mapping> index);

  // Layers first .. first+count of the slot at `arena_offset` are in place, with these checksums.
  void land(uint64_t arena_offset, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept;
  // No more layers come.
  void fail(uint64_t arena_offset) noexcept;

 private:
  void tell(uint64_t arena_offset, uint32_t word) noexcept;

  const std::shared_ptr<const Mapping> index_;
  IndexHeader* const header_;
  const IndexShape shape_;
};

}  // namespace kvpool
