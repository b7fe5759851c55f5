// Codes of queries, and their exact products with the keys of two blocks.
//
// A query's channels are integers of 15 bits, with a scale for each group of channels; so are their squares, which meet the profile
// in its lane. Of four channels the codes are two vectors of sixteen lanes. With VNNI they are the high and the low parts of the
// codes, as signed bytes beside the unsigned ones of a record; else the even and the odd channels, as words. The sums are the same.
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include "sparse/kernels/lanes_math.h"
#include "sparse/kernels/lanes_transposed.h"
#include "sparse/kernels/sparse_kernels.h"

namespace kvpool::sparse_detail {
namespace {

constexpr uint32_t STEP_CHANNELS = 4;
// High parts of seven bits and a sign: the largest code is 127 * 128.
constexpr int32_t LOW_BITS = 7;
constexpr float CODE_MAX = 127.0F * 128.0F;
// Squares of queries end here, and so does no sum of them.
constexpr float SQUARE_MAX = 1e30F;

// Four channels of two blocks.
struct Keys {
#if defined(__AVX512VNNI__)
  IntPart bytes;
#else
  Words even;
  Words odd;
#endif
};

struct Sums {
#if defined(__AVX512VNNI__)
  Ints high;
#endif
  Ints low;  // or all
};

KVPOOL_LANES Keys load_keys(const uint8_t* first, const uint8_t* second) noexcept {
#if defined(__AVX512VNNI__)
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  return {reinterpret_cast<IntPart>(_mm512_maskz_inserti64x4(0xFF, low, high, 1))};
#else
  const auto bytes = each_part<Ints>([&](size_t i) KVPOOL_INLINE {
    return load_part<IntPart>((i < PARTS / 2 ? first : second) + i % (PARTS / 2) * WIDTH * 4);
  });
  Keys keys;
  unrolled<PARTS>([&](auto i) KVPOOL_INLINE {
    using HalfWords = uint16_t __attribute__((vector_size(WIDTH * 4)));
    const auto words = reinterpret_cast<HalfWords>(bytes.part[i.value]);
    keys.even.part[i.value] = reinterpret_cast<WordPart>(words & 0xFF);
    keys.odd.part[i.value] = reinterpret_cast<WordPart>(words >> 8);
  });
  return keys;
#endif
}

// Eight lanes for each half.
KVPOOL_LANES Words load_code_words(const uint8_t* from) noexcept {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {{reinterpret_cast<WordPart>(_mm512_maskz_broadcast_i64x4(0xFF, half))}};
#else
  return each_part<Words>([&](size_t i) KVPOOL_INLINE { return load_part<WordPart>(from + i % (PARTS / 2) * sizeof(WordPart)); });
#endif
}

KVPOOL_LANES void add_products(Sums& sums, const Keys& keys, const uint8_t* codes) noexcept {
  const Words first = load_code_words(codes);
  const Words second = load_code_words(codes + QUERY_STEP_BYTES / 2);
#if defined(__AVX512VNNI__)
  const auto bytes = reinterpret_cast<__m512i>(keys.bytes);
  IntPart& high = sums.high.part[0];
  IntPart& low = sums.low.part[0];
  high = reinterpret_cast<IntPart>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(high), bytes, reinterpret_cast<__m512i>(first.part[0])));
  low = reinterpret_cast<IntPart>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(low), bytes, reinterpret_cast<__m512i>(second.part[0])));
#else
  sums.low = plus_products(plus_products(sums.low, keys.even, first), keys.odd, second);
#endif
}

KVPOOL_LANES Sums sums_from(Ints bias) noexcept {
#if defined(__AVX512VNNI__)
  return {splat(int32_t{0}), bias};
#else
  return {bias};
#endif
}

KVPOOL_LANES Ints total_of(const Sums& sums) noexcept {
#if defined(__AVX512VNNI__)
  return shifted_left<LOW_BITS>(sums.high) + sums.low;
#else
  return sums.low;
#endif
}

// The query in the clusters' lanes, its squares in the profile's.
KVPOOL_LANES Ints in_key_lanes(int32_t query, int32_t squares) noexcept {
  constexpr int32_t IS_CLUSTER[LANES] = {-1, -1, -1, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1, -1, -1, 0};
  return select(load(IS_CLUSTER), splat(query), splat(squares));
}

// Integers of a group of channels and what one of them stands for.
KVPOOL_LANES float encode_channels(const float* numbers, int32_t* codes) noexcept {
  Floats most = splat(0.0F);
  for (uint32_t d = 0; d < CHANNEL_GROUP; d += LANES) {
    const Floats number = load(numbers + d);
    most = largest(most, largest(number, splat(0.0F) - number));
  }
  const float scale = largest_lane(most) / CODE_MAX;
  for (uint32_t d = 0; d < CHANNEL_GROUP; d += LANES) {
    const Floats code = load(numbers + d) / splat(scale > 0.0F ? scale : 1.0F);
    const Floats bounded = largest(smallest(code, splat(CODE_MAX)), splat(-CODE_MAX));
    store(codes + d, as_ints(bounded + splat(ROUNDER)) - splat(ROUNDER_BITS));
  }
  return scale;
}

// One of the two vectors of four channels' codes.
KVPOOL_LANES int32_t code_part(const int32_t* codes, bool is_first) noexcept {
  int32_t part;
#if defined(__AVX512VNNI__)
  int8_t bytes[STEP_CHANNELS];
  for (uint32_t i = 0; i < STEP_CHANNELS; ++i) {
    const int32_t high = (codes[i] + (1 << (LOW_BITS - 1))) >> LOW_BITS;
    bytes[i] = static_cast<int8_t>(is_first ? high : codes[i] - high * (1 << LOW_BITS));
  }
  std::memcpy(&part, bytes, sizeof(part));
#else
  const int16_t words[2] = {static_cast<int16_t>(codes[is_first ? 0 : 1]), static_cast<int16_t>(codes[is_first ? 2 : 3])};
  std::memcpy(&part, words, sizeof(part));
#endif
  return part;
}

void encode_query(const QueryWork& work) noexcept {
  const auto dim = static_cast<float>(work.head_dim);
  const float root = 1.0F / __builtin_sqrtf(dim);
  for (uint32_t group = 0; group < work.head_dim / CHANNEL_GROUP; ++group) {
    const float* query = work.query + group * CHANNEL_GROUP;
    float squares[CHANNEL_GROUP];
    for (uint32_t d = 0; d < CHANNEL_GROUP; d += LANES) {
      store(squares + d, smallest(load(query + d) * load(query + d), splat(SQUARE_MAX)) / splat(dim));
    }
    int32_t codes[CHANNEL_GROUP];
    int32_t square_codes[CHANNEL_GROUP];
    const float scale = encode_channels(query, codes);
    const float square_scale = encode_channels(squares, square_codes);
    int32_t sum = 0;
    for (const int32_t code : codes) {
      sum += code;
    }
    store(work.biases + group * LANES, in_key_lanes(-KEY_ZERO * sum, 0));
    store(work.scales + group * LANES, select(in_key_lanes(-1, 0), splat(scale * root), splat(square_scale)));
    for (uint32_t d = 0; d < CHANNEL_GROUP; d += STEP_CHANNELS) {
      uint8_t* to = work.codes + (group * CHANNEL_GROUP + d) / STEP_CHANNELS * QUERY_STEP_BYTES;
      for (const bool is_first : {true, false}) {
        int32_t lanes[LANES];
        store(lanes, in_key_lanes(code_part(codes + d, is_first), code_part(square_codes + d, is_first)));
        std::memcpy(to + (is_first ? 0 : QUERY_STEP_BYTES / 2), lanes, QUERY_STEP_BYTES / 2);
      }
    }
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
