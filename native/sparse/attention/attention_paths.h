// What attention.cpp and the sources of each instruction set share. Not for anybody else.
#pragma once

#include <cstdint>

#include "sparse/attention/attention.h"

namespace kvpool::attention_detail {

// The channel at a place of queries and sums: of bfloat16 the even ones of two vectors come before the odd ones.
[[nodiscard]] constexpr uint32_t channel_at(uint32_t lanes, KvType type, uint32_t place) noexcept {
  if (type != KvType::BFLOAT16) {
    return place;
  }
  const uint32_t within = place % (2 * lanes);
  return place - within + within % lanes * 2 + within / lanes;
}

// Lanes of the vectors of each instruction set.
[[nodiscard]] constexpr uint32_t lanes_of(AttentionPath path) noexcept {
  switch (path) {
    case AttentionPath::AVX512:
      return 16;
    case AttentionPath::AVX2:
      return 8;
    default:
      return 4;
  }
}

// A part of the runs: those from `first` to `end`, where `wanted` ([run][KV head]) has other than 0.
struct Slice {
  const AttentionShape* shape;
  const KvRun* runs;
  const uint8_t* wanted;
  uint64_t first;
  uint64_t end;
  const float* query;  // [head][place], unscaled
};

// The outcome of a slice: for each query head the maximum logit, the sum of exp(logit - maximum), and the values under those weights,
// not divided by it ([head][place]).
struct Partial {
  float* maximum;
  float* sum;
  float* values;
};

void attend_slice_portable(const Slice& slice, const Partial& partial);
#if defined(__x86_64__)
void attend_slice_avx2(const Slice& slice, const Partial& partial);
void attend_slice_avx512(const Slice& slice, const Partial& partial);
#endif

}  // namespace kvpool::attention_detail
