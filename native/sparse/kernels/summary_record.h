// Writes what summary_kernel.h finds as records: quantised means, scales, profile, counts.
//
// A scale is the least fp16 with which the group's largest number fits, so nothing is cut off. Where a scale has no fp16, or a
// number is no number, the block's counts are all 0: it will be attended and never estimated.
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include "sparse/kernels/summary_kernel.h"

namespace kvpool::sparse_detail {
namespace {

struct GroupScale {
  uint16_t half;
  float factor;  // from number to code
  bool fits;
};

KVPOOL_LANES GroupScale group_scale(float largest, float code_max) noexcept {
  const float wanted = largest / code_max;
  if (!(wanted <= HALF_MAX)) {
    return {0, 0.0F, false};
  }
  const uint16_t half = to_half_above(wanted);
  return {half, half == 0 ? 0.0F : 1.0F / from_half(half), true};
}

KVPOOL_LANES void put_half(uint8_t* to, uint16_t half) noexcept { std::memcpy(to, &half, sizeof(half)); }

KVPOOL_LANES float largest_size(const float* numbers) noexcept {
  const Floats low = load(numbers);
  const Floats high = load(numbers + LANES);
  const Floats zero = splat(0.0F);
  return largest_lane(largest(largest(low, zero - low), largest(high, zero - high)));
}

// The codes of one group of channels, -code_max..code_max.
KVPOOL_LANES void encode_group(const float* numbers, float factor, float code_max, int32_t (&codes)[CHANNEL_GROUP]) noexcept {
  for (uint32_t d = 0; d < CHANNEL_GROUP; d += LANES) {
    const Floats code = rounded(load(numbers + d) * splat(factor));
    const Floats bounded = largest(smallest(code, splat(code_max)), splat(-code_max));
    store(codes + d, as_ints(bounded + splat(ROUNDER)) - splat(ROUNDER_BITS));
  }
}

bool write_key_means(const BlockState& state, const ClusterFields& fields, uint8_t* record) noexcept {
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    if (state.counts[j] == 0) {
      continue;
    }
    for (uint32_t group = 0; group < state.head_dim / CHANNEL_GROUP; ++group) {
      float numbers[CHANNEL_GROUP];
      const uint32_t first = group * CHANNEL_GROUP;
      for (uint32_t d = 0; d < CHANNEL_GROUP; d += LANES) {
        store(numbers + d, load(state.means[j] + first + d) + load(state.mean + first + d));
      }
      const GroupScale scale = group_scale(largest_size(numbers), 127.0F);
      if (!scale.fits) {
        return false;
      }
      int32_t codes[CHANNEL_GROUP];
      encode_group(numbers, scale.factor, 127.0F, codes);
      put_half(record + fields.key_scales + (group * KEY_LANES + j) * 2, scale.half);
      for (uint32_t d = 0; d < CHANNEL_GROUP; d += 4) {
        uint8_t four[4];
        for (uint32_t i = 0; i < 4; ++i) {
          four[i] = static_cast<uint8_t>(codes[d + i] + KEY_ZERO);
        }
        std::memcpy(record + key_at(first + d, j), four, 4);
      }
    }
  }
  return true;
}

bool write_value_means(const BlockState& state, const ClusterFields& fields, uint8_t* record) noexcept {
  const uint32_t groups = state.head_dim / CHANNEL_GROUP;
  uint32_t packed[HEAD_DIM_MAX] = {};
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    if (state.counts[j] == 0) {
      continue;
    }
    if (!is_finite(state.means[j], state.head_dim)) {
      return false;
    }
    for (uint32_t group = 0; group < groups; ++group) {
      const float* numbers = state.means[j] + group * CHANNEL_GROUP;
      const GroupScale scale = group_scale(largest_size(numbers), 7.0F);
      if (!scale.fits) {
        return false;
      }
      int32_t codes[CHANNEL_GROUP];
      encode_group(numbers, scale.factor, 7.0F, codes);
      put_half(record + fields.value_scales + (group * CLUSTERS + j) * 2, scale.half);
      for (uint32_t d = 0; d < CHANNEL_GROUP; ++d) {
        packed[group * CHANNEL_GROUP + d] |= static_cast<uint32_t>(codes[d] + 8) << (4 * j);
      }
    }
  }
  std::memcpy(record + fields.values, packed, state.head_dim * sizeof(packed[0]));
  return true;
}

void write_spread(const BlockState& state, const ClusterFields& fields, uint8_t* record) noexcept {
  for (uint32_t group = 0; group < state.head_dim / CHANNEL_GROUP; ++group) {
    const float* profile = state.profile + group * CHANNEL_GROUP;
    const GroupScale scale = group_scale(largest_size(profile), 255.0F);
    int32_t codes[CHANNEL_GROUP];
    encode_group(profile, scale.factor, 255.0F, codes);
    put_half(record + fields.key_scales + (group * KEY_LANES + CLUSTERS) * 2, scale.half);
    for (uint32_t d = 0; d < CHANNEL_GROUP; ++d) {
      record[key_at(group * CHANNEL_GROUP + d, CLUSTERS)] = static_cast<uint8_t>(codes[d]);
    }
  }
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    const float variance = state.variances[j] < HALF_MAX ? state.variances[j] : HALF_MAX;
    put_half(record + fields.variances + j * 2, to_half(variance));
    record[fields.counts + j] = static_cast<uint8_t>(state.counts[j]);
  }
}

template <KvType TYPE>
bool write_clusters(BlockState& state, const BlockSource& source, const ClusterFields& fields, uint8_t* record) noexcept {
  load_keys<TYPE>(state, source);
  if (!is_finite(state.mean, state.head_dim) || !is_finite(state.channel_scale, state.head_dim)) {
    return false;
  }
  scale_channels(state);
  scale_keys(state);
  start_clusters(state);
  for (uint32_t round = 1; round < LLOYD_ROUNDS; ++round) {
    mean_keys(state);
    move_centres(state);
    assign_tokens(state);
  }
  mean_keys(state);
  measure_spread(state);
  if (!write_key_means(state, fields, record)) {
    return false;
  }
  mean_rows(state, [&](uint32_t t, uint32_t d) {
    return load_numbers<TYPE>(source.values + t * source.token_stride + d * kv_type_bytes(TYPE));
  });
  if (!write_value_means(state, fields, record)) {
    return false;
  }
  write_spread(state, fields, record);
  return true;
}

void build_clusters(const BlockSource& source, uint8_t* record) noexcept {
  const ClusterFields fields = cluster_fields(source.head_dim);
  std::memset(record, 0, fields.bytes);
  BlockState state;
  state.head_dim = source.head_dim;
  state.tokens = source.tokens;
  state.padded = (source.tokens + LANES - 1) / LANES * LANES;
  bool is_whole = false;
  switch (source.type) {
    case KvType::FLOAT32:
      is_whole = write_clusters<KvType::FLOAT32>(state, source, fields, record);
      break;
    case KvType::FLOAT16:
      is_whole = write_clusters<KvType::FLOAT16>(state, source, fields, record);
      break;
    case KvType::BFLOAT16:
      is_whole = write_clusters<KvType::BFLOAT16>(state, source, fields, record);
      break;
  }
  if (!is_whole) {
    std::memset(record, 0, fields.bytes);
  }
}

template <KvType TYPE>
bool write_mean(const BlockSource& source, uint8_t* record) noexcept {
  const Floats share = splat(1.0F / static_cast<float>(source.tokens));
  Floats faults = splat(0.0F);
  for (uint32_t d = 0; d < source.head_dim; d += LANES) {
    Floats keys = splat(0.0F);
    for (uint32_t t = 0; t < source.tokens; ++t) {
      const uint64_t at = t * source.token_stride + d * kv_type_bytes(TYPE);
      const Floats value = load_numbers<TYPE>(source.values + at);
      keys = keys + load_numbers<TYPE>(source.keys + at);
      faults = faults + (value - value);
    }
    float means[LANES];
    store(means, keys * share);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
      const uint16_t half = to_half(means[lane]);
      if ((half & 0x7C00U) == 0x7C00U) {
        return false;
      }
      put_half(record + (d + lane) * 2, half);
    }
  }
  return sum_of_lanes(faults) == 0.0F;
}

void build_mean(const BlockSource& source, uint8_t* record) noexcept {
  bool is_whole = false;
  switch (source.type) {
    case KvType::FLOAT32:
      is_whole = write_mean<KvType::FLOAT32>(source, record);
      break;
    case KvType::FLOAT16:
      is_whole = write_mean<KvType::FLOAT16>(source, record);
      break;
    case KvType::BFLOAT16:
      is_whole = write_mean<KvType::BFLOAT16>(source, record);
      break;
  }
  if (!is_whole) {
    std::memset(record, 0, source.head_dim * 2);
    put_half(record, HALF_NAN);
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
