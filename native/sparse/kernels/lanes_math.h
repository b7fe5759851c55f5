// Exponential and logarithm of sixteen lanes, and rounding: polynomials of their own, the same bits with every instruction set.
//
// Calculated errors: below 5e-7 of the result for the exponential, and of max(1, |result|) for the logarithm.
// Internal linkage, as lanes.h. Pure; any thread.
#pragma once

#include "sparse/kernels/lanes.h"

namespace kvpool::sparse_detail {
namespace {

// Adding and subtracting it rounds to the nearest integer, ties to even. REQUIRES of what is rounded: |x| < 2^22.
constexpr float ROUNDER = 12582912.0F;
constexpr int32_t ROUNDER_BITS = 0x4B400000;

KVPOOL_LANES Floats rounded(Floats x) noexcept { return (x + splat(ROUNDER)) - splat(ROUNDER); }

// Zero below -87; NaN of NaN. REQUIRES of a lane whose result is used: at most 88.
KVPOOL_LANES Floats exponential(Floats x) noexcept {
  const Floats lowest = splat(-87.0F);
  const Ints is_below = lowest > x;
  x = largest(lowest, x);
  const Floats shifted = x * splat(1.44269504F) + splat(ROUNDER);
  const Floats whole = shifted - splat(ROUNDER);
  // ln 2 in two parts, the first of so few bits that its product with a small integer is exact.
  const Floats rest = (x - whole * splat(0.693359375F)) + whole * splat(2.12194440e-4F);
  // Taylor's series to the sixth power: its rest is 1.2e-7 for |rest| <= ln 2 / 2.
  Floats sum = splat(1.0F / 720.0F);
  sum = sum * rest + splat(1.0F / 120.0F);
  sum = sum * rest + splat(1.0F / 24.0F);
  sum = sum * rest + splat(1.0F / 6.0F);
  sum = sum * rest + splat(0.5F);
  sum = sum * rest + splat(1.0F);
  sum = sum * rest + splat(1.0F);
  // The rounder's own bits end above those that are shifted in.
  return select(is_below, splat(0.0F), as_floats(as_ints(sum) + shifted_left<23>(as_ints(shifted))));
}

// REQUIRES of a lane whose result is used: a positive normal number.
KVPOOL_LANES Floats logarithm(Floats x) noexcept {
  constexpr int32_t HALF_ROOT = 0x3F3504F3;  // of 1/2: the fraction lies between it and the root of 2
  const Ints exponent = shifted_right<23>(as_ints(x) - splat(HALF_ROOT));
  const Floats fraction = as_floats(as_ints(x) - shifted_left<23>(exponent));
  // ln m = 2 artanh((m - 1) / (m + 1)); the argument is at most 0.172, the series' rest 7e-10.
  const Floats ratio = (fraction - splat(1.0F)) / (fraction + splat(1.0F));
  const Floats square = ratio * ratio;
  Floats sum = splat(2.0F / 9.0F);
  sum = sum * square + splat(2.0F / 7.0F);
  sum = sum * square + splat(2.0F / 5.0F);
  sum = sum * square + splat(2.0F / 3.0F);
  sum = sum * square * ratio + (ratio + ratio);
  const Floats whole = to_floats(exponent);
  return whole * splat(0.693359375F) + (sum - whole * splat(2.12194440e-4F));
}

KVPOOL_LANES float logarithm(float x) noexcept { return first_lane(logarithm(splat(x))); }

}  // namespace
}  // namespace kvpool::sparse_detail
