// Builds the records of one block of one KV head: clusters of its keys, their means, spread and counts.
//
// What is kept of the tokens' keys is centred at the block's mean; so is every distance, which keeps channels with a large constant
// from costing precision. Clusters are made of keys whose channels are divided by the fourth root of their variance, averaged over the
// rotary pair (d, d + D / 2): with plain keys the clusters would follow the phase of rotated outliers.
// Deterministic: ties go to the lower token and the lower cluster. Internal linkage, as lanes.h. Any thread.
#pragma once

#include <limits>

#include "sparse/half_float.h"
#include "sparse/kernels/lanes_transposed.h"
#include "sparse/kernels/lanes_math.h"
#include "sparse/kernels/sparse_kernels.h"

namespace kvpool::sparse_detail {
namespace {

constexpr uint32_t LLOYD_ROUNDS = 3;
constexpr uint32_t TOKENS_PADDED_MAX = 256;

// One block under way: half a megabyte, on the stack of the thread, so that nothing is allocated.
struct BlockState {
  uint32_t head_dim;
  uint32_t tokens;
  uint32_t padded;  // tokens, to whole lanes
  float mean[HEAD_DIM_MAX];
  float channel_scale[HEAD_DIM_MAX];
  float centres[CLUSTERS][HEAD_DIM_MAX];      // scaled
  float centre_squares[CLUSTERS];
  float means[CLUSTERS][HEAD_DIM_MAX];        // of keys, centred; later of values
  float profile[HEAD_DIM_MAX];
  float variances[CLUSTERS];
  uint32_t counts[CLUSTERS];
  float nearest[TOKENS_PADDED_MAX];
  float squares[TOKENS_PADDED_MAX];
  int32_t cluster[TOKENS_PADDED_MAX];
  float keys[SUMMARY_TOKENS_MAX * HEAD_DIM_MAX];    // [token][channel], centred
  float scaled[HEAD_DIM_MAX * TOKENS_PADDED_MAX];   // [channel][token]
};

KVPOOL_LANES bool is_finite(const float* values, uint32_t count) noexcept {
  // x - x is zero of finite numbers alone.
  Floats sum = splat(0.0F);
  for (uint32_t d = 0; d < count; d += LANES) {
    sum = sum + (load(values + d) - load(values + d));
  }
  return sum_of_lanes(sum) == 0.0F;
}

// Rows lie apart by the stride of all KV heads, which no prefetcher of a processor follows.
KVPOOL_LANES void prefetch_row(const uint8_t* row, uint32_t bytes) noexcept {
  for (uint32_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(row + at, 0, 2);
  }
}

template <KvType TYPE>
void load_keys(BlockState& state, const BlockSource& source) noexcept {
  constexpr uint32_t AHEAD = 12;  // tokens; a guess
  const uint32_t dim = state.head_dim;
  const uint32_t row_bytes = dim * kv_type_bytes(TYPE);
  std::memset(state.mean, 0, sizeof(state.mean));
  for (uint32_t t = 0; t < state.tokens; ++t) {
    const uint8_t* row = source.keys + t * source.token_stride;
    if (t + AHEAD < state.tokens) {
      prefetch_row(row + AHEAD * source.token_stride, row_bytes);
    }
    for (uint32_t d = 0; d < dim; d += LANES) {
      const Floats key = load_numbers<TYPE>(row + d * kv_type_bytes(TYPE));
      store(state.keys + t * dim + d, key);
      store(state.mean + d, load(state.mean + d) + key);
    }
  }
  const Floats count = splat(static_cast<float>(state.tokens));
  for (uint32_t d = 0; d < dim; d += LANES) {
    store(state.mean + d, load(state.mean + d) / count);
    store(state.channel_scale + d, splat(0.0F));
  }
  for (uint32_t t = 0; t < state.tokens; ++t) {
    for (uint32_t d = 0; d < dim; d += LANES) {
      float* key = state.keys + t * dim + d;
      const Floats rest = load(key) - load(state.mean + d);
      store(key, rest);
      store(state.channel_scale + d, load(state.channel_scale + d) + rest * rest);
    }
  }
  for (uint32_t d = 0; d < dim; d += LANES) {
    store(state.channel_scale + d, load(state.channel_scale + d) / count);
  }
  for (uint32_t t = 0; t < state.tokens; ++t) {
    prefetch_row(source.values + t * source.token_stride, row_bytes);
  }
}

// Variances become factors: one over the fourth root, 0 for a pair of channels that does not vary.
void scale_channels(BlockState& state) noexcept {
  const uint32_t half = state.head_dim / 2;
  for (uint32_t d = 0; d < half; ++d) {
    const float variance = (state.channel_scale[d] + state.channel_scale[d + half]) * 0.5F;
    const float factor = variance > 0.0F ? 1.0F / __builtin_sqrtf(__builtin_sqrtf(variance)) : 0.0F;
    state.channel_scale[d] = factor;
    state.channel_scale[d + half] = factor;
  }
}

// work(t, Index<n>) for n times sixteen tokens from t on: four at a time where there are as many, since a sum waits for itself.
template <typename Work>
KVPOOL_LANES void for_tokens(const BlockState& state, const Work& work) noexcept {
  uint32_t t = 0;
  for (; t + 4 * LANES <= state.padded; t += 4 * LANES) {
    work(t, Index<4>{});
  }
  for (; t < state.padded; t += LANES) {
    work(t, Index<1>{});
  }
}

// Scaled keys by channel, and their squares by token.
void scale_keys(BlockState& state) noexcept {
  const uint32_t dim = state.head_dim;
  for (uint32_t t = 0; t < state.padded; t += WIDTH) {
    for (uint32_t d = 0; d < dim; d += WIDTH) {
      const auto factor = load_part<FloatPart>(state.channel_scale + d);
      FloatPart rows[WIDTH];
      unrolled<WIDTH>([&](auto row) KVPOOL_INLINE {
        const bool is_token = t + row.value < state.tokens;
        rows[row.value] = is_token ? load_part<FloatPart>(state.keys + (t + row.value) * dim + d) * factor : FloatPart{};
      });
      transpose_tile<WIDTH / 2>(rows);
      unrolled<WIDTH>([&](auto row) KVPOOL_INLINE {
        std::memcpy(state.scaled + (d + row.value) * state.padded + t, &rows[row.value], sizeof(factor));
      });
    }
  }
  for_tokens(state, [&](uint32_t t, auto count) KVPOOL_INLINE {
    Floats sums[count.value];
    unrolled<count.value>([&](auto i) KVPOOL_INLINE { sums[i.value] = splat(0.0F); });
    for (uint32_t d = 0; d < dim; ++d) {
      unrolled<count.value>([&](auto i) KVPOOL_INLINE {
        const Floats key = load(state.scaled + d * state.padded + t + i.value * LANES);
        sums[i.value] = sums[i.value] + key * key;
      });
    }
    unrolled<count.value>([&](auto i) KVPOOL_INLINE { store(state.squares + t + i.value * LANES, sums[i.value]); });
  });
}

void square_centre(BlockState& state, uint32_t j) noexcept {
  Floats sum = splat(0.0F);
  for (uint32_t d = 0; d < state.head_dim; d += LANES) {
    const Floats centre = load(state.centres[j] + d);
    sum = sum + centre * centre;
  }
  state.centre_squares[j] = sum_of_lanes(sum);
}

// The token farthest from its nearest centre; the first of several.
uint32_t farthest_token(const BlockState& state) noexcept {
  uint32_t farthest = 0;
  float most = state.nearest[0];
  for (uint32_t t = 1; t < state.tokens; ++t) {
    const float distance = state.nearest[t];
    farthest = distance > most ? t : farthest;
    most = distance > most ? distance : most;
  }
  return farthest;
}

// Tokens that are nearer to a new centre than to all before it are its own.
void add_centre(BlockState& state, uint32_t j) noexcept {
  for_tokens(state, [&](uint32_t t, auto count) KVPOOL_INLINE {
    Floats products[count.value];
    unrolled<count.value>([&](auto i) KVPOOL_INLINE { products[i.value] = splat(0.0F); });
    for (uint32_t d = 0; d < state.head_dim; ++d) {
      const Floats centre = splat(state.centres[j][d]);
      unrolled<count.value>([&](auto i) KVPOOL_INLINE {
        products[i.value] = products[i.value] + load(state.scaled + d * state.padded + t + i.value * LANES) * centre;
      });
    }
    unrolled<count.value>([&](auto i) KVPOOL_INLINE {
      const uint32_t at = t + static_cast<uint32_t>(i.value * LANES);
      const Floats product = products[i.value];
      const Floats distance = load(state.squares + at) + (splat(state.centre_squares[j]) - (product + product));
      const Floats nearest = load(state.nearest + at);
      const Ints is_nearer = nearest > distance;
      store(state.nearest + at, select(is_nearer, distance, nearest));
      store(state.cluster + at, select(is_nearer, splat(static_cast<int32_t>(j)), load(state.cluster + at)));
    });
  });
}

// Centre 0 is the mean, each further one the token farthest from those before. Tokens then have their nearest centre.
void start_clusters(BlockState& state) noexcept {
  for (uint32_t t = 0; t < state.padded; t += LANES) {
    store(state.nearest + t, load(state.squares + t));
    store(state.cluster + t, splat(int32_t{0}));
  }
  for (uint32_t d = 0; d < state.head_dim; ++d) {
    state.centres[0][d] = 0.0F;
  }
  state.centre_squares[0] = 0.0F;
  for (uint32_t j = 1; j < CLUSTERS; ++j) {
    const uint32_t token = farthest_token(state);
    for (uint32_t d = 0; d < state.head_dim; ++d) {
      state.centres[j][d] = state.scaled[d * state.padded + token];
    }
    square_centre(state, j);
    add_centre(state, j);
  }
}

void assign_tokens(BlockState& state) noexcept {
  for (uint32_t t = 0; t < state.padded; t += LANES) {
    Floats products[CLUSTERS];
    unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE { products[j.value] = splat(0.0F); });
    for (uint32_t d = 0; d < state.head_dim; ++d) {
      const Floats key = load(state.scaled + d * state.padded + t);
      unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
        products[j.value] = products[j.value] + key * splat(state.centres[j.value][d]);
      });
    }
    const Floats squares = load(state.squares + t);
    Floats nearest = splat(std::numeric_limits<float>::infinity());
    Ints cluster = splat(int32_t{0});
    unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
      const Floats distance = squares + (splat(state.centre_squares[j.value]) - (products[j.value] + products[j.value]));
      const Ints is_nearer = nearest > distance;
      nearest = select(is_nearer, distance, nearest);
      cluster = select(is_nearer, splat(static_cast<int32_t>(j.value)), cluster);
    });
    store(state.cluster + t, cluster);
  }
}

void count_tokens(BlockState& state) noexcept {
  for (uint32_t& count : state.counts) {
    count = 0;
  }
  for (uint32_t t = 0; t < state.tokens; ++t) {
    ++state.counts[state.cluster[t]];
  }
}

// Means of the rows that `row(t, d)` loads, by cluster; zero for an empty one.
template <typename Row>
KVPOOL_LANES void mean_rows(BlockState& state, const Row& row) noexcept {
  std::memset(state.means, 0, sizeof(state.means));
  for (uint32_t t = 0; t < state.tokens; ++t) {
    float* sum = state.means[state.cluster[t]];
    for (uint32_t d = 0; d < state.head_dim; d += LANES) {
      store(sum + d, load(sum + d) + row(t, d));
    }
  }
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    const Floats count = splat(static_cast<float>(state.counts[j] == 0 ? 1 : state.counts[j]));
    for (uint32_t d = 0; d < state.head_dim; d += LANES) {
      store(state.means[j] + d, load(state.means[j] + d) / count);
    }
  }
}

void mean_keys(BlockState& state) noexcept {
  count_tokens(state);
  mean_rows(state, [&](uint32_t t, uint32_t d) { return load(state.keys + t * state.head_dim + d); });
}

// An empty cluster keeps its centre.
void move_centres(BlockState& state) noexcept {
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    if (state.counts[j] > 0) {
      for (uint32_t d = 0; d < state.head_dim; d += LANES) {
        store(state.centres[j] + d, load(state.means[j] + d) * load(state.channel_scale + d));
      }
      square_centre(state, j);
    }
  }
}

// Mean squares of the residuals: by cluster over all channels, and by channel relative to the mean channel.
void measure_spread(BlockState& state) noexcept {
  Floats by_cluster[CLUSTERS];
  for (Floats& sum : by_cluster) {
    sum = splat(0.0F);
  }
  std::memset(state.profile, 0, sizeof(state.profile));
  for (uint32_t t = 0; t < state.tokens; ++t) {
    const float* mean = state.means[state.cluster[t]];
    Floats sum = splat(0.0F);
    for (uint32_t d = 0; d < state.head_dim; d += LANES) {
      const Floats rest = load(state.keys + t * state.head_dim + d) - load(mean + d);
      const Floats square = rest * rest;
      store(state.profile + d, load(state.profile + d) + square);
      sum = sum + square;
    }
    by_cluster[state.cluster[t]] = by_cluster[state.cluster[t]] + sum;
  }
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    const uint32_t numbers = state.head_dim * (state.counts[j] == 0 ? 1 : state.counts[j]);
    state.variances[j] = sum_of_lanes(by_cluster[j]) / static_cast<float>(numbers);
  }
  Floats total = splat(0.0F);
  for (uint32_t d = 0; d < state.head_dim; d += LANES) {
    total = total + load(state.profile + d);
  }
  const float mean = sum_of_lanes(total) / static_cast<float>(state.head_dim);
  const Floats factor = splat(mean > 0.0F ? 1.0F / mean : 0.0F);
  for (uint32_t d = 0; d < state.head_dim; d += LANES) {
    store(state.profile + d, load(state.profile + d) * factor);
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
