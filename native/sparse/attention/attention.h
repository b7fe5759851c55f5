// Attention of one query token over runs of keys and values where they lie: in the arena, or in an engine's own memory.
//
// What it is: exact softmax attention of grouped query heads over the runs that each KV head wants, in their order, in one pass with a
// running maximum, in float32. What it is not: a choice of runs, or a judge of their addresses.
// A run is some tokens that lie `token_stride` bytes apart, all KV heads inside a token:
//
//     keys + t * token_stride + g * head_dim * item   the key of token t of the run, KV head g
//
// The runs are cut into slices, which threads take one by one and which are merged in their order. Where they are cut depends on what is
// wanted alone, so the threads change no bit of the result, and the same runs give the same bits whether they were recalled or are all
// there is.
// The next tile is prefetched while one is computed: runs lie apart, and the processor's own prefetch stops at the end of each.
// Threads: any; the memory belongs to the caller.
#pragma once

#include <cstdint>
#include <span>

#include "sparse/summary_format.h"
#include "sparse/worker_team.h"

namespace kvpool {

struct KvRun {
  const uint8_t* keys;
  const uint8_t* values;
  uint64_t tokens;
};

struct AttentionShape {
  KvType type;
  uint32_t head_dim;  // as is_head_dim has it
  uint32_t kv_heads;
  uint32_t group;  // query heads of a KV head
  uint64_t token_stride;
};

struct AttentionPlan {
  AttentionShape shape;
  std::span<const KvRun> runs;
  std::span<const uint8_t> wanted;  // [run][KV head], 0 or 1
};

// Writes, for each query head, the natural logarithm of the sum of exp(q . k / sqrt(head_dim)) and the weighted mean of the values
// ([head][head_dim]); -inf and zeros where a head has no tokens. `query`: [head][head_dim], unscaled.
// REQUIRES: every wanted run is readable.
void attend(const AttentionPlan& plan, const float* query, float* logits, float* values, WorkerTeam& team);

enum class AttentionPath : uint8_t { PORTABLE, AVX2, AVX512 };

[[nodiscard]] bool attention_supports(AttentionPath path) noexcept;
[[nodiscard]] AttentionPath attention_path() noexcept;
[[nodiscard]] const char* attention_path_name(AttentionPath path) noexcept;
// For tests. REQUIRES: it is supported, and nobody attends meanwhile.
void set_attention_path(AttentionPath path) noexcept;

}  // namespace kvpool
