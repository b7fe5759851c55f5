// Narrow numbers loaded as sixteen lanes: bytes, halves, bfloats, nibbles, and integer products that are exact.
//
// Where two addresses are named, lanes 0..7 come from the first and the others from the second.
// Internal linkage, as lanes.h. Pure; any thread.
#pragma once

#include "sparse/kernels/lanes.h"
#include "sparse/summary_format.h"

namespace kvpool::sparse_detail {
namespace {

#if !defined(__AVX2__)
template <typename Number>
struct Narrow {
  using Part [[gnu::vector_size(WIDTH * sizeof(Number))]] = Number;
};

template <typename Number>
KVPOOL_LANES Ints widened_numbers(const void* first, const void* second) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE {
    const auto* from = static_cast<const uint8_t*>(i < PARTS / 2 ? first : second);
    const auto narrow = load_part<typename Narrow<Number>::Part>(from + (i % (PARTS / 2)) * WIDTH * sizeof(Number));
    return __builtin_convertvector(narrow, IntPart);
  });
}
#endif

KVPOOL_LANES Ints widened(Bytes16 bytes) noexcept {
  Ints out;
#if defined(__AVX512F__)
  out.part[0] = reinterpret_cast<IntPart>(_mm512_maskz_cvtepu8_epi32(ALL_LANES, reinterpret_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  const auto all = reinterpret_cast<__m128i>(bytes);
  out.part[0] = reinterpret_cast<IntPart>(_mm256_cvtepu8_epi32(all));
  out.part[1] = reinterpret_cast<IntPart>(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all)));
#else
  uint8_t plain[16];
  std::memcpy(plain, &bytes, 16);
  out = widened_numbers<uint8_t>(plain, plain + 8);
#endif
  return out;
}

KVPOOL_LANES Floats load_u8(const uint8_t* from) noexcept { return to_floats(widened(load_bytes(from))); }

// Eight bytes of each of two words.
KVPOOL_LANES Floats load_u8(uint64_t first, uint64_t second) noexcept {
  const uint64_t both[2] = {first, second};
  Bytes16 bytes;
  std::memcpy(&bytes, both, 16);
  return to_floats(widened(bytes));
}

KVPOOL_LANES Ints load_u16(const void* first, const void* second) noexcept {
#if defined(__AVX512F__)
  const __m128i low = _mm_loadu_si128(static_cast<const __m128i*>(first));
  const __m128i high = _mm_loadu_si128(static_cast<const __m128i*>(second));
  Ints out;
  out.part[0] = reinterpret_cast<IntPart>(_mm512_maskz_cvtepu16_epi32(ALL_LANES, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1)));
  return out;
#elif defined(__AVX2__)
  Ints out;
  out.part[0] = reinterpret_cast<IntPart>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(first))));
  out.part[1] = reinterpret_cast<IntPart>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(second))));
  return out;
#else
  return widened_numbers<uint16_t>(first, second);
#endif
}

// Eight halves from each address.
KVPOOL_LANES Floats load_halves(const void* first, const void* second) noexcept {
#if defined(__AVX512F__)
  const __m128i low = _mm_loadu_si128(static_cast<const __m128i*>(first));
  const __m128i high = _mm_loadu_si128(static_cast<const __m128i*>(second));
  Floats out;
  out.part[0] = reinterpret_cast<FloatPart>(_mm512_maskz_cvtph_ps(ALL_LANES, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1)));
  return out;
#elif defined(__AVX2__)
  Floats out;
  out.part[0] = reinterpret_cast<FloatPart>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(first))));
  out.part[1] = reinterpret_cast<FloatPart>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(second))));
  return out;
#else
  const Ints half = load_u16(first, second);
  const Ints size = each_part<Ints>([&](size_t i) KVPOOL_INLINE { return half.part[i] & 0x7FFF; });
  const Ints sign = each_part<Ints>([&](size_t i) { return (half.part[i] & 0x8000) << 16; });
  const Ints normal = shifted_left<13>(size) + splat(int32_t{112} << 23);
  // Below 2^-14: an integer times 2^-24. Infinity and NaN keep an exponent of all ones.
  const Ints small = as_ints(to_floats(size) * splat(0x1p-24F));
  const Ints special = shifted_left<13>(size) + splat(int32_t{224} << 23);
  const Ints chosen = select(size >= splat(int32_t{0x7C00}), special, select(size >= splat(int32_t{0x400}), normal, small));
  return as_floats(chosen | sign);
#endif
}

template <KvType TYPE>
KVPOOL_LANES Floats load_numbers(const uint8_t* from) noexcept {
  if constexpr (TYPE == KvType::FLOAT32) {
    return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return load_part<FloatPart>(from + i * sizeof(FloatPart)); });
  } else if constexpr (TYPE == KvType::FLOAT16) {
    return load_halves(from, from + 16);
  } else {
    return as_floats(shifted_left<16>(load_u16(from, from + 16)));
  }
}

KVPOOL_LANES Ints load_ints(const uint8_t* from) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return load_part<IntPart>(from + i * sizeof(IntPart)); });
}

// In each lane the first number's low 16 bits, and the second's above them.
KVPOOL_LANES Words packed_words(Ints first, Ints second) noexcept {
  const Ints high = shifted_left<16>(second);
  return each_part<Words>([&](size_t i) KVPOOL_INLINE {
    return reinterpret_cast<WordPart>((first.part[i] & 0xFFFF) | high.part[i]);
  });
}

KVPOOL_LANES void store(int32_t* to, Words words) noexcept {
  unrolled<PARTS>([&](auto i) KVPOOL_INLINE { std::memcpy(to + i.value * WIDTH, &words.part[i.value], sizeof(WordPart)); });
}

// Four bits of each 16-bit number, from bit SHIFT on.
template <int SHIFT>
KVPOOL_LANES Words nibbles_of(Ints packed) noexcept {
  using Unsigned = uint32_t __attribute__((vector_size(WIDTH * 4)));
  return each_part<Words>([&](size_t i) KVPOOL_INLINE {
    return reinterpret_cast<WordPart>(reinterpret_cast<Unsigned>(packed.part[i]) >> SHIFT & 0x000F000FU);
  });
}

// The same two 16-bit numbers in each lane.
KVPOOL_LANES Words splat_words(int32_t pair) noexcept {
  return each_part<Words>([&](size_t) KVPOOL_INLINE { return reinterpret_cast<WordPart>(filled(pair)); });
}

// sum + both products of each lane. REQUIRES: it fits 32 bits.
KVPOOL_LANES Ints plus_products(Ints sum, Words a, Words b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<IntPart>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum.part[i]),
                                                         reinterpret_cast<__m512i>(a.part[i]), reinterpret_cast<__m512i>(b.part[i])));
#elif defined(__AVX2__)
    return sum.part[i] + reinterpret_cast<IntPart>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a.part[i]),
                                                                     reinterpret_cast<__m256i>(b.part[i])));
#elif defined(__SSE2__)
    return sum.part[i] + reinterpret_cast<IntPart>(_mm_madd_epi16(reinterpret_cast<__m128i>(a.part[i]),
                                                                  reinterpret_cast<__m128i>(b.part[i])));
#else
    const auto x = reinterpret_cast<IntPart>(a.part[i]);
    const auto y = reinterpret_cast<IntPart>(b.part[i]);
    return sum.part[i] + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
  });
}

}  // namespace
}  // namespace kvpool::sparse_detail
