// The tail: weights of the clusters of blocks that are not chosen, and their weighted value means.
//
// A matrix product of the weights of a KV head's queries, as integers, with the codes of the value means, sixteen blocks at a time.
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include "sparse/kernels/score_kernel.h"

namespace kvpool::sparse_detail {
namespace {

constexpr uint32_t ROW_BLOCKS = LANES;
constexpr uint32_t SLICE_ROWS = SLICE_BLOCKS / ROW_BLOCKS;
constexpr float WEIGHT_MAX = 32767.0F;
constexpr int32_t VALUE_ZERO = 8;
// Clusters j and j + 4 share a number of 32 bits.
constexpr uint32_t CLUSTER_PAIRS = 4;

KVPOOL_LANES Ints left_lanes(const uint8_t* is_left) noexcept { return load_u8(is_left) > splat(0.0F); }

KVPOOL_LANES bool is_any_left(const uint8_t* is_left) noexcept {
  uint64_t words[2];
  std::memcpy(words, is_left, sizeof(words));
  return (words[0] | words[1]) != 0;
}

// The largest peak of the blocks that are left: no logit of the tail is above it, since the score's correction is the larger one.
KVPOOL_LANES float left_peak(const float* peaks, const uint8_t* is_left, uint32_t padded) noexcept {
  Floats top = splat(-INFINITE);
  for (uint32_t block = 0; block < padded; block += LANES) {
    top = largest(select(left_lanes(is_left + block), load(peaks + block), splat(-INFINITE)), top);
  }
  return largest_lane(top);
}

void weigh_tail(const WeighWork& work) noexcept {
  for (uint32_t head = work.first_head; head < work.first_head + work.group; ++head) {
    work.references[head] = left_peak(work.peaks + uint64_t{head} * work.padded, work.is_left, work.padded);
    work.totals[head] = 0.0F;
  }
  for (uint32_t first = 0; first < work.padded; first += SLICE_BLOCKS) {
    Floats sums[QUERY_GROUP_MAX];
    for (uint32_t h = 0; h < work.group; ++h) {
      sums[h] = splat(0.0F);
    }
    for (uint32_t block = first; block < first + SLICE_BLOCKS; block += LANES) {
      if (!is_any_left(work.is_left + block)) {
        continue;
      }
      const Ints is_here = left_lanes(work.is_left + block);
      for (uint32_t h = 0; h < work.group; ++h) {
        float* tail = work.tails + (uint64_t{block} * work.group + h * LANES) * CLUSTERS;
        const Floats reference = splat(work.references[work.first_head + h]);
        Floats sum = splat(0.0F);
        unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
          const Floats weight = exponential(load(tail + j.value * LANES) - reference);
          const Floats kept = select(is_here, weight, splat(0.0F));
          store(tail + j.value * LANES, kept);
          sum = sum + kept;
        });
        sums[h] = sums[h] + sum;
      }
    }
    for (uint32_t h = 0; h < work.group; ++h) {
      work.totals[work.first_head + h] += sum_of_lanes(sums[h]);
    }
  }
  for (uint32_t head = work.first_head; head < work.first_head + work.group; ++head) {
    const float total = work.totals[head];
    work.logits[head] = total > 0.0F ? work.references[head] + logarithm(total) : -INFINITE;
  }
}

KVPOOL_LANES uint32_t lane_bits(Ints mask) noexcept {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask.part[0]));
#else
  int32_t lanes[LANES];
  store(lanes, mask);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < LANES; ++lane) {
    bits |= (lanes[lane] != 0 ? 1U : 0U) << lane;
  }
  return bits;
#endif
}

// The blocks of a slice that have a weight.
struct TailRows {
  uint32_t bits[SLICE_ROWS];  // by lane
  alignas(64) float scales[SLICE_ROWS][CLUSTERS][LANES];  // of one group of channels
  alignas(64) int32_t codes[QUERY_HEADS][SLICE_ROWS][CLUSTER_PAIRS][LANES];
};

KVPOOL_LANES const uint8_t* tail_record(const TailWork& work, const ClusterFields& fields, uint32_t block) noexcept {
  const uint32_t real = block < work.blocks ? block : work.blocks - 1;
  return work.records[real] + uint64_t{work.kv_head} * fields.bytes;
}

// The record that will be read next at this one's place: of the next KV head, or of the next slice.
KVPOOL_LANES const uint8_t* record_ahead(const TailWork& work, const ClusterFields& fields, uint32_t block) noexcept {
  if ((work.kv_head + 1) * work.group < work.heads) {
    return tail_record(work, fields, block) + fields.bytes;
  }
  return work.records[block + SLICE_BLOCKS < work.blocks ? block + SLICE_BLOCKS : work.blocks - 1];
}

KVPOOL_LANES const float* tails_of(const TailWork& work, uint32_t row, uint32_t head) noexcept {
  const uint64_t first = uint64_t{work.slice} * SLICE_BLOCKS + row * LANES;
  return work.tails + (first * work.group + head * LANES) * CLUSTERS;
}

void find_rows(const TailWork& work, TailRows& rows) noexcept {
  Floats used[QUERY_GROUP_MAX];
  for (uint32_t h = 0; h < work.group; ++h) {
    used[h] = splat(0.0F);
  }
  for (uint32_t row = 0; row < SLICE_ROWS; ++row) {
    rows.bits[row] = 0;
    if (!is_any_left(work.is_left + work.slice * SLICE_BLOCKS + row * LANES)) {
      continue;
    }
    Ints is_used = splat(int32_t{0});
    Floats sums[QUERY_GROUP_MAX];
    for (uint32_t h = 0; h < work.group; ++h) {
      const float* tail = tails_of(work, row, h);
      const Floats least = splat(work.least[work.kv_head * work.group + h]);
      sums[h] = splat(0.0F);
      for (uint32_t j = 0; j < CLUSTERS; ++j) {
        const Floats weight = load(tail + j * LANES);
        is_used = is_used | (weight > least);
        sums[h] = sums[h] + weight;
      }
    }
    for (uint32_t h = 0; h < work.group; ++h) {
      used[h] = used[h] + select(is_used, sums[h], splat(0.0F));
    }
    rows.bits[row] = lane_bits(is_used);
  }
  for (uint32_t h = 0; h < work.group; ++h) {
    work.used[h] = sum_of_lanes(used[h]);
  }
}

void load_scales(const TailWork& work, const ClusterFields& fields, uint32_t group, TailRows& rows) noexcept {
  const uint32_t at = fields.value_scales + group * CLUSTERS * 2;
  for (uint32_t row = 0; row < SLICE_ROWS; ++row) {
    if (rows.bits[row] == 0) {
      continue;
    }
    const uint32_t first = work.slice * SLICE_BLOCKS + row * ROW_BLOCKS;
    Floats scales[BLOCK_PAIRS];
    for (uint32_t p = 0; p < BLOCK_PAIRS; ++p) {
      scales[p] = load_halves(tail_record(work, fields, first + p) + at, tail_record(work, fields, first + p + ROW_BLOCKS / 2) + at);
    }
    if (group == 0) {
      for (uint32_t lane = 0; lane < LANES; ++lane) {
        prefetch_far(record_ahead(work, fields, first + lane) + fields.value_scales);
      }
    }
    transpose_halves(scales);
    for (uint32_t j = 0; j < CLUSTERS; ++j) {
      store(rows.scales[row][j], scales[j]);
    }
  }
}

// Lanes of the bits.
KVPOOL_LANES Ints lanes_of(uint32_t bits) noexcept {
  constexpr int32_t BITS[LANES] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE {
    return (load_part<IntPart>(BITS + i * WIDTH) & filled(static_cast<int32_t>(bits))) != 0;
  });
}

// Integers of 16 bits for the weights of a head times the scales of a group of channels, relative to the largest one; what an
// integer stands for is returned, and their sum added. Sums of their products with 4-bit codes are exact, and below 2^28.
KVPOOL_LANES float encode_weights(const TailWork& work, uint32_t head, TailRows& rows, int32_t (&codes)[SLICE_ROWS][CLUSTER_PAIRS][LANES],
                                  int32_t& code_sum) noexcept {
  Floats most = splat(0.0F);
  for (uint32_t row = 0; row < SLICE_ROWS; ++row) {
    if (rows.bits[row] != 0) {
      const Ints is_used = lanes_of(rows.bits[row]);
      const float* tail = tails_of(work, row, head);
      for (uint32_t j = 0; j < CLUSTERS; ++j) {
        most = largest(most, select(is_used, load(tail + j * LANES) * load(rows.scales[row][j]), splat(0.0F)));
      }
    }
  }
  const float unit = largest_lane(most) / WEIGHT_MAX;
  const Floats factor = splat(unit > 0.0F ? 1.0F / unit : 0.0F);
  Ints sum = splat(int32_t{0});
  for (uint32_t row = 0; row < SLICE_ROWS; ++row) {
    if (rows.bits[row] == 0) {
      continue;
    }
    const Ints is_used = lanes_of(rows.bits[row]);
    const float* tail = tails_of(work, row, head);
    Ints numbers[2 * CLUSTER_PAIRS];
    for (uint32_t j = 0; j < CLUSTERS; ++j) {
      const Floats product = select(is_used, load(tail + j * LANES) * load(rows.scales[row][j]), splat(0.0F));
      const Floats code = largest(smallest(product * factor, splat(WEIGHT_MAX)), splat(-WEIGHT_MAX));
      numbers[j] = as_ints(code + splat(ROUNDER)) - splat(ROUNDER_BITS);
      sum = sum + numbers[j];
    }
    numbers[CLUSTERS] = splat(int32_t{0});
    for (uint32_t j = 0; j < CLUSTER_PAIRS; ++j) {
      store(codes[row][j], packed_words(numbers[j], numbers[j + CLUSTER_PAIRS]));
    }
  }
  code_sum = sum_of_lanes(sum);
  return unit;
}

// One group of channels for some heads; beside it, what the next task will read is fetched.
template <size_t HEADS>
void sum_channels(TailRows& rows, const TailWork& work, const ClusterFields& fields, uint32_t first_head, uint32_t group) noexcept {
  float units[HEADS];
  int32_t code_sums[HEADS];
  for (uint32_t h = 0; h < HEADS; ++h) {
    units[h] = encode_weights(work, first_head + h, rows, rows.codes[h], code_sums[h]);
  }
  Ints low[HEADS];
  Ints high[HEADS];
  unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
    low[h.value] = splat(-VALUE_ZERO * code_sums[h.value]);
    high[h.value] = low[h.value];
  });
  const uint32_t at = fields.values + group * CHANNEL_GROUP * 4;
  for (uint32_t row = 0; row < SLICE_ROWS; ++row) {
    for (uint32_t bits = rows.bits[row]; bits != 0; bits &= bits - 1) {
      const auto lane = static_cast<uint32_t>(__builtin_ctz(bits));
      const uint32_t block = work.slice * SLICE_BLOCKS + row * ROW_BLOCKS + lane;
      const uint8_t* values = work.records[block] + uint64_t{work.kv_head} * fields.bytes + at;
      const uint8_t* next = record_ahead(work, fields, block) + at;
      prefetch_far(next);
      prefetch_far(next + 64);
      const Ints front = load_ints(values);
      const Ints back = load_ints(values + LANES * 4);
      unrolled<CLUSTER_PAIRS>([&](auto j) KVPOOL_INLINE {
        const Words front_codes = nibbles_of<4 * j.value>(front);
        const Words back_codes = nibbles_of<4 * j.value>(back);
        unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
          const Words weights = splat_words(rows.codes[h.value][row][j.value][lane]);
          low[h.value] = plus_products(low[h.value], front_codes, weights);
          high[h.value] = plus_products(high[h.value], back_codes, weights);
        });
      });
    }
  }
  unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
    float* to = work.values + (first_head + h.value) * work.head_dim + group * CHANNEL_GROUP;
    store(to, to_floats(low[h.value]) * splat(units[h.value]));
    store(to + LANES, to_floats(high[h.value]) * splat(units[h.value]));
  });
}

void sum_tail(const TailWork& work) noexcept {
  const ClusterFields fields = cluster_fields(work.head_dim);
  TailRows rows;
  find_rows(work, rows);
  for (uint32_t group = 0; group < work.head_dim / CHANNEL_GROUP; ++group) {
    load_scales(work, fields, group, rows);
    for (uint32_t done = 0; done < work.group;) {
      const uint32_t rest = work.group - done;
      if (rest >= QUERY_HEADS) {
        sum_channels<QUERY_HEADS>(rows, work, fields, done, group);
        done += QUERY_HEADS;
      } else if (rest >= 2) {
        sum_channels<2>(rows, work, fields, done, group);
        done += 2;
      } else {
        sum_channels<1>(rows, work, fields, done, group);
        ++done;
      }
    }
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
