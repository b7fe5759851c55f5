// CRC-32C by folding 256 bytes at a time with carry-less multiplication, alone or while copying the same registers.
// Compiled with -mavx512f -mavx512vl -mvpclmulqdq -msse4.2.
//
// A fold replaces 16 bytes by their remainder `distance` bits further on: the low half times x^(distance+31), the high
// half times x^(distance-33), modulo the polynomial, everything bit-reflected. What is left at the end is 64 bytes with
// the same remainder as the whole input, and the instruction finishes those.
#include <immintrin.h>

#include <algorithm>

#include "crc32c_paths.h"

namespace kvpool::crc32c_detail {
namespace {

constexpr size_t STRIDE = 256;  // four registers
constexpr size_t LINE = 64;

// x^n modulo the polynomial, reflected.
constexpr uint64_t power_of_x(unsigned n) {
  uint32_t remainder = 0x80000000U;
  for (unsigned i = 0; i < n; ++i) {
    remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? POLYNOMIAL : 0U);
  }
  return remainder;
}

template <unsigned Distance>
[[gnu::always_inline]] inline __m512i fold_constants() noexcept {
  constexpr auto low = static_cast<long long>(power_of_x(Distance + 31));
  constexpr auto high = static_cast<long long>(power_of_x(Distance - 33));
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

[[gnu::always_inline]] inline __m512i fold(__m512i folded, __m512i constants, __m512i next) noexcept {
  const __m512i low = _mm512_clmulepi64_epi128(folded, constants, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(folded, constants, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // exclusive or of all three
}

enum class Store { NONE, PLAIN, STREAM };

template <Store Kind>
[[gnu::always_inline]] inline __m512i move_line(uint8_t* target, const uint8_t* source, size_t offset) noexcept {
  __m512i line = _mm512_loadu_si512(source + offset);
  if constexpr (Kind != Store::NONE) {
    asm volatile("" : "+v"(line));  // as load_once does
  }
  if constexpr (Kind == Store::PLAIN) {
    _mm512_storeu_si512(target + offset, line);
  } else if constexpr (Kind == Store::STREAM) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + offset), line);
  }
  return line;
}

// No software prefetch: it gains nothing in pieces of 32 KiB and costs a gather of 4 KiB pieces a fifth (bench_copy).
// REQUIRES: size is a multiple of LINE, at least STRIDE; for STREAM the target is aligned to LINE.
template <Store Kind>
uint32_t fold_lines(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  const __m512i by_stride = fold_constants<STRIDE * 8>();
  const __m512i by_line = fold_constants<LINE * 8>();
  __m512i a = move_line<Kind>(target, source, 0);
  __m512i b = move_line<Kind>(target, source, LINE);
  __m512i c = move_line<Kind>(target, source, 2 * LINE);
  __m512i d = move_line<Kind>(target, source, 3 * LINE);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  size_t offset = STRIDE;
  for (; offset + STRIDE <= size; offset += STRIDE) {
    a = fold(a, by_stride, move_line<Kind>(target, source, offset));
    b = fold(b, by_stride, move_line<Kind>(target, source, offset + LINE));
    c = fold(c, by_stride, move_line<Kind>(target, source, offset + 2 * LINE));
    d = fold(d, by_stride, move_line<Kind>(target, source, offset + 3 * LINE));
  }
  __m512i folded = fold(fold(fold(a, by_line, b), by_line, c), by_line, d);
  for (; offset < size; offset += LINE) {
    folded = fold(folded, by_line, move_line<Kind>(target, source, offset));
  }
  alignas(LINE) uint8_t rest[LINE];
  _mm512_store_si512(rest, folded);
  return update_sse42(0, rest, LINE);
}

}  // namespace

uint32_t update_avx512(uint32_t state, const uint8_t* data, size_t size) noexcept {
  const size_t folded = size < STRIDE ? 0 : size / LINE * LINE;
  if (folded > 0) {
    state = fold_lines<Store::NONE>(state, nullptr, data, folded);
  }
  return update_sse42(state, data + folded, size - folded);
}

uint32_t copy_avx512(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  const auto misalignment = reinterpret_cast<uintptr_t>(target) % LINE;
  const size_t head = std::min(size, misalignment == 0 ? 0 : LINE - misalignment);
  state = copy_sse42(state, target, source, head);
  const size_t folded = size - head < STRIDE ? 0 : (size - head) / LINE * LINE;
  if (folded > 0) {
    state = fold_lines<Store::STREAM>(state, target + head, source + head, folded);
  }
  const size_t done = head + folded;
  return copy_sse42(state, target + done, source + done, size - done);
}

}  // namespace kvpool::crc32c_detail
