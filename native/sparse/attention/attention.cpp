#include "sparse/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/check.h"
#include "sparse/attention/attention_paths.h"

namespace kvpool {
namespace {

using namespace attention_detail;

// A slice is worth a thread's way to it, and there are enough of them for the threads to end together.
constexpr uint64_t SLICE_TOKENS = 16384;  // of one KV head each
constexpr uint64_t SLICES_MAX = 32;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

AttentionPath best_path() noexcept {
  for (const AttentionPath path : {AttentionPath::AVX512, AttentionPath::AVX2}) {
    if (attention_supports(path)) {
      return path;
    }
  }
  return AttentionPath::PORTABLE;
}

std::atomic<AttentionPath>& chosen_attention() noexcept {
  static std::atomic<AttentionPath> path = best_path();
  return path;
}

void attend_slice_by(AttentionPath path, const Slice& slice, const Partial& partial) {
  switch (path) {
#if defined(__x86_64__)
    case AttentionPath::AVX512:
      return attend_slice_avx512(slice, partial);
    case AttentionPath::AVX2:
      return attend_slice_avx2(slice, partial);
#endif
    default:
      return attend_slice_portable(slice, partial);
  }
}

// The memory of all slices' outcomes.
class Partials {
 public:
  Partials(uint64_t slices, const AttentionShape& shape)
      : heads_(uint64_t{shape.kv_heads} * shape.group), row_(heads_ * (2 + uint64_t{shape.head_dim})), numbers_(slices * row_) {}

  [[nodiscard]] Partial of(uint64_t slice) noexcept {
    float* first = numbers_.data() + slice * row_;
    return {.maximum = first, .sum = first + heads_, .values = first + 2 * heads_};
  }

 private:
  const uint64_t heads_;
  const uint64_t row_;
  std::vector<float> numbers_;
};

// Where slices end: behind the run with which each has its share of what is wanted.
std::vector<uint64_t> slice_ends(const AttentionPlan& plan) {
  const uint64_t heads = plan.shape.kv_heads;
  std::vector<uint64_t> tokens(plan.runs.size());
  uint64_t total = 0;
  for (uint64_t run = 0; run < plan.runs.size(); ++run) {
    const auto wanted = plan.wanted.subspan(run * heads, heads);
    tokens[run] = plan.runs[run].tokens * static_cast<uint64_t>(std::ranges::count_if(wanted, [](uint8_t each) { return each != 0; }));
    total += tokens[run];
  }
  const uint64_t slices = std::clamp<uint64_t>(total / SLICE_TOKENS, 1, SLICES_MAX);
  std::vector<uint64_t> ends;
  uint64_t before = 0;
  for (uint64_t run = 0; run < tokens.size(); ++run) {
    before += tokens[run];
    if (tokens[run] != 0 && before * slices >= total * (ends.size() + 1)) {
      ends.push_back(run + 1);
    }
  }
  return ends;
}

// Merges what the slices have of one query head.
void merge(Partials& partials, uint64_t slices, uint64_t head, uint32_t head_dim, float& logit, float* value) {
  float most = NOTHING;
  for (uint64_t slice = 0; slice < slices; ++slice) {
    most = std::max(most, partials.of(slice).maximum[head]);
  }
  std::fill_n(value, head_dim, 0.0F);
  float sum = 0.0F;
  for (uint64_t slice = 0; slice < slices; ++slice) {
    const Partial part = partials.of(slice);
    if (part.sum[head] == 0.0F) {
      continue;  // no tokens
    }
    const float weight = part.maximum[head] == most ? 1.0F : std::exp(part.maximum[head] - most);
    sum += weight * part.sum[head];
    for (uint32_t channel = 0; channel < head_dim; ++channel) {
      value[channel] += weight * part.values[head * head_dim + channel];
    }
  }
  logit = sum == 0.0F ? NOTHING : most + std::log(sum);
  for (uint32_t channel = 0; channel < head_dim && sum != 0.0F; ++channel) {
    value[channel] /= sum;
  }
}

}  // namespace

void attend(const AttentionPlan& plan, const float* query, float* logits, float* values, WorkerTeam& team) {
  const AttentionShape& shape = plan.shape;
  KVPOOL_CHECK(is_head_dim(shape.head_dim));
  KVPOOL_CHECK(plan.wanted.size() == plan.runs.size() * shape.kv_heads);
  const std::vector<uint64_t> ends = slice_ends(plan);
  Partials partials(ends.size(), shape);
  const AttentionPath path = attention_path();
  team.run(static_cast<uint32_t>(ends.size()), [&](uint32_t number) {
    const Slice slice{.shape = &shape,
                      .runs = plan.runs.data(),
                      .wanted = plan.wanted.data(),
                      .first = number == 0 ? 0 : ends[number - 1],
                      .end = ends[number],
                      .query = query};
    attend_slice_by(path, slice, partials.of(number));
  });
  for (uint64_t head = 0; head < uint64_t{shape.kv_heads} * shape.group; ++head) {
    merge(partials, ends.size(), head, shape.head_dim, logits[head], values + head * shape.head_dim);
  }
}

bool attention_supports(AttentionPath path) noexcept {
  switch (path) {
#if defined(__x86_64__)
    case AttentionPath::AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bf16");
    case AttentionPath::AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    case AttentionPath::PORTABLE:
      return true;
    default:
      return false;
  }
}

AttentionPath attention_path() noexcept { return chosen_attention().load(std::memory_order_relaxed); }

const char* attention_path_name(AttentionPath path) noexcept {
  switch (path) {
    case AttentionPath::AVX512:
      return "avx512";
    case AttentionPath::AVX2:
      return "avx2";
    default:
      return "portable";
  }
}

void set_attention_path(AttentionPath path) noexcept {
  KVPOOL_CHECK(attention_supports(path));
  chosen_attention().store(path, std::memory_order_relaxed);
}

}  // namespace kvpool
