// The loop of attention over the tiles of a slice: a template of the instruction set.
//
// Included by the sources of each instruction set only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/attention/head_group.h"

namespace kvpool::attention_detail {

inline constexpr uint32_t HEADS_AT_ONCE = 4;
inline constexpr uint64_t PIECE_TOKENS = 64;  // of all heads: 256 KiB of keys and values at 8 heads of 128 items of 2 bytes

// A place in a slice: the next tile is that of one KV head in one piece of one run. Heads go through a piece one after the other, so that
// what the processor fetches beside one head's rows is what the next head needs.
template <size_t W>
class Walk {
 public:
  explicit Walk(const Slice& slice) noexcept : slice_(slice) { seek(); }

  [[nodiscard]] bool is_over() const noexcept { return run_ == slice_.end; }
  [[nodiscard]] uint32_t head() const noexcept { return head_; }
  [[nodiscard]] size_t tokens() const noexcept { return std::min<uint64_t>(W, slice_.runs[run_].tokens - token_); }
  [[nodiscard]] const uint8_t* keys() const noexcept { return slice_.runs[run_].keys + offset(); }
  [[nodiscard]] const uint8_t* values() const noexcept { return slice_.runs[run_].values + offset(); }

  void advance() noexcept {
    token_ += W;
    if (token_ >= std::min(piece_ + PIECE_TOKENS, slice_.runs[run_].tokens)) {
      token_ = piece_;
      ++head_;
      seek();
    }
  }

 private:
  [[nodiscard]] uint64_t offset() const noexcept {
    const AttentionShape& shape = *slice_.shape;
    return token_ * shape.token_stride + uint64_t{head_} * shape.head_dim * kv_type_bytes(shape.type);
  }
  [[nodiscard]] bool is_wanted() const noexcept { return slice_.wanted[run_ * slice_.shape->kv_heads + head_] != 0; }

  // From where it is to the next head that wants its run.
  void seek() noexcept {
    while (!is_over()) {
      for (; piece_ < slice_.runs[run_].tokens && head_ < slice_.shape->kv_heads; ++head_) {
        if (is_wanted()) {
          return;
        }
      }
      head_ = 0;
      piece_ += PIECE_TOKENS;
      if (piece_ >= slice_.runs[run_].tokens) {
        piece_ = 0;
        ++run_;
      }
      token_ = piece_;
    }
  }

  const Slice& slice_;
  uint64_t run_ = slice_.first;
  uint64_t piece_ = 0;
  uint64_t token_ = 0;
  uint32_t head_ = 0;
};

// All query heads: those of a KV head in batches of HEADS_AT_ONCE, and REST behind them.
template <typename Isa, KvType TYPE, uint32_t REST>
class AllHeads {
  static constexpr uint32_t REST_SIZE = REST == 0 ? 1 : REST;

 public:
  AllHeads(const Slice& slice, const Partial& partial) : batches_(slice.shape->group / HEADS_AT_ONCE) {
    const uint32_t group = slice.shape->group;
    whole_.reserve(size_t{slice.shape->kv_heads} * batches_);
    rest_.reserve(REST == 0 ? 0 : slice.shape->kv_heads);
    for (uint32_t head = 0; head < slice.shape->kv_heads; ++head) {
      for (uint32_t batch = 0; batch < batches_; ++batch) {
        whole_.emplace_back(slice, partial, head * group + batch * HEADS_AT_ONCE);
      }
      if constexpr (REST != 0) {
        rest_.emplace_back(slice, partial, head * group + batches_ * HEADS_AT_ONCE);
      }
    }
  }

  void add(uint32_t kv_head, const Tile& tile) noexcept {
    for (uint32_t batch = 0; batch < batches_; ++batch) {
      whole_[size_t{kv_head} * batches_ + batch].add(tile);
    }
    if constexpr (REST != 0) {
      rest_[kv_head].add(tile);
    }
  }

  void finish() noexcept {
    for (auto& heads : whole_) {
      heads.finish();
    }
    for (auto& heads : rest_) {
      heads.finish();
    }
  }

 private:
  const uint32_t batches_;
  std::vector<HeadGroup<Isa, TYPE, HEADS_AT_ONCE>> whole_;
  std::vector<HeadGroup<Isa, TYPE, REST_SIZE>> rest_;
};

template <typename Isa, KvType TYPE, uint32_t REST>
void attend_tiles(const Slice& slice, const Partial& partial) {
  AllHeads<Isa, TYPE, REST> heads(slice, partial);
  Walk<Isa::WIDTH> next(slice);
  while (!next.is_over()) {
    const Walk<Isa::WIDTH> here = next;
    next.advance();
    const Walk<Isa::WIDTH>& ahead = next.is_over() ? here : next;
    heads.add(here.head(), {.keys = here.keys(),
                            .values = here.values(),
                            .tokens = here.tokens(),
                            .next_keys = ahead.keys(),
                            .next_values = ahead.values()});
  }
  heads.finish();
}

template <typename Isa, KvType TYPE>
void attend_typed(const Slice& slice, const Partial& partial) {
  switch (slice.shape->group % HEADS_AT_ONCE) {
    case 3:
      return attend_tiles<Isa, TYPE, 3>(slice, partial);
    case 2:
      return attend_tiles<Isa, TYPE, 2>(slice, partial);
    case 1:
      return attend_tiles<Isa, TYPE, 1>(slice, partial);
    default:
      return attend_tiles<Isa, TYPE, 0>(slice, partial);
  }
}

template <typename Isa>
void attend_slice(const Slice& slice, const Partial& partial) {
  switch (slice.shape->type) {
    case KvType::FLOAT32:
      return attend_typed<Isa, KvType::FLOAT32>(slice, partial);
    case KvType::FLOAT16:
      return attend_typed<Isa, KvType::FLOAT16>(slice, partial);
    case KvType::BFLOAT16:
      return attend_typed<Isa, KvType::BFLOAT16>(slice, partial);
  }
}

}  // namespace kvpool::attention_detail
