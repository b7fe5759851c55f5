// Kept tokens: room for token ids in a kept region, in cells of any size.
//
// What it is: slabs of one size of cells each. A cell says whose ids it has, and its checksum is right only when it has them. What it is
// not: what finds the ids of a record (TokenIds), or a bound of how much is stored, but for its own size.
//
// Invariants: a slab has cells of one size; it is among those with room where one of its cells is free; one without a cell in use is
// free for any size.
// Threads: the control thread only; `read_cell` any. O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvpool {

struct TokenCell {
  uint32_t crc;         // of all that follows
  uint32_t words;       // of a free cell: the next one
  uint64_t generation;  // of the chunk; 0: the cell is free

  [[nodiscard]] int32_t* ids() noexcept { return reinterpret_cast<int32_t*>(this + 1); }
  [[nodiscard]] const int32_t* ids() const noexcept { return reinterpret_cast<const int32_t*>(this + 1); }
};
static_assert(sizeof(TokenCell) == 16);

[[nodiscard]] uint32_t crc_of(const TokenCell& cell) noexcept;

class KeptTokens {
 public:
  static constexpr uint64_t SLAB_BYTES = uint64_t{64} << 10;

  // REQUIRES: zeroed memory, whole slabs, that lives as long.
  KeptTokens(uint8_t* memory, uint64_t bytes) noexcept : memory_(memory), slabs_max_(static_cast<uint32_t>(bytes / SLAB_BYTES)) {}
  KeptTokens(const KeptTokens&) = delete;
  KeptTokens& operator=(const KeptTokens&) = delete;

  // The number of a cell for so many words, which are not yet its own; 0: there is no room. REQUIRES: it fits a slab.
  [[nodiscard]] uint32_t take(uint32_t words);
  void give_back(uint32_t number) noexcept;
  [[nodiscard]] TokenCell& at(uint32_t number) const noexcept { return *cell_at(number - 1); }

 private:
  static constexpr uint32_t NONE = UINT32_MAX;
  static constexpr uint32_t UNIT_BYTES = sizeof(TokenCell);
  static constexpr uint32_t SLAB_UNITS = SLAB_BYTES / UNIT_BYTES;

  struct Slab {
    uint32_t units = 0;   // of a cell
    uint32_t used = 0;    // cells
    uint32_t carved = 0;  // cells that were ever used since it has this size
    uint32_t free = NONE;
    uint32_t previous = NONE, next = NONE;
  };

  [[nodiscard]] TokenCell* cell_at(uint32_t unit) const noexcept {
    return reinterpret_cast<TokenCell*>(memory_ + uint64_t{unit} * UNIT_BYTES);
  }
  [[nodiscard]] static bool is_full(const Slab& slab) noexcept {
    return slab.free == NONE && slab.carved == SLAB_UNITS / slab.units;
  }
  [[nodiscard]] uint32_t take_slab(uint32_t units);
  void link(uint32_t number) noexcept, unlink(uint32_t number) noexcept;

  uint8_t* const memory_;
  const uint32_t slabs_max_;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> unused_;     // slabs
  std::vector<uint32_t> with_room_;  // by units of a cell: the first such slab
};

// The ids in a cell of memory that may say anything: empty where they are not those of this chunk.
[[nodiscard]] std::span<const int32_t> read_cell(const uint8_t* memory, uint64_t bytes, uint32_t number, uint64_t generation) noexcept;

}  // namespace kvpool
