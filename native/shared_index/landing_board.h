// Landing board: the words of the shared index in which I/O threads publish the extents of promoted chunks.
//
// A slot under promotion belongs to the I/O until it has landed or failed; only then does the control thread touch its words
// again. Readers in any process wait for a slot's own word (landing_wait.h): a landing wakes nobody else.
// Threads: any; calls for one slot one after another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "shared_index/index_words.h"

namespace kvpool {

class LandingBoard {
 public:
  // REQUIRES: a writable region that a ChunkTable has formatted.
  explicit LandingBoard(std::shared_ptr<const Mapping> index);

  // Extents first .. first+count of the slot are in place, with these checksums. Extents land in their order: where `first` is not
  // how many have landed, no more extents come. REQUIRES: the index has the slot.
  void land(SlotAddress slot, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept;
  // No more extents come.
  void fail(SlotAddress slot) noexcept;

 private:
  [[nodiscard]] SlotWords& words_of_slot(SlotAddress slot) const noexcept;
  static void publish(SlotWords& slot, uint32_t word) noexcept;

  const std::shared_ptr<const Mapping> index_;
  std::vector<RegionWords> regions_;
};

}  // namespace kvpool
