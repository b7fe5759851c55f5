// What attention.cpp and the sources of each instruction set share. Not for anybody else.
#pragma once

#include <cstdint>

#include "sparse/attention/attention.h"

namespace kvpool::attention_detail {

// A part of the runs: those from `first` to `end`, where `wanted` ([run][KV head]) has other than 0.
struct Slice {
  const AttentionShape* shape;
  const KvRun* runs;
  const uint8_t* wanted;
  uint64_t first;
  uint64_t end;
  const float* query;  // [head][head_dim], unscaled
};

// The outcome of a slice: for each query head the maximum logit, the sum of exp(logit - maximum), and the values under those weights,
// not divided by it ([head][head_dim]).
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
