// Transpositions of lanes, and sums of four products of bytes a lane, which are exact.
//
// Internal linkage, as lanes.h. Pure; any thread.
#pragma once

#include "sparse/kernels/lanes_loads.h"

namespace kvpool::sparse_detail {
namespace {

// Swaps the off-diagonal blocks of size STEP of two rows: one stage of a transposition.
template <size_t STEP, size_t... LANE>
KVPOOL_LANES void swap_blocks(FloatPart& low, FloatPart& high, std::index_sequence<LANE...>) noexcept {
  const FloatPart first = __builtin_shufflevector(low, high, ((LANE & STEP) == 0 ? LANE : WIDTH + LANE - STEP)...);
  const FloatPart second = __builtin_shufflevector(low, high, ((LANE & STEP) == 0 ? LANE + STEP : WIDTH + LANE)...);
  low = first;
  high = second;
}

template <size_t STEP>
KVPOOL_LANES void transpose_tile(FloatPart (&rows)[WIDTH]) noexcept {
  unrolled<WIDTH>([&](auto row) KVPOOL_INLINE {
    if constexpr ((row.value & STEP) == 0) {
      swap_blocks<STEP>(rows[row.value], rows[row.value + STEP], std::make_index_sequence<WIDTH>{});
    }
  });
  if constexpr (STEP > 1) {
    transpose_tile<STEP / 2>(rows);
  }
}

// Of eight rows, whose lanes 0..7 and 8..15 are two squares: both transposed. Row j then has, in lane i of a half, what row i had in
// its lane j.
template <size_t STEP>
KVPOOL_LANES void transpose_stage(Floats (&rows)[8]) noexcept {
  unrolled<8>([&](auto row) KVPOOL_INLINE {
    if constexpr ((row.value & STEP) == 0) {
      Floats& low = rows[row.value];
      Floats& high = rows[row.value + STEP];
      if constexpr (STEP < WIDTH) {
        unrolled<PARTS>([&](auto part) KVPOOL_INLINE {
          swap_blocks<STEP>(low.part[part.value], high.part[part.value], std::make_index_sequence<WIDTH>{});
        });
      } else {  // whole parts change places
        unrolled<PARTS>([&](auto part) KVPOOL_INLINE {
          if constexpr ((part.value * WIDTH & STEP) == 0) {
            std::swap(low.part[part.value + STEP / WIDTH], high.part[part.value]);
          }
        });
      }
    }
  });
}

KVPOOL_LANES void transpose_halves(Floats (&rows)[8]) noexcept {
  transpose_stage<4>(rows);
  transpose_stage<2>(rows);
  transpose_stage<1>(rows);
}

}  // namespace
}  // namespace kvpool::sparse_detail
