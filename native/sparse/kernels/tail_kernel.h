// The tail: weights of the clusters of blocks that are not chosen, and their weighted value means.
//
// A matrix product of the weights of a KV head's queries, as integers, with the codes of the value means, sixteen blocks at a time:
// in an arena the records of a layer lie whole MiB apart, and more of them than that would push one another out of the caches.
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include <algorithm>

#include "sparse/kernels/score_kernel.h"

namespace kvpool::sparse_detail {
namespace {

constexpr uint32_t ROW_BLOCKS = LANES;
constexpr uint32_t SLICE_ROWS = SLICE_BLOCKS / ROW_BLOCKS;
constexpr float WEIGHT_MAX = 32767.0F;
constexpr int32_t VALUE_ZERO = 8;
// Clusters j and j + 4 share a number of 32 bits.
constexpr uint32_t CLUSTER_PAIRS = 4;
constexpr uint32_t GROUPS_MAX = HEAD_DIM_MAX / CHANNEL_GROUP;
// Sums of a lane that do not wait for one another.
constexpr size_t CHAINS = WIDTH == 16 ? 2 : 1;

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

// Sixteen blocks of one KV head: rows of a slice are numbered head by head.
struct TailRow {
  uint32_t number;
  uint32_t bits;  // by lane: blocks that are added up; 0 behind the last row

  [[nodiscard]] uint32_t kv_head() const noexcept { return number / SLICE_ROWS; }
  [[nodiscard]] uint32_t first() const noexcept { return number % SLICE_ROWS * ROW_BLOCKS; }  // block of the slice
};

// What a row's values are multiplied with, for some heads, by group of channels.
struct TailCodes {
  alignas(64) float scales[GROUPS_MAX][CLUSTERS][LANES];
  alignas(64) int32_t codes[GROUPS_MAX][QUERY_HEADS][CLUSTER_PAIRS][LANES];
  int32_t sums[GROUPS_MAX][QUERY_HEADS];
  float units[GROUPS_MAX][QUERY_HEADS];  // what one of a code stands for
};

// The records of a row that are added up.
struct TailRecords {
  const uint8_t* records[LANES];
  uint32_t lanes[LANES];
  uint32_t count;
};

KVPOOL_LANES const float* tails_of(const TailWork& work, const TailRow& row, uint32_t head) noexcept {
  const uint64_t first = uint64_t{row.kv_head()} * work.padded + work.slice * SLICE_BLOCKS + row.first();
  return work.tails + (first * work.group + head * LANES) * CLUSTERS;
}

// The blocks of a row that have a weight, whose sums are added to `used`.
uint32_t used_blocks(const TailWork& work, const TailRow& row, Floats (&used)[QUERY_GROUP_MAX]) noexcept {
  if (!is_any_left(work.is_left + uint64_t{row.kv_head()} * work.padded + work.slice * SLICE_BLOCKS + row.first())) {
    return 0;
  }
  Ints is_used = splat(int32_t{0});
  Floats sums[QUERY_GROUP_MAX];
  for (uint32_t h = 0; h < work.group; ++h) {
    const float* tail = tails_of(work, row, h);
    const Floats least = splat(work.least[row.kv_head() * work.group + h]);
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
  return lane_bits(is_used);
}

// The first row from `number` on that has something to be added up. `used` is of the KV head whose rows are looked at, and is
// written at its last one.
TailRow next_row(const TailWork& work, uint32_t number, Floats (&used)[QUERY_GROUP_MAX]) noexcept {
  TailRow row{number, 0};
  for (; row.number < work.kv_heads * SLICE_ROWS && row.bits == 0; ++row.number) {
    if (row.first() == 0) {
      std::fill_n(used, work.group, splat(0.0F));
    }
    row.bits = used_blocks(work, row, used);
    for (uint32_t h = 0; h < work.group && row.first() + ROW_BLOCKS == SLICE_BLOCKS; ++h) {
      work.used[row.kv_head() * work.group + h] = sum_of_lanes(used[h]);
    }
  }
  row.number -= row.bits != 0 ? 1 : 0;
  return row;
}

TailRecords records_of(const TailWork& work, const ClusterFields& fields, const TailRow& row) noexcept {
  TailRecords found;
  found.count = 0;
  for (uint32_t bits = row.bits; bits != 0; bits &= bits - 1) {
    const auto lane = static_cast<uint32_t>(__builtin_ctz(bits));
    found.lanes[found.count] = lane;
    found.records[found.count++] =
        work.records[work.slice * SLICE_BLOCKS + row.first() + lane] + uint64_t{row.kv_head()} * fields.bytes;
  }
  return found;
}

// Of blocks that are not added up any: those of the first one that is.
void load_scales(const TailWork& work, const ClusterFields& fields, const TailRecords& row, TailCodes& codes) noexcept {
  const uint8_t* records[LANES];
  std::fill_n(records, LANES, row.records[0] + fields.value_scales);
  for (uint32_t i = 0; i < row.count; ++i) {
    records[row.lanes[i]] = row.records[i] + fields.value_scales;
  }
  for (uint32_t group = 0; group < work.head_dim / CHANNEL_GROUP; ++group) {
    const uint32_t at = group * CLUSTERS * 2;
    Floats scales[BLOCK_PAIRS];
    for (uint32_t p = 0; p < BLOCK_PAIRS; ++p) {
      scales[p] = load_halves(records[p] + at, records[p + BLOCK_PAIRS] + at);
    }
    transpose_halves(scales);
    for (uint32_t j = 0; j < CLUSTERS; ++j) {
      store(codes.scales[group][j], scales[j]);
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

// Integers of 16 bits for the weights of a head times the scales of a group of channels, relative to the largest one. Sums of their
// products with 4-bit codes are exact, and below 2^26.
KVPOOL_LANES void encode_weights(const float* tail, Ints is_used, uint32_t group, uint32_t head, TailCodes& row) noexcept {
  Floats products[CLUSTERS];
  Floats most = splat(0.0F);
  unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
    products[j.value] = select(is_used, load(tail + j.value * LANES) * load(row.scales[group][j.value]), splat(0.0F));
    most = largest(most, products[j.value]);
  });
  const Floats unit = largest_of_lanes(most) * splat(1.0F / WEIGHT_MAX);
  const Floats factor = select(unit > splat(0.0F), splat(1.0F) / unit, splat(0.0F));
  Ints numbers[2 * CLUSTER_PAIRS];
  Ints sum = splat(int32_t{0});
  unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
    const Floats code = largest(smallest(products[j.value] * factor, splat(WEIGHT_MAX)), splat(-WEIGHT_MAX));
    numbers[j.value] = as_ints(code + splat(ROUNDER)) - splat(ROUNDER_BITS);
    sum = sum + numbers[j.value];
  });
  numbers[CLUSTERS] = splat(int32_t{0});
  unrolled<CLUSTER_PAIRS>([&](auto j) KVPOOL_INLINE {
    store(row.codes[group][head][j.value], packed_words(numbers[j.value], numbers[j.value + CLUSTER_PAIRS]));
  });
  row.sums[group][head] = sum_of_lanes(sum);
  row.units[group][head] = first_lane(unit);
}

// What the next row will read of a record, the part of one group of channels.
KVPOOL_LANES void fetch_values(const uint8_t* record, const ClusterFields& fields, uint32_t group) noexcept {
  constexpr uint32_t GROUP_BYTES = CLUSTERS * 2 + CHANNEL_GROUP * 4;
  const uint8_t* from = record + fields.value_scales + group * GROUP_BYTES;
  prefetch_far(from);
  prefetch_far(from + 64);
  prefetch_far(from + 128);
}

// Adds a row for some heads, the first of them at `values`; beside it, what is added up next is fetched.
template <size_t HEADS>
void add_row(const TailWork& work, const ClusterFields& fields, const TailRecords& row, const TailRecords& ahead, const TailCodes& codes,
             float* values) noexcept {
  for (uint32_t group = 0; group < work.head_dim / CHANNEL_GROUP; ++group) {
    Ints low[HEADS][CHAINS];
    Ints high[HEADS][CHAINS];
    unrolled<HEADS * CHAINS>([&](auto i) KVPOOL_INLINE {
      constexpr size_t HEAD = i.value / CHAINS;
      constexpr size_t CHAIN = i.value % CHAINS;
      low[HEAD][CHAIN] = splat(CHAIN == 0 ? -VALUE_ZERO * codes.sums[group][HEAD] : 0);
      high[HEAD][CHAIN] = low[HEAD][CHAIN];
    });
    const uint32_t at = fields.values + group * CHANNEL_GROUP * 4;
    for (uint32_t i = 0; i < row.count; ++i) {
      if (i < ahead.count) {
        fetch_values(ahead.records[i], fields, group);
      }
      const uint32_t lane = row.lanes[i];
      const Ints front = load_ints(row.records[i] + at);
      const Ints back = load_ints(row.records[i] + at + LANES * 4);
      unrolled<CLUSTER_PAIRS>([&](auto j) KVPOOL_INLINE {
        constexpr size_t CHAIN = j.value % CHAINS;
        const Words front_codes = nibbles_of<4 * j.value>(front);
        const Words back_codes = nibbles_of<4 * j.value>(back);
        unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
          const Words weights = splat_words(codes.codes[group][h.value][j.value][lane]);
          low[h.value][CHAIN] = plus_products(low[h.value][CHAIN], front_codes, weights);
          high[h.value][CHAIN] = plus_products(high[h.value][CHAIN], back_codes, weights);
        });
      });
    }
    for (uint32_t i = row.count; i < ahead.count; ++i) {
      fetch_values(ahead.records[i], fields, group);
    }
    unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
      float* to = values + h.value * work.head_dim + group * CHANNEL_GROUP;
      const Floats unit = splat(codes.units[group][h.value]);
      if constexpr (CHAINS == 2) {
        low[h.value][0] = low[h.value][0] + low[h.value][1];
        high[h.value][0] = high[h.value][0] + high[h.value][1];
      }
      store(to, load(to) + to_floats(low[h.value][0]) * unit);
      store(to + LANES, load(to + LANES) + to_floats(high[h.value][0]) * unit);
    });
  }
}

template <size_t HEADS>
void sum_heads(const TailWork& work, const ClusterFields& fields, const TailRow& row, uint32_t first, const TailRecords& here,
               const TailRecords& ahead, TailCodes& codes) noexcept {
  const Ints is_used = lanes_of(row.bits);
  for (uint32_t group = 0; group < work.head_dim / CHANNEL_GROUP; ++group) {
    unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
      encode_weights(tails_of(work, row, first + h.value), is_used, group, h.value, codes);
    });
  }
  add_row<HEADS>(work, fields, here, ahead, codes, work.values + uint64_t{row.kv_head() * work.group + first} * work.head_dim);
}

void sum_tail(const TailWork& work) noexcept {
  constexpr TailRecords NONE{};
  const ClusterFields fields = cluster_fields(work.head_dim);
  std::fill_n(work.values, uint64_t{work.kv_heads} * work.group * work.head_dim, 0.0F);
  TailCodes codes;
  Floats used[QUERY_GROUP_MAX];
  TailRow row = next_row(work, 0, used);
  TailRecords here = records_of(work, fields, row);
  while (row.bits != 0) {
    const TailRow next = next_row(work, row.number + 1, used);
    const TailRecords ahead = records_of(work, fields, next);
    load_scales(work, fields, here, codes);
    for (uint32_t done = 0; done < work.group;) {
      const TailRecords& fetched = done == 0 ? ahead : NONE;
      const uint32_t rest = work.group - done;
      if (rest >= QUERY_HEADS) {
        sum_heads<QUERY_HEADS>(work, fields, row, done, here, fetched, codes);
        done += QUERY_HEADS;
      } else if (rest >= 2) {
        sum_heads<2>(work, fields, row, done, here, fetched, codes);
        done += 2;
      } else {
        sum_heads<1>(work, fields, row, done, here, fetched, codes);
        ++done;
      }
    }
    row = next;
    here = ahead;
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
