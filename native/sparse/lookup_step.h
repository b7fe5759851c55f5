// One decoding step of one layer by lookup: recall, attention to what was chosen and to what is always read, and their merge.
//
//     runs    0 .. first | first .. first + blocks | .. end
//             always     | the middle: chosen ones | always      the others are estimated by their summaries
//
// What it is not: an owner of keys, values or summaries, or a judge of their addresses.
// Threads: any; steps with the same Recall go one after the other.
#pragma once

#include <cstdint>
#include <span>

#include "sparse/attention/attention.h"
#include "sparse/recall.h"

namespace kvpool {

struct LookupPlan {
  KvType type;
  uint64_t token_stride;
  std::span<const KvRun> runs;
  uint32_t first;                            // run of the first middle block
  std::span<const uint8_t* const> records;   // of each middle block, that of its first KV head
  uint32_t take;                             // middle blocks that each KV head reads
  // A KV head reads everything where more than this share of its blocks is loose, and its estimate weighs more than this.
  float loose_share;
  float tail_weight_max;
};

struct LookupCounts {
  double kept_mass = 0.0;     // sum over the query heads that have one
  uint32_t kept_masses = 0;   // such query heads
  uint32_t dense_heads = 0;   // KV heads that have read everything
};

// Writes the weighted mean of the values for each query head ([head][head_dim]). `query`: [head][head_dim], unscaled.
// With take == records.size() it has the bits of attention to all runs.
// REQUIRES: first + records.size() <= runs.size(); take <= records.size() <= RECALL_BLOCKS_MAX; every run is readable.
[[nodiscard]] LookupCounts attend_by_lookup(Recall& recall, const LookupPlan& plan, const float* query, float* values, WorkerTeam& team);

}  // namespace kvpool
