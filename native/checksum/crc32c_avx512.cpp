// Folding 64 bytes a register. Compiled with -mavx512f -mavx512vl -mvpclmulqdq -msse4.2 -mclflushopt.
#include <immintrin.h>

#include "checksum/crc32c_fold.h"

namespace kvpool::crc32c_detail {
namespace {

struct Avx512 {
  using Vector = __m512i;

  template <uint64_t Low, uint64_t High>
  [[gnu::always_inline]] static Vector constants() noexcept {
    constexpr auto low = static_cast<long long>(Low);
    constexpr auto high = static_cast<long long>(High);
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
  }
  [[gnu::always_inline]] static Vector fold(Vector folded, Vector constants, Vector next) noexcept {
    const Vector low = _mm512_clmulepi64_epi128(folded, constants, 0x00);
    const Vector high = _mm512_clmulepi64_epi128(folded, constants, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // exclusive or of all three
  }
  [[gnu::always_inline]] static Vector mix_in(Vector first, uint32_t state) noexcept {
    return _mm512_xor_si512(first, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  }
  [[gnu::always_inline]] static Vector load(const uint8_t* source) noexcept { return _mm512_loadu_si512(source); }
  [[gnu::always_inline]] static void keep(Vector& vector) noexcept { asm volatile("" : "+v"(vector)); }
  [[gnu::always_inline]] static void store(uint8_t* target, Vector vector) noexcept {
    _mm512_storeu_si512(target, vector);
  }
  [[gnu::always_inline]] static void stream(uint8_t* target, Vector vector) noexcept {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), vector);
  }
  static uint32_t update(uint32_t state, const uint8_t* data, size_t size) noexcept {
    return update_sse42(state, data, size);
  }
  static uint32_t copy(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
    return copy_sse42(state, target, source, size);
  }
};

}  // namespace

uint32_t update_avx512(uint32_t state, const uint8_t* data, size_t size) noexcept {
  return update_folding<Avx512>(state, data, size);
}

uint32_t copy_avx512(size_t variant, uint32_t state, uint8_t* target, const uint8_t* source, size_t size,
                     const uint8_t* next) noexcept {
  return copy_folding<Avx512>(variant, state, target, source, size, next);
}

void flush_lines_avx512(const uint8_t* from, size_t size) noexcept {
  for (size_t line = 0; line < size; line += CACHE_LINE) {
    _mm_clflushopt(const_cast<uint8_t*>(from + line));
  }
}

}  // namespace kvpool::crc32c_detail
