#include "sparse/lookup_step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr float EMPTY_LOGIT = -std::numeric_limits<float>::infinity();

// What a recall has found, and attention to what it chose.
struct Found {
  explicit Found(const RecallShape& shape, uint32_t take)
      : chosen(size_t{shape.kv_heads} * take), is_dense(shape.kv_heads), kept_mass(shape.heads()), loose_share(shape.heads()),
        tail_logits(shape.heads(), EMPTY_LOGIT), tail_values(size_t{shape.heads()} * shape.head_dim), logits(shape.heads()) {}

  [[nodiscard]] RecallAnswer answer(bool wants_tail) noexcept {
    return {chosen.data(), is_dense.data(), kept_mass.data(), loose_share.data(), wants_tail ? tail_logits.data() : nullptr,
            wants_tail ? tail_values.data() : nullptr};
  }

  std::vector<int32_t> chosen;
  std::vector<uint8_t> is_dense;
  std::vector<float> kept_mass;
  std::vector<float> loose_share;
  std::vector<float> tail_logits;
  std::vector<float> tail_values;
  std::vector<float> logits;
};

std::vector<uint8_t> wanted_runs(const RecallShape& shape, const LookupPlan& plan, const Found& found) {
  std::vector<uint8_t> wanted(plan.runs.size() * shape.kv_heads, 1);
  const auto middle = std::span(wanted).subspan(size_t{plan.first} * shape.kv_heads, plan.records.size() * shape.kv_heads);
  for (size_t at = 0; at < middle.size(); at += shape.kv_heads) {
    std::ranges::copy(found.is_dense, middle.data() + at);
  }
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    for (const int32_t block : std::span(found.chosen).subspan(size_t{head} * plan.take, plan.take)) {
      middle[static_cast<size_t>(block) * shape.kv_heads + head] = 1;
    }
  }
  return wanted;
}

// Adds the estimate of what was not read to the values of a query head; what it weighs of 1. A part of no weight counts nothing,
// whatever its values.
float merge_tail(float logit, float tail_logit, std::span<float> values, const float* tail) noexcept {
  const float most = std::max(logit, tail_logit);
  const float weight = std::exp(logit - most);
  const float tail_weight = std::exp(tail_logit - most);
  const float total = weight + tail_weight;
  for (size_t channel = 0; channel < values.size(); ++channel) {
    const float read = weight > 0.0F ? weight * values[channel] : 0.0F;
    const float estimated = tail_weight > 0.0F ? tail_weight * tail[channel] : 0.0F;
    values[channel] = (read + estimated) / total;
  }
  return tail_weight / total;
}

}  // namespace

LookupCounts attend_by_lookup(Recall& recall, const LookupPlan& plan, const float* query, float* values, WorkerTeam& team) {
  const RecallShape& shape = recall.shape();
  KVPOOL_CHECK(plan.first + plan.records.size() <= plan.runs.size());
  const AttentionShape attention{plan.type, shape.head_dim, shape.kv_heads, shape.group, plan.token_stride};
  const bool has_tail = shape.form != SummaryForm::MEAN;
  Found found(shape, plan.take);
  recall.run(team, plan.records, query, plan.take, found.answer(has_tail));
  attend({attention, plan.runs, wanted_runs(shape, plan, found)}, query, found.logits.data(), values, team);
  LookupCounts counts;
  std::vector<uint8_t> is_whole(shape.kv_heads);  // reads everything after all
  for (uint32_t head = 0; head < shape.heads(); ++head) {
    const uint32_t kv_head = head / shape.group;
    const bool has_mass = !std::isnan(found.kept_mass[head]);
    counts.kept_masses += has_mass ? 1U : 0U;
    counts.kept_mass += has_mass ? double{found.kept_mass[head]} : 0.0;
    if (found.is_dense[kv_head] != 0 || found.tail_logits[head] == EMPTY_LOGIT) {
      continue;
    }
    const uint64_t at = uint64_t{head} * shape.head_dim;
    const float weight = merge_tail(found.logits[head], found.tail_logits[head], {values + at, shape.head_dim}, &found.tail_values[at]);
    is_whole[kv_head] |= weight > plan.tail_weight_max ? 1 : 0;
  }
  bool is_any_whole = false;
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    const auto loose = std::span(found.loose_share).subspan(size_t{kv_head} * shape.group, shape.group);
    if (std::ranges::none_of(loose, [&](float share) { return share > plan.loose_share; })) {
      is_whole[kv_head] = 0;
    }
    is_any_whole |= is_whole[kv_head] != 0;
    counts.dense_heads += found.is_dense[kv_head] != 0 || is_whole[kv_head] != 0 ? 1U : 0U;
  }
  if (!is_any_whole) {
    return counts;
  }
  std::vector<uint8_t> wanted(plan.runs.size() * shape.kv_heads);
  for (size_t at = 0; at < wanted.size(); at += shape.kv_heads) {
    std::ranges::copy(is_whole, wanted.data() + at);
  }
  std::vector<float> whole(size_t{shape.heads()} * shape.head_dim);
  attend({attention, plan.runs, wanted}, query, found.logits.data(), whole.data(), team);
  const size_t group_floats = size_t{shape.group} * shape.head_dim;
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    if (is_whole[kv_head] != 0) {
      std::copy_n(whole.data() + kv_head * group_floats, group_floats, values + kv_head * group_floats);
    }
  }
  return counts;
}

}  // namespace kvpool
