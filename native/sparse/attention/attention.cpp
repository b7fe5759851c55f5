#include "sparse/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/processor.h"
#include "base/types.h"
#include "sparse/attention/attention_paths.h"

namespace kvpool {
namespace {

using namespace attention_detail;

// A slice is worth a thread's way to it, and there are enough of them for the threads to end together: a multiple of what teams
// have mostly.
constexpr uint64_t SLICE_TOKENS = 8192;  // of one KV head each
constexpr uint64_t SLICES_MAX = 32;
constexpr uint64_t SLICES_STEP = 8;
constexpr uint64_t LINE_BYTES = 64;
constexpr uint64_t LINE_FLOATS = LINE_BYTES / sizeof(float);
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

// Floats that begin at a line of the cache, not set.
class AlignedFloats {
 public:
  explicit AlignedFloats(uint64_t count) : numbers_(std::make_unique_for_overwrite<float[]>(count + LINE_FLOATS)) {}
  [[nodiscard]] float* data() const noexcept {
    const auto address = reinterpret_cast<uintptr_t>(numbers_.get());
    return numbers_.get() + (0 - address) % LINE_BYTES / sizeof(float);
  }

 private:
  std::unique_ptr<float[]> numbers_;
};

// The memory of all slices' outcomes.
class Partials {
 public:
  Partials(uint64_t slices, const AttentionShape& shape)
      : heads_(round_up(uint64_t{shape.kv_heads} * shape.group, LINE_FLOATS)),
        row_(heads_ * (2 + uint64_t{shape.head_dim})),
        numbers_(slices * row_) {}

  [[nodiscard]] Partial of(uint64_t slice) const noexcept {
    float* first = numbers_.data() + slice * row_;
    return {.maximum = first, .sum = first + heads_, .values = first + 2 * heads_};
  }

 private:
  const uint64_t heads_;
  const uint64_t row_;
  const AlignedFloats numbers_;
};

// Queries by place, as the kernels of the path read them.
AlignedFloats placed(const float* query, const AttentionShape& shape, uint32_t lanes) {
  const uint64_t heads = uint64_t{shape.kv_heads} * shape.group;
  AlignedFloats found(heads * shape.head_dim);
  for (uint64_t at = 0; at < heads * shape.head_dim; at += shape.head_dim) {
    for (uint32_t place = 0; place < shape.head_dim; ++place) {
      found.data()[at + place] = query[at + channel_at(lanes, shape.type, place)];
    }
  }
  return found;
}

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
  const uint64_t most = std::clamp<uint64_t>(total / SLICE_TOKENS, 1, SLICES_MAX);
  const uint64_t slices = most < SLICES_STEP / 2 ? most : (most + SLICES_STEP - 1) / SLICES_STEP * SLICES_STEP;
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

// Merges what the slices have of one query head: its logit, and `sums` by place.
float merge(const Partials& partials, uint64_t slices, uint64_t head, std::span<float> sums) {
  float most = NOTHING;
  for (uint64_t slice = 0; slice < slices; ++slice) {
    most = std::max(most, partials.of(slice).maximum[head]);
  }
  std::ranges::fill(sums, 0.0F);
  float sum = 0.0F;
  for (uint64_t slice = 0; slice < slices; ++slice) {
    const Partial part = partials.of(slice);
    if (part.sum[head] == 0.0F) {
      continue;  // no tokens
    }
    const float weight = part.maximum[head] == most ? 1.0F : std::exp(part.maximum[head] - most);
    sum += weight * part.sum[head];
    const float* values = part.values + head * sums.size();
    for (size_t place = 0; place < sums.size(); ++place) {
      sums[place] += weight * values[place];
    }
  }
  for (size_t place = 0; place < sums.size() && sum != 0.0F; ++place) {
    sums[place] /= sum;
  }
  return sum == 0.0F ? NOTHING : most + std::log(sum);
}

}  // namespace

void attend(const AttentionPlan& plan, const float* query, float* logits, float* values, WorkerTeam& team) {
  const AttentionShape& shape = plan.shape;
  KVPOOL_CHECK(is_head_dim(shape.head_dim));
  KVPOOL_CHECK(plan.wanted.size() == plan.runs.size() * shape.kv_heads);
  const std::vector<uint64_t> ends = slice_ends(plan);
  Partials partials(ends.size(), shape);
  const AttentionPath path = attention_path();
  const uint32_t lanes = lanes_of(path);
  const AlignedFloats queries = placed(query, shape, lanes);
  team.run(static_cast<uint32_t>(ends.size()), [&](uint32_t number) {
    const Slice slice{.shape = &shape,
                      .runs = plan.runs.data(),
                      .wanted = plan.wanted.data(),
                      .first = number == 0 ? 0 : ends[number - 1],
                      .end = ends[number],
                      .query = queries.data()};
    attend_slice_by(path, slice, partials.of(number));
  });
  for (uint64_t head = 0; head < uint64_t{shape.kv_heads} * shape.group; ++head) {
    float sums[HEAD_DIM_MAX];
    logits[head] = merge(partials, ends.size(), head, {sums, shape.head_dim});
    for (uint32_t place = 0; place < shape.head_dim; ++place) {
      values[head * shape.head_dim + channel_at(lanes, shape.type, place)] = sums[place];
    }
  }
}

bool attention_supports(AttentionPath path) noexcept {
  switch (path) {
#if defined(__x86_64__)
    case AttentionPath::AVX512:
      return processor_features().avx512f && processor_features().avx512bw && processor_features().avx512vl;
    case AttentionPath::AVX2:
      return processor_features().avx2 && processor_features().fma && processor_features().f16c;
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
