// What a tile of W tokens adds to the attention of some query heads of one KV head.
//
// Logits come from dot products whose lanes are added up for all W tokens at once, by a tree of shuffles; values are added into sums by
// channels, PASS pairs of vectors at a time, so that the sums stay in registers. Products of bfloat16 by the processor would save nothing:
// a query that is none goes as the sum of two, and keys of floats are waited for longer than they are converted.
// Included by the sources of each instruction set only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "sparse/attention/attention_lanes.h"
#include "sparse/attention/attention_paths.h"

namespace kvpool::attention_detail {

inline constexpr uint64_t LINE_BYTES = 64;

[[gnu::always_inline]] inline void prefetch_row(const uint8_t* row, uint64_t bytes) noexcept {
  for (uint64_t at = 0; at < bytes; at += LINE_BYTES) {
    __builtin_prefetch(row + at, 0, 2);
  }
}

// One tile: where its keys and values begin, how many tokens it has, and where those of the tile after it begin.
struct Tile {
  const uint8_t* keys;
  const uint8_t* values;
  size_t tokens;
  const uint8_t* next_keys;
  const uint8_t* next_values;
};

// What a slice computes for R query heads from `first` on.
template <typename Isa, KvType TYPE, uint32_t R>
class HeadGroup {
  static constexpr size_t W = Isa::WIDTH;
  static constexpr uint64_t PAIR_BYTES = 2 * W * kv_type_bytes(TYPE);
  using V = Lanes<W>;
  using F = typename V::F;

 public:
  HeadGroup(const Slice& slice, const Partial& partial, uint32_t first) noexcept
      : stride_(slice.shape->token_stride),
        head_dim_(slice.shape->head_dim),
        scale_(1.0F / std::sqrt(static_cast<float>(head_dim_))),
        pairs_(static_cast<uint32_t>(head_dim_ / (2 * W))),
        partial_{partial.maximum + first, partial.sum + first, partial.values + size_t{first} * head_dim_},
        query_(slice.query + size_t{first} * head_dim_) {
    std::fill_n(maximum_, R, -std::numeric_limits<float>::infinity());
    std::fill_n(partial_.values, size_t{R} * head_dim_, 0.0F);
  }

  void add(const Tile& tile) noexcept {
    F weights[R];
    logits(tile, weights);
    weigh(weights);
    for (uint32_t from = 0; from < pairs_;) {
      if (pairs_ - from >= Isa::PASS) {
        add_values<Isa::PASS>(tile, weights, from);
        from += Isa::PASS;
      } else {
        add_values<1>(tile, weights, from);
        from += 1;
      }
    }
  }

  void finish() noexcept {
    for (uint32_t head = 0; head < R; ++head) {
      partial_.maximum[head] = maximum_[head];
      partial_.sum[head] = sum_lanes<W>(sums_[head]);
    }
  }

 private:
  [[nodiscard]] float* values_of(uint32_t head) const noexcept { return partial_.values + size_t{head} * head_dim_; }

  [[gnu::always_inline]] void logits(const Tile& tile, F (&found)[R]) const noexcept {
    if (tile.tokens == W) {
      all_logits(tile, found);
    } else {
      some_logits(tile, found);
    }
  }

  [[gnu::always_inline]] void all_logits(const Tile& tile, F (&found)[R]) const noexcept {
    F rows[R][W / Isa::TOKENS];
#pragma GCC unroll 1
    for (size_t token = 0; token < W; token += Isa::TOKENS) {
      F sums[R];
      dot<Isa::TOKENS>(tile, token, sums);
#pragma GCC unroll 16
      for (uint32_t head = 0; head < R; ++head) {
        rows[head][token / Isa::TOKENS] = sums[head];
      }
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      found[head] = sum_rows<W, W / 2 / Isa::TOKENS>(rows[head]) * Isa::broadcast(scale_);
    }
  }

  // Of a tile with fewer than W tokens.
  [[gnu::noinline]] void some_logits(const Tile& tile, F (&found)[R]) const noexcept {
    F rows[R][W] = {};
    for (size_t token = 0; token < tile.tokens; ++token) {
      F sums[R];
      dot<1>(tile, token, sums);
      for (uint32_t head = 0; head < R; ++head) {
        rows[head][token] = sums[head];
      }
    }
    for (uint32_t head = 0; head < R; ++head) {
      found[head] = sum_rows<W, W / 2>(rows[head]) * Isa::broadcast(scale_);
      for (size_t lane = tile.tokens; lane < W; ++lane) {
        found[head][lane] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  // Products of T tokens' keys with each head, whose lanes are added up as far as they can be.
  template <size_t T>
  [[gnu::always_inline]] void dot(const Tile& tile, size_t token, F (&found)[R]) const noexcept {
    const uint8_t* key = tile.keys + token * stride_;
    F sums[T][R] = {};
#pragma GCC unroll 16
    for (size_t t = 0; t < T; ++t) {
      prefetch_row(tile.next_keys + (token + t) * stride_, pairs_ * PAIR_BYTES);
    }
    for (uint32_t pair = 0; pair < pairs_; ++pair) {
      add_products<T>(key + pair * PAIR_BYTES, pair, sums);
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      F each[T];
#pragma GCC unroll 16
      for (size_t t = 0; t < T; ++t) {
        each[t] = sums[t][head];
      }
      found[head] = sum_rows<W, W / 2>(each);
    }
  }

  template <size_t T>
  [[gnu::always_inline]] void add_products(const uint8_t* key, uint32_t pair, F (&sums)[T][R]) const noexcept {
    Pair<W> keys[T];
#pragma GCC unroll 16
    for (size_t t = 0; t < T; ++t) {
      keys[t] = load_pair<Isa, TYPE>(key + t * stride_);
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      const Pair<W> query = load_both<W>(query_ + size_t{head} * head_dim_ + pair * 2 * W);
#pragma GCC unroll 16
      for (size_t t = 0; t < T; ++t) {
        sums[t][head] = Isa::fma(keys[t].first, query.first, sums[t][head]);
        sums[t][head] = Isa::fma(keys[t].second, query.second, sums[t][head]);
      }
    }
  }

  // Turns logits into weights under the running maximum.
  [[gnu::always_inline]] void weigh(F (&logits)[R]) noexcept {
    float most[R];
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      most[head] = max_lane<W>(logits[head]);
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      if (most[head] > maximum_[head]) {
        raise(head, most[head]);
      }
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
      // Logits of -inf weigh nothing, under a maximum of -inf too.
      const float base = maximum_[head] == -std::numeric_limits<float>::infinity() ? 0.0F : maximum_[head];
      logits[head] = exp_lanes<Isa>(logits[head] - Isa::broadcast(base));
      sums_[head] += logits[head];
    }
  }

  // Turns what was added before to a greater maximum.
  [[gnu::noinline]] void raise(uint32_t head, float most) noexcept {
    const F shrink = exp_lanes<Isa>(Isa::broadcast(maximum_[head] - most));
    maximum_[head] = most;
    sums_[head] *= shrink;
    for (uint32_t place = 0; place < head_dim_; place += W) {
      F held;
      std::memcpy(&held, values_of(head) + place, sizeof(held));
      held *= shrink;
      std::memcpy(values_of(head) + place, &held, sizeof(held));
    }
  }

  template <uint32_t P>
  [[gnu::always_inline]] void add_values(const Tile& tile, const F (&weights)[R], uint32_t from) noexcept {
    Pair<W> sums[R][P];
    float factors[R][W];
    std::memcpy(factors, weights, sizeof(factors));
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
#pragma GCC unroll 16
      for (uint32_t pair = 0; pair < P; ++pair) {
        sums[head][pair] = load_both<W>(values_of(head) + (from + pair) * 2 * W);
      }
    }
    for (size_t token = 0; token < tile.tokens; ++token) {
      const uint64_t at = token * stride_ + from * PAIR_BYTES;
      prefetch_row(tile.next_values + at, P * PAIR_BYTES);
#pragma GCC unroll 16
      for (uint32_t pair = 0; pair < P; ++pair) {
        const Pair<W> value = load_pair<Isa, TYPE>(tile.values + at + pair * PAIR_BYTES);
#pragma GCC unroll 16
        for (uint32_t head = 0; head < R; ++head) {
          const F factor = Isa::broadcast(factors[head][token]);
          sums[head][pair].first = Isa::fma(factor, value.first, sums[head][pair].first);
          sums[head][pair].second = Isa::fma(factor, value.second, sums[head][pair].second);
        }
      }
    }
#pragma GCC unroll 16
    for (uint32_t head = 0; head < R; ++head) {
#pragma GCC unroll 16
      for (uint32_t pair = 0; pair < P; ++pair) {
        store_both<W>(values_of(head) + (from + pair) * 2 * W, sums[head][pair]);
      }
    }
  }

  uint64_t stride_;
  uint32_t head_dim_;
  float scale_;
  uint32_t pairs_;  // of vectors in a row
  Partial partial_;
  const float* query_;
  float maximum_[R];
  F sums_[R] = {};
};

}  // namespace kvpool::attention_detail
