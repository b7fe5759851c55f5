// Vectors of W floats for attention: loading items, sums and maxima of lanes, exp. Templates of the instruction set, with GCC's vector types.
//
// bfloat16 is the upper half of a float: of 2W of them one shift gives the even channels and one mask the odd ones. Queries and sums have
// their channels in that order (`channel_at`, attention_paths.h).
// Included by the sources of each instruction set only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "sparse/summary_format.h"

namespace kvpool::attention_detail {

// Floats of one vector of W lanes, and the integers beside them.
template <size_t W>
struct Lanes {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef uint32_t U __attribute__((vector_size(W * 4)));
  typedef uint16_t H __attribute__((vector_size(W * 2)));
};

template <size_t W>
struct Pair {
  typename Lanes<W>::F first;
  typename Lanes<W>::F second;
};

// Two vectors from memory, each by itself: GCC copies a pair through the stack, by halves.
template <size_t W>
[[gnu::always_inline]] inline Pair<W> load_both(const void* source) noexcept {
  Pair<W> found;
  std::memcpy(&found.first, source, sizeof(found.first));
  std::memcpy(&found.second, static_cast<const uint8_t*>(source) + sizeof(found.first), sizeof(found.second));
  return found;
}

template <size_t W>
[[gnu::always_inline]] inline void store_both(void* target, const Pair<W>& pair) noexcept {
  std::memcpy(target, &pair.first, sizeof(pair.first));
  std::memcpy(static_cast<uint8_t*>(target) + sizeof(pair.first), &pair.second, sizeof(pair.second));
}

// 2W items as floats; of bfloat16 the even ones first.
template <typename Isa, KvType TYPE>
[[gnu::always_inline]] inline Pair<Isa::WIDTH> load_pair(const uint8_t* source) noexcept {
  constexpr size_t W = Isa::WIDTH;
  using V = Lanes<W>;
  if constexpr (TYPE == KvType::FLOAT32) {
    return load_both<W>(source);
  } else if constexpr (TYPE == KvType::FLOAT16) {
    typename V::H raw[2];
    std::memcpy(raw, source, sizeof(raw));
    return {Isa::from_halves(raw[0]), Isa::from_halves(raw[1])};
  } else {
    typename V::U raw;
    std::memcpy(&raw, source, sizeof(raw));
    return {std::bit_cast<typename V::F>(raw << 16U), std::bit_cast<typename V::F>(raw & 0xFFFF0000U)};
  }
}

template <size_t W, size_t STEP, bool IS_HIGH, size_t... LANE>
[[gnu::always_inline]] inline typename Lanes<W>::F pick(typename Lanes<W>::F low, typename Lanes<W>::F high,
                                                        std::index_sequence<LANE...>) noexcept {
  // Lanes come in groups of 2 * STEP: of each one half is taken, first all of `low`, then all of `high`.
  constexpr auto from = [](size_t lane) {
    const size_t source = lane / (W / 2);
    const size_t within = lane % (W / 2);
    return source * W + within / STEP * 2 * STEP + (IS_HIGH ? STEP : 0) + within % STEP;
  };
  return __builtin_shufflevector(low, high, from(LANE)...);
}

// Adds up lanes of COUNT vectors, which become the first one: the halves of all lanes where STEP is W / 2, then their halves. With as
// many vectors as lanes, lane t of the result is the sum of rows[t]; fewer can be added up first, and their results behind it.
template <size_t W, size_t STEP, size_t COUNT>
[[gnu::always_inline]] inline typename Lanes<W>::F sum_rows(typename Lanes<W>::F (&rows)[COUNT]) noexcept {
  if constexpr (COUNT == 1) {
    return rows[0];
  } else {
    typename Lanes<W>::F sums[COUNT / 2];
#pragma GCC unroll 16
    for (size_t i = 0; i < COUNT / 2; ++i) {
      const auto low = rows[2 * i];
      const auto high = rows[2 * i + 1];
      sums[i] = pick<W, STEP, false>(low, high, std::make_index_sequence<W>{}) +
                pick<W, STEP, true>(low, high, std::make_index_sequence<W>{});
    }
    return sum_rows<W, STEP / 2>(sums);
  }
}

// exp of each lane, for arguments of at most 0; 0 from -87 on. Relative error below 2e-7.
template <typename Isa>
[[gnu::always_inline]] inline typename Lanes<Isa::WIDTH>::F exp_lanes(typename Lanes<Isa::WIDTH>::F x) noexcept {
  using F = typename Lanes<Isa::WIDTH>::F;
  using I = typename Lanes<Isa::WIDTH>::I;
  constexpr float ROUNDER = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = Isa::fma(x, Isa::broadcast(1.44269504F), Isa::broadcast(ROUNDER));
  const F n = shifted - ROUNDER;
  F r = Isa::fma(n, Isa::broadcast(-0.693359375F), x);
  r = Isa::fma(n, Isa::broadcast(2.12194440e-4F), r);
  F p = Isa::broadcast(1.9875691500e-4F);
  p = Isa::fma(p, r, Isa::broadcast(1.3981999507e-3F));
  p = Isa::fma(p, r, Isa::broadcast(8.3334519073e-3F));
  p = Isa::fma(p, r, Isa::broadcast(4.1665795894e-2F));
  p = Isa::fma(p, r, Isa::broadcast(1.6666665459e-1F));
  p = Isa::fma(p, r, Isa::broadcast(0.5F));
  p = Isa::fma(p, r * r, r + 1.0F);
  const I exponent = std::bit_cast<I>(shifted) << 23;
  const F scaled = std::bit_cast<F>(std::bit_cast<I>(p) + exponent);
  const I is_small = x < Isa::broadcast(-87.0F);
  return std::bit_cast<F>(std::bit_cast<I>(scaled) & ~is_small);
}

template <size_t STEP, typename F, size_t... LANE>
[[gnu::always_inline]] inline F exchanged(F x, std::index_sequence<LANE...>) noexcept {
  return __builtin_shufflevector(x, x, (LANE ^ STEP)...);
}

template <size_t W, size_t STEP = W / 2>
[[gnu::always_inline]] inline float max_lane(typename Lanes<W>::F x) noexcept {
  if constexpr (STEP == 0) {
    return x[0];
  } else {
    const auto other = exchanged<STEP>(x, std::make_index_sequence<W>{});
    return max_lane<W, STEP / 2>(x < other ? other : x);
  }
}

template <size_t W>
[[gnu::always_inline]] inline float sum_lanes(typename Lanes<W>::F x) noexcept {
  float found = 0.0F;
  for (size_t lane = 0; lane < W; ++lane) {
    found += x[lane];
  }
  return found;
}

}  // namespace kvpool::attention_detail
