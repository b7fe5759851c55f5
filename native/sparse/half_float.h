// Half-precision floats (IEEE 754 binary16), one at a time and by integer arithmetic alone.
//
// What it is: the conversions of the few scales of a record, the same on every machine. What it is not: the conversion of payloads,
// for which the kernels have instructions. Pure; any thread.
#pragma once

#include <bit>
#include <cstdint>

namespace kvpool {

inline constexpr float HALF_MAX = 65504.0F;
inline constexpr uint16_t HALF_NAN = 0x7E00;

// To the nearest, ties to even; infinity where that lies beyond HALF_MAX.
[[nodiscard]] constexpr uint16_t to_half(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000U;
  const uint32_t size = bits & 0x7FFFFFFFU;
  if (size > 0x7F800000U) {
    return HALF_NAN;
  }
  if (size >= 0x47800000U) {  // 65536 and more
    return static_cast<uint16_t>(sign | 0x7C00U);
  }
  if (size >= 0x38800000U) {  // normal; a carry out of the fraction is the next exponent, or infinity
    const uint32_t rounded = size + 0xFFFU + (size >> 13 & 1U);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000U) >> 13);
  }
  if (size < 0x33000000U) {  // below half of the smallest
    return static_cast<uint16_t>(sign);
  }
  const uint32_t shift = 126U - (size >> 23);
  const uint32_t fraction = (size & 0x7FFFFFU) | 0x800000U;
  const uint32_t kept = fraction >> shift;
  const uint32_t rest = fraction & ((1U << shift) - 1U);
  const uint32_t middle = 1U << (shift - 1U);
  return static_cast<uint16_t>(sign | (kept + (rest > middle || (rest == middle && (kept & 1U) != 0) ? 1U : 0U)));
}

[[nodiscard]] constexpr float from_half(uint16_t half) noexcept {
  const uint32_t sign = (half & 0x8000U) << 16;
  const uint32_t exponent = half >> 10 & 0x1FU;
  const uint32_t fraction = half & 0x3FFU;
  if (exponent == 0x1F) {
    return std::bit_cast<float>(sign | 0x7F800000U | fraction << 13);
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | (exponent + 112U) << 23 | fraction << 13);
  }
  // Exact: a small integer times a power of two.
  const float size = static_cast<float>(fraction) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(size));
}

// The least half that is not below the value. REQUIRES: 0 <= value <= HALF_MAX.
[[nodiscard]] constexpr uint16_t to_half_above(float value) noexcept {
  const uint16_t near = to_half(value);
  return from_half(near) < value ? static_cast<uint16_t>(near + 1U) : near;
}

}  // namespace kvpool
