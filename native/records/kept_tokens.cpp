#include "records/kept_tokens.h"

#include <algorithm>

#include "base/check.h"
#include "checksum/crc32c.h"
#include "records/token_ids.h"

namespace kvpool {

static_assert(sizeof(TokenCell) + TOKEN_IDS_MAX * sizeof(int32_t) <= KeptTokens::SLAB_BYTES);

uint32_t crc_of(const TokenCell& cell) noexcept {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&cell);
  return crc32c(0, bytes + offsetof(TokenCell, words), sizeof(TokenCell) - offsetof(TokenCell, words) + cell.words * sizeof(int32_t));
}

uint32_t KeptTokens::take(uint32_t words) {
  const auto units = static_cast<uint32_t>(round_up(sizeof(TokenCell) + words * sizeof(int32_t), UNIT_BYTES) / UNIT_BYTES);
  KVPOOL_CHECK(units <= SLAB_UNITS);
  if (units >= with_room_.size()) {
    with_room_.resize(units + size_t{1}, NONE);
  }
  const uint32_t number = with_room_[units] != NONE ? with_room_[units] : take_slab(units);
  if (number == NONE) {
    return 0;
  }
  Slab& slab = slabs_[number];
  const uint32_t unit = slab.free != NONE ? slab.free : number * SLAB_UNITS + slab.carved++ * units;
  if (slab.free != NONE) {
    slab.free = cell_at(unit)->words;
  }
  ++slab.used;
  if (is_full(slab)) {
    unlink(number);
  }
  return unit + 1;
}

void KeptTokens::give_back(uint32_t number) noexcept {
  const uint32_t unit = number - 1;
  Slab& slab = slabs_[unit / SLAB_UNITS];
  if (is_full(slab)) {
    link(unit / SLAB_UNITS);
  }
  TokenCell& cell = *cell_at(unit);
  cell.generation = 0;
  cell.words = slab.free;
  slab.free = unit;
  if (--slab.used == 0) {
    unlink(unit / SLAB_UNITS);
    unused_.push_back(unit / SLAB_UNITS);
  }
}

uint32_t KeptTokens::take_slab(uint32_t units) {
  uint32_t number = NONE;
  if (!unused_.empty()) {
    number = unused_.back();
    unused_.pop_back();
  } else if (slabs_.size() < slabs_max_) {
    number = static_cast<uint32_t>(slabs_.size());
    slabs_.emplace_back();
    unused_.reserve(slabs_.capacity());  // `give_back` allocates nothing
  } else {
    return NONE;
  }
  slabs_[number] = Slab{.units = units, .used = 0, .carved = 0, .free = NONE, .previous = NONE, .next = NONE};
  link(number);
  return number;
}

void KeptTokens::link(uint32_t number) noexcept {
  Slab& slab = slabs_[number];
  uint32_t& first = with_room_[slab.units];
  slab.previous = NONE;
  slab.next = first;
  if (first != NONE) {
    slabs_[first].previous = number;
  }
  first = number;
}

void KeptTokens::unlink(uint32_t number) noexcept {
  const Slab& slab = slabs_[number];
  (slab.previous != NONE ? slabs_[slab.previous].next : with_room_[slab.units]) = slab.next;
  if (slab.next != NONE) {
    slabs_[slab.next].previous = slab.previous;
  }
}

std::span<const int32_t> read_cell(const uint8_t* memory, uint64_t bytes, uint32_t number, uint64_t generation) noexcept {
  const uint64_t offset = (uint64_t{number} - 1) * sizeof(TokenCell);
  if (number == 0 || offset + sizeof(TokenCell) > bytes) {
    return {};
  }
  const auto& cell = *reinterpret_cast<const TokenCell*>(memory + offset);
  const bool is_inside = cell.words <= TOKEN_IDS_MAX && cell.words * sizeof(int32_t) <= bytes - offset - sizeof(TokenCell);
  return is_inside && cell.generation == generation && cell.crc == crc_of(cell) ? std::span(cell.ids(), cell.words)
                                                                                : std::span<const int32_t>{};
}

}  // namespace kvpool
