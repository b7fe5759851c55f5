// What the heads of a KV head have of each block, and the ranks by which blocks are chosen.
//
// Internal linkage, as lanes.h. Any thread.
#pragma once

#include <limits>

#include "sparse/kernels/lanes_loads.h"
#include "sparse/kernels/lanes_math.h"
#include "sparse/kernels/sparse_kernels.h"

namespace kvpool::sparse_detail {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Greater is greater; NaN ranks as what cannot be estimated.
KVPOOL_LANES int32_t rank_of(float score) noexcept {
  int32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  if (!(score - score == 0.0F)) {
    return RANK_UNREADABLE;
  }
  return bits >= 0 ? bits : bits ^ INT32_MAX;
}

void share_blocks(const ShareWork& work) noexcept {
  for (uint32_t block = 0; block < work.padded; ++block) {
    work.ranks[block] = 0;
  }
  for (uint32_t head = 0; head < work.group; ++head) {
    const float* logits = work.logits + uint64_t{head} * work.padded;
    float* shares = work.shares + uint64_t{head} * work.padded;
    Floats peak = splat(-INFINITE);
    for (uint32_t block = 0; block < work.padded; block += LANES) {
      peak = largest(load(logits + block), peak);
    }
    const float top = largest_lane(peak);
    float total = 0.0F;
    for (uint32_t first = 0; first < work.padded; first += SLICE_BLOCKS) {
      Floats sum = splat(0.0F);
      for (uint32_t block = first; block < first + SLICE_BLOCKS; block += LANES) {
        const Floats share = exponential(load(logits + block) - splat(top));
        store(shares + block, share);
        sum = sum + share;
      }
      total += sum_of_lanes(sum);
    }
    const Floats factor = splat(total > 0.0F ? 1.0F / total : 0.0F);
    const auto* scores = reinterpret_cast<const float*>(work.ranks);
    for (uint32_t block = 0; block < work.padded; block += LANES) {
      const Floats share = load(shares + block) * factor;
      const Ints is_unreadable = splat(-INFINITE) >= load(logits + block);
      store(shares + block, select(is_unreadable, splat(0.0F), share));
      store(reinterpret_cast<float*>(work.ranks) + block, select(is_unreadable, splat(INFINITE), load(scores + block) + share));
    }
  }
  for (uint32_t block = 0; block < work.padded; block += LANES) {
    const Ints bits = load(work.ranks + block);
    store(work.ranks + block, select(bits >= splat(int32_t{0x7F800000}), splat(RANK_UNREADABLE), bits));
  }
}

void rank_means(const uint8_t* const* records, uint64_t offset, uint32_t blocks, const float* query, uint32_t head_dim,
                int32_t* ranks) noexcept {
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint8_t* record = records[block] + offset;
    if (block + 4 < blocks) {
      for (uint32_t at = 0; at < head_dim * 2; at += 64) {
        __builtin_prefetch(records[block + 4] + offset + at);
      }
    }
    Floats sum = splat(0.0F);
    for (uint32_t d = 0; d < head_dim; d += LANES) {
      sum = sum + load_halves(record + d * 2, record + d * 2 + 16) * load(query + d);
    }
    ranks[block] = rank_of(sum_of_lanes(sum));
  }
}

uint32_t count_at_least(const int32_t* ranks, uint32_t padded, int32_t bound) noexcept {
  Ints count = splat(int32_t{0});
  for (uint32_t block = 0; block < padded; block += LANES) {
    count = count - (load(ranks + block) >= splat(bound));
  }
  return static_cast<uint32_t>(sum_of_lanes(count));
}

}  // namespace
}  // namespace kvpool::sparse_detail
