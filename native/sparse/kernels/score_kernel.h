// Scores blocks by their clusters: logits of each cluster, the correction for its spread, log-sum-exp.
//
// Sixteen blocks at a time. First two blocks lie in a register, one in lanes 0..7 and that of eight places on in the others, with
// lane j its cluster j and lane 7 the spread of its keys along the query. Transposed, a register has one cluster of all sixteen.
// Products of queries and keys are integers and exact.
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include "sparse/kernels/choice_kernel.h"
#include "sparse/kernels/query_codes.h"

namespace kvpool::sparse_detail {
namespace {

constexpr float SPREAD_MAX = 30.0F;
// As many sums as the registers hold.
constexpr size_t QUERY_HEADS = WIDTH == 4 ? 2 : 4;
constexpr size_t BATCH_PAIRS = WIDTH == 16 ? 2 : 1;
constexpr size_t BLOCK_PAIRS = LANES / 2;
constexpr uint32_t GROUP_STEPS = CHANNEL_GROUP / STEP_CHANNELS;

// Sixteen blocks of one KV head; those behind the last block are that again.
struct BlockRow {
  const uint8_t* records[LANES];
  const uint8_t* ahead[LANES];  // what will be read next: of the next KV head, or of the next blocks
};

KVPOOL_LANES BlockRow find_records(const ScoreWork& work, const ClusterFields& fields, uint32_t kv_head, uint32_t first) noexcept {
  BlockRow row;
  const bool is_last = kv_head + 1 == work.kv_heads;
  for (uint32_t i = 0; i < LANES; ++i) {
    const uint32_t real = first + i < work.blocks ? first + i : work.blocks - 1;
    const uint32_t next = real + LANES < work.blocks ? real + static_cast<uint32_t>(LANES) : real;
    row.records[i] = work.records[real] + uint64_t{kv_head} * fields.bytes;
    row.ahead[i] = is_last ? work.records[next] : row.records[i] + fields.bytes;
  }
  return row;
}

// Some pairs of blocks, for some query heads: in lanes 0..6 of each half the clusters' logits, in lane 7 the spread.
template <size_t HEADS, bool PREFETCHES>
KVPOOL_LANES void score_pairs(const ScoreWork& work, const ClusterFields& fields, const BlockRow& row, uint32_t head, uint32_t pair,
                              Floats (&logits)[HEADS][BLOCK_PAIRS]) noexcept {
  constexpr size_t COUNT = HEADS * BATCH_PAIRS;  // [head][pair of blocks]
  const uint32_t groups = work.head_dim / CHANNEL_GROUP;
  const uint64_t code_bytes = query_bytes(work.head_dim);
  const uint8_t* codes = work.query_codes + head * code_bytes;
  Floats totals[COUNT];
  unrolled<COUNT>([&](auto i) KVPOOL_INLINE { totals[i.value] = splat(0.0F); });
  for (uint32_t group = 0; group < groups; ++group) {
    Sums sums[COUNT];
    unrolled<COUNT>([&](auto i) KVPOOL_INLINE {
      sums[i.value] = sums_from(load(work.query_biases + ((head + i.value / BATCH_PAIRS) * groups + group) * LANES));
    });
    for (uint32_t step = group * GROUP_STEPS; step < (group + 1) * GROUP_STEPS; step += 2) {
      unrolled<2>([&](auto odd) KVPOOL_INLINE {
        const auto at = static_cast<uint32_t>((step + odd.value) * KEY_LANES * STEP_CHANNELS);
        Keys keys[BATCH_PAIRS];
        unrolled<BATCH_PAIRS>([&](auto p) KVPOOL_INLINE {
          keys[p.value] = load_keys(row.records[pair + p.value] + at, row.records[pair + p.value + BLOCK_PAIRS] + at);
          if constexpr (PREFETCHES) {  // a line now and then: many at once would wait for one another
            prefetch_far(row.ahead[pair + p.value + odd.value * BLOCK_PAIRS] + step / 2 * 64);
          }
        });
        unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
          unrolled<BATCH_PAIRS>([&](auto p) KVPOOL_INLINE {
            add_products(sums[h.value * BATCH_PAIRS + p.value], keys[p.value],
                         codes + h.value * code_bytes + (step + odd.value) * QUERY_STEP_BYTES);
          });
        });
      });
    }
    const uint32_t at = fields.key_scales + group * KEY_LANES * 2;
    unrolled<BATCH_PAIRS>([&](auto p) KVPOOL_INLINE {
      const Floats scales = load_halves(row.records[pair + p.value] + at, row.records[pair + p.value + BLOCK_PAIRS] + at);
      unrolled<HEADS>([&](auto h) KVPOOL_INLINE {
        constexpr size_t SUM = h.value * BATCH_PAIRS + p.value;
        const Floats query = load(work.query_scales + ((head + h.value) * groups + group) * LANES);
        totals[SUM] = totals[SUM] + to_floats(total_of(sums[SUM])) * (scales * query);
      });
    });
  }
  unrolled<COUNT>([&](auto i) KVPOOL_INLINE { logits[i.value / BATCH_PAIRS][pair + i.value % BATCH_PAIRS] = totals[i.value]; });
}

// Of sixteen blocks, what does not depend on the query; by cluster.
struct RowSpread {
  Floats log_counts[CLUSTERS];      // -inf: empty
  Floats half_variances[CLUSTERS];
  Floats half_mean;                 // half the mean variance of a token; zero in lanes behind the last block
};

KVPOOL_LANES uint64_t counts_of(const uint8_t* record, const ClusterFields& fields) noexcept {
  uint64_t word;
  std::memcpy(&word, record + fields.counts, sizeof(word));
  return word;
}

KVPOOL_LANES RowSpread row_spread(const BlockRow& row, const ClusterFields& fields, uint32_t blocks) noexcept {
  Floats counts[BLOCK_PAIRS];
  Floats variances[BLOCK_PAIRS];
  for (uint32_t p = 0; p < BLOCK_PAIRS; ++p) {
    const uint8_t* first = row.records[p];
    const uint8_t* second = row.records[p + BLOCK_PAIRS];
    counts[p] = load_u8(counts_of(first, fields), counts_of(second, fields));
    variances[p] = load_halves(first + fields.variances, second + fields.variances);
  }
  transpose_halves(counts);
  transpose_halves(variances);
  RowSpread spread;
  Floats tokens = splat(0.0F);
  Floats sum = splat(0.0F);
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    spread.log_counts[j] = select(counts[j] > splat(0.0F), logarithm(counts[j]), splat(-INFINITE));
    spread.half_variances[j] = variances[j] * splat(0.5F);
    tokens = tokens + counts[j];
    sum = sum + counts[j] * spread.half_variances[j];
  }
  constexpr float NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Ints is_block = splat(static_cast<float>(blocks)) > load(NUMBERS);
  spread.half_mean = select(is_block, sum / tokens, splat(0.0F));
  return spread;
}

// An empty cluster's logit is -inf, as its logarithm is and its product finite. What is no number stays none, up to the sum of the
// block, which then cannot be estimated.
KVPOOL_LANES void finish_row(const ScoreWork& work, const RowSpread& shared, uint32_t head, uint32_t first,
                             Floats (&rows)[BLOCK_PAIRS], int32_t* loose) noexcept {
  transpose_halves(rows);
  const Floats spread = rows[CLUSTERS];
  const uint32_t kv_head = head / work.group;
  float* tails = work.tails == nullptr ? nullptr
                                       : work.tails + ((uint64_t{kv_head} * work.padded + first) * work.group +
                                                       uint64_t{head % work.group} * LANES) * CLUSTERS;
  Floats peak = splat(-INFINITE);
  unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE {
    const Floats correction = smallest(splat(SPREAD_MAX), shared.half_variances[j.value] * spread);
    const Floats plain = rows[j.value] + shared.log_counts[j.value];
    if (tails != nullptr) {
      store(tails + j.value * LANES, plain + correction * splat(0.5F));
    }
    rows[j.value] = plain + correction;
    peak = largest(peak, rows[j.value]);
  });
  Floats sum = splat(0.0F);
  unrolled<CLUSTERS>([&](auto j) KVPOOL_INLINE { sum = sum + exponential(rows[j.value] - peak); });
  const uint64_t at = uint64_t{head} * work.padded + first;
  const Floats logit = peak + logarithm(sum);
  store(work.peaks + at, peak);
  store(work.logits + at, select((logit - logit) >= splat(0.0F), logit, splat(-INFINITE)));
  loose[head] -= sum_of_lanes(shared.half_mean * spread > splat(work.loose_bound));
}

template <size_t HEADS, bool PREFETCHES>
void score_heads(const ScoreWork& work, const ClusterFields& fields, const BlockRow& row, const RowSpread& shared, uint32_t head,
                 uint32_t first, int32_t* loose) noexcept {
  Floats logits[HEADS][BLOCK_PAIRS];
  for (uint32_t pair = 0; pair < BLOCK_PAIRS; pair += BATCH_PAIRS) {
    score_pairs<HEADS, PREFETCHES>(work, fields, row, head, pair, logits);
    if constexpr (PREFETCHES) {  // what lies behind the keys
      for (uint32_t p = pair; p < pair + BATCH_PAIRS; ++p) {
        for (uint32_t at = fields.key_scales; at < fields.values; at += 64) {
          prefetch_far(row.ahead[p] + at);
          prefetch_far(row.ahead[p + BLOCK_PAIRS] + at);
        }
      }
    }
  }
  for (uint32_t h = 0; h < HEADS; ++h) {
    finish_row(work, shared, head + h, first, logits[h], loose);
  }
}

void score_row(const ScoreWork& work, const ClusterFields& fields, uint32_t kv_head, uint32_t first, int32_t* loose) noexcept {
  const BlockRow row = find_records(work, fields, kv_head, first);
  const RowSpread shared = row_spread(row, fields, work.blocks - first);
  for (uint32_t done = 0; done < work.group;) {
    const uint32_t head = kv_head * work.group + done;
    const uint32_t rest = work.group - done;
    if (rest >= QUERY_HEADS && done == 0) {
      score_heads<QUERY_HEADS, true>(work, fields, row, shared, head, first, loose);
      done += QUERY_HEADS;
    } else if (rest >= QUERY_HEADS) {
      score_heads<QUERY_HEADS, false>(work, fields, row, shared, head, first, loose);
      done += QUERY_HEADS;
    } else {
      score_heads<1, true>(work, fields, row, shared, head, first, loose);
      ++done;
    }
  }
}

void score_part(const ScoreWork& work, uint32_t part) noexcept {
  const ClusterFields fields = cluster_fields(work.head_dim);
  const uint32_t heads = work.kv_heads * work.group;
  int32_t* loose = work.loose + uint64_t{part} * heads;
  std::memset(loose, 0, heads * sizeof(int32_t));
  for (uint32_t first = part * PART_BLOCKS; first < (part + 1) * PART_BLOCKS; first += LANES) {
    if (first < work.blocks) {
      for (uint32_t kv_head = 0; kv_head < work.kv_heads; ++kv_head) {
        score_row(work, fields, kv_head, first, loose);
      }
    }
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint32_t block = first < work.blocks ? work.blocks : first; block < first + LANES; ++block) {
        work.logits[uint64_t{head} * work.padded + block] = -INFINITE;
      }
    }
  }
}

}  // namespace
}  // namespace kvpool::sparse_detail
