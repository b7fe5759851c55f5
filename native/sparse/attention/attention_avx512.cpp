// Attention with AVX-512 and its products of bfloat16: sixteen tokens at a time.
#include <immintrin.h>

#include "sparse/attention/attention_kernel.h"

namespace kvpool::attention_detail {
namespace {

struct Avx512 {
  static constexpr size_t WIDTH = 16;
  static constexpr uint32_t PASS = 2;
  static constexpr size_t TOKENS = 4;
  static constexpr bool HAS_BRAIN_DOT = true;
  using F = Lanes<WIDTH>::F;
  using U = Lanes<WIDTH>::U;

  [[gnu::always_inline]] static F fma(F a, F b, F c) noexcept {
    return reinterpret_cast<F>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
  }
  [[gnu::always_inline]] static F broadcast(float x) noexcept { return reinterpret_cast<F>(_mm512_set1_ps(x)); }
  [[gnu::always_inline]] static F from_halves(Lanes<WIDTH>::H raw) noexcept {
    // With a mask: the plain intrinsic makes GCC 12 warn of its own undefined register.
    return reinterpret_cast<F>(_mm512_maskz_cvtph_ps(0xFFFFU, reinterpret_cast<__m256i>(raw)));
  }
  [[gnu::always_inline]] static F brain_dot(F sum, U a, U b) noexcept {
    return reinterpret_cast<F>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
  // Splits numbers into two bfloat16 each, one after the other in memory; whether any has a second one.
  static bool split(const float* numbers, uint32_t count, uint32_t* brain, uint32_t* rest) noexcept {
    bool has_rest = false;
    for (uint32_t at = 0; at < count; ++at) {
      const uint16_t high = rounded(numbers[at]);
      const float left = numbers[at] - std::bit_cast<float>(uint32_t{high} << 16U);
      const uint16_t low = left == left ? rounded(left) : 0;  // an infinite number lacks nothing
      has_rest |= low != 0 && low != 0x8000U;
      std::memcpy(reinterpret_cast<uint8_t*>(brain) + size_t{at} * 2, &high, sizeof(high));
      std::memcpy(reinterpret_cast<uint8_t*>(rest) + size_t{at} * 2, &low, sizeof(low));
    }
    return has_rest;
  }

 private:
  // The nearest bfloat16, to even; a NaN stays one.
  static uint16_t rounded(float number) noexcept {
    const auto bits = std::bit_cast<uint32_t>(number);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
      return static_cast<uint16_t>(bits >> 16U | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
  }
};

}  // namespace

void attend_slice_avx512(const Slice& slice, const Partial& partial) { attend_slice<Avx512>(slice, partial); }

}  // namespace kvpool::attention_detail
