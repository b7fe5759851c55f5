#include "sparse/recall.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "sparse/sparse_path.h"

namespace kvpool {
namespace {

using namespace sparse_detail;

constexpr float NOTHING = std::numeric_limits<float>::quiet_NaN();
// A cluster below this share of the mean cluster's weight is left out of the values: of their mass 1.6 % at most is lost, and a
// cluster of one token stays where all tokens weigh the same, as they do for a query of zeros.
constexpr float LEAST_SHARE = 1.0F / 64.0F;
constexpr size_t LANES = 16;

template <typename Number>
void grow(std::vector<Number>& vector, size_t size) {
  if (vector.size() < size) {
    vector.resize(size);
  }
}

}  // namespace

Recall::Recall(const RecallShape& shape, const RecallRule& rule) : shape_(shape), rule_(rule) {
  KVPOOL_CHECK(is_head_dim(shape.head_dim));
  KVPOOL_CHECK(shape.kv_heads > 0);
  KVPOOL_CHECK(shape.group >= 1 && shape.group <= QUERY_GROUP_MAX);
}

void Recall::run(WorkerTeam& team, std::span<const uint8_t* const> records, const float* queries, uint32_t take,
                 const RecallAnswer& answer) {
  KVPOOL_CHECK(records.size() <= RECALL_BLOCKS_MAX);
  KVPOOL_CHECK(take <= records.size());
  const std::lock_guard guard(lock_);
  const bool is_mean = shape_.form == SummaryForm::MEAN;
  const bool wants_tail = answer.tail_logits != nullptr;
  KVPOOL_CHECK(!wants_tail || !is_mean);
  prepare(static_cast<uint32_t>(records.size()), wants_tail);
  team.run(shape_.kv_heads, [&](uint32_t kv_head) {
    for (uint32_t head = kv_head * shape_.group; head < (kv_head + 1) * shape_.group; ++head) {
      prepare_head(queries + uint64_t{head} * shape_.head_dim, head);
    }
  });
  if (is_mean) {
    score_means(team, records, queries);
  } else {
    score(team, records, wants_tail);
  }
  team.run(shape_.kv_heads, [&](uint32_t kv_head) {
    choose(kv_head, take, answer);
    if (wants_tail) {
      weigh(kv_head);
    }
  });
  if (!wants_tail) {
    return;
  }
  team.run(padded_ / SLICE_BLOCKS, [&](uint32_t slice) {
    const uint64_t first = uint64_t{slice} * shape_.heads();
    sparse_kernels().sum_tail({shape_.head_dim, shape_.group, shape_.kv_heads, slice, padded_, records.data(), is_left_.data(),
                               tails_.data(), least_.data(), used_.data() + first, values_.data() + first * shape_.head_dim});
  });
  team.run(shape_.kv_heads, [&](uint32_t kv_head) { combine(kv_head, answer); });
}

void Recall::prepare(uint32_t blocks, bool wants_tail) {
  const size_t heads = shape_.heads();
  blocks_ = blocks;
  padded_ = (blocks + SLICE_BLOCKS - 1) / SLICE_BLOCKS * SLICE_BLOCKS;
  const size_t slices = padded_ / SLICE_BLOCKS;
  grow(query_codes_, heads * query_bytes(shape_.head_dim));
  grow(query_biases_, heads * shape_.head_dim / CHANNEL_GROUP * LANES);
  grow(query_scales_, heads * shape_.head_dim / CHANNEL_GROUP * LANES);
  is_wild_.assign(shape_.kv_heads, 0);
  for (auto* column : {&logits_, &peaks_, &shares_}) {
    grow(*column, heads * padded_);
  }
  grow(loose_, padded_ / PART_BLOCKS * heads);
  grow(ranks_, size_t{shape_.kv_heads} * padded_);
  grow(is_left_, size_t{shape_.kv_heads} * padded_);
  if (wants_tail) {
    grow(tails_, heads * padded_ * CLUSTERS);
    for (auto* column : {&references_, &totals_, &tail_logits_, &least_}) {
      grow(*column, heads);
    }
    grow(used_, slices * heads);
    grow(values_, slices * heads * shape_.head_dim);
  }
}

void Recall::prepare_head(const float* query, uint32_t head) {
  static constexpr float ZEROS[HEAD_DIM_MAX] = {};
  const uint32_t dim = shape_.head_dim;
  const bool is_finite = std::all_of(query, query + dim, [](float value) { return std::isfinite(value); });
  is_wild_[head / shape_.group] |= is_finite ? 0 : 1;
  const uint64_t lanes = uint64_t{head} * (dim / CHANNEL_GROUP) * LANES;
  sparse_kernels().encode_query({dim, is_finite ? query : ZEROS, query_codes_.data() + head * query_bytes(dim),
                                 query_biases_.data() + lanes, query_scales_.data() + lanes});
}

void Recall::score(WorkerTeam& team, std::span<const uint8_t* const> records, bool wants_tail) {
  const ScoreWork work{shape_.head_dim, shape_.kv_heads, shape_.group, blocks_, padded_, records.data(), query_codes_.data(),
                       query_biases_.data(), query_scales_.data(), rule_.loose_bound, logits_.data(), peaks_.data(),
                       wants_tail ? tails_.data() : nullptr, loose_.data()};
  team.run(padded_ / PART_BLOCKS, [&](uint32_t part) { sparse_kernels().score_part(work, part); });
}

void Recall::score_means(WorkerTeam& team, std::span<const uint8_t* const> records, const float* queries) {
  team.run(shape_.kv_heads, [&](uint32_t kv_head) {
    float mean[HEAD_DIM_MAX];
    for (uint32_t d = 0; d < shape_.head_dim; ++d) {
      float sum = 0.0F;
      for (uint32_t h = 0; h < shape_.group; ++h) {
        sum += queries[(uint64_t{kv_head} * shape_.group + h) * shape_.head_dim + d];
      }
      mean[d] = is_wild_[kv_head] != 0 ? 0.0F : sum / static_cast<float>(shape_.group);
    }
    const uint64_t offset = kv_head * summary_bytes(shape_.form, shape_.head_dim);
    int32_t* ranks = ranks_.data() + uint64_t{kv_head} * padded_;
    sparse_kernels().rank_means(records.data(), offset, blocks_, mean, shape_.head_dim, ranks);
  });
}

void Recall::choose(uint32_t kv_head, uint32_t take, const RecallAnswer& answer) {
  int32_t* ranks = ranks_.data() + uint64_t{kv_head} * padded_;
  if (shape_.form == SummaryForm::CLUSTERS7) {
    const uint64_t first = uint64_t{kv_head} * shape_.group * padded_;
    sparse_kernels().share_blocks({shape_.group, padded_, logits_.data() + first, shares_.data() + first, ranks});
  }
  std::fill(ranks + blocks_, ranks + padded_, INT32_MIN);
  uint8_t* is_left = is_left_.data() + uint64_t{kv_head} * padded_;
  uint32_t unreadable = 0;
  for (uint32_t block = 0; block < padded_; ++block) {
    unreadable += ranks[block] == RANK_UNREADABLE ? 1U : 0U;
    is_left[block] = block < blocks_ && ranks[block] != RANK_UNREADABLE ? 1 : 0;
  }
  take_best(kv_head, take, answer.chosen + uint64_t{kv_head} * take);
  answer.is_dense[kv_head] = is_wild_[kv_head] != 0 || unreadable > take ? 1 : 0;
  judge(kv_head, take, answer);
}

// The `take` greatest ranks: those above the rank of the last one, and of those that equal it the lower blocks.
void Recall::take_best(uint32_t kv_head, uint32_t take, int32_t* chosen) {
  const int32_t* ranks = ranks_.data() + uint64_t{kv_head} * padded_;
  uint8_t* is_left = is_left_.data() + uint64_t{kv_head} * padded_;
  if (take == 0) {
    return;
  }
  const auto counted = [&](uint32_t bound) {
    return sparse_kernels().count_at_least(ranks, padded_, static_cast<int32_t>(bound ^ 0x80000000U));
  };
  uint32_t bound = 0;  // the greatest with as many at or above it
  for (uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
    bound |= counted(bound | bit) >= take ? bit : 0U;
  }
  const auto least = static_cast<int32_t>(bound ^ 0x80000000U);
  uint32_t equal = take - (bound == UINT32_MAX ? 0 : counted(bound + 1));
  uint32_t found = 0;
  for (uint32_t block = 0; found < take; ++block) {
    const bool is_equal = ranks[block] == least && equal > 0;
    equal -= is_equal ? 1U : 0U;
    if (is_equal || ranks[block] > least) {
      chosen[found++] = static_cast<int32_t>(block);
      is_left[block] = 0;
    }
  }
}

// The mass that was kept, and whether the estimates are to be trusted.
void Recall::judge(uint32_t kv_head, uint32_t take, const RecallAnswer& answer) {
  const int32_t* chosen = answer.chosen + uint64_t{kv_head} * take;
  for (uint32_t head = kv_head * shape_.group; head < (kv_head + 1) * shape_.group; ++head) {
    if (shape_.form == SummaryForm::MEAN) {
      answer.kept_mass[head] = NOTHING;
      answer.loose_share[head] = NOTHING;
      continue;
    }
    const float* shares = shares_.data() + uint64_t{head} * padded_;
    float kept = 0.0F;
    for (uint32_t i = 0; i < take; ++i) {
      kept += shares[chosen[i]];
    }
    answer.kept_mass[head] = take == blocks_ ? 1.0F : std::min(kept, 1.0F);
    int32_t loose = 0;
    for (uint32_t part = 0; part < padded_ / PART_BLOCKS; ++part) {
      loose += loose_[uint64_t{part} * shape_.heads() + head];
    }
    const float share = blocks_ == 0 ? 0.0F : static_cast<float>(loose) / static_cast<float>(blocks_);
    answer.loose_share[head] = share;
    answer.is_dense[kv_head] |= share > rule_.loose_share ? 1 : 0;
  }
}

void Recall::weigh(uint32_t kv_head) {
  const uint32_t first = kv_head * shape_.group;
  const uint8_t* is_left = is_left_.data() + uint64_t{kv_head} * padded_;
  sparse_kernels().weigh_tail({shape_.group, first, padded_, is_left, peaks_.data(), tails_of(kv_head),
                               references_.data(), totals_.data(), tail_logits_.data()});
  const auto left = static_cast<uint32_t>(std::count(is_left, is_left + padded_, 1));
  for (uint32_t head = first; head < first + shape_.group; ++head) {
    least_[head] = totals_[head] * LEAST_SHARE / static_cast<float>(std::max(left, 1U) * CLUSTERS);
  }
}

// Slices one after the other.
void Recall::combine(uint32_t kv_head, const RecallAnswer& answer) {
  const uint32_t dim = shape_.head_dim;
  for (uint32_t head = kv_head * shape_.group; head < (kv_head + 1) * shape_.group; ++head) {
    float* value = answer.tail_values + uint64_t{head} * dim;
    std::fill(value, value + dim, 0.0F);
    float used = 0.0F;
    for (uint32_t slice = 0; slice < padded_ / SLICE_BLOCKS; ++slice) {
      const uint64_t at = uint64_t{slice} * shape_.heads() + head;
      used += used_[at];
      for (uint32_t d = 0; d < dim; ++d) {
        value[d] += values_[at * dim + d];
      }
    }
    answer.tail_logits[head] = tail_logits_[head];
    const float factor = used > 0.0F ? 1.0F / used : 0.0F;
    for (uint32_t d = 0; d < dim; ++d) {
      value[d] *= factor;
    }
  }
}

}  // namespace kvpool
