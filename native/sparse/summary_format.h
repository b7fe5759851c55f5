// Summaries of blocks: their forms, and where in a record what lies.
//
// A summary stands for one block of tokens of one KV head of one layer. Those of a block lie one behind the other, by KV head.
// Records are stored and sent with their chunks: a changed layout is another form.
//
//   MEAN       key mean fp16 [D]. NaN first where the block has NaN, Inf or a mean beyond fp16.
//   CLUSTERS7  by field, D = head_dim, G = D / 32 groups of channels, 7 clusters:
//     keys            u8 [D / 4][8][4]     four channels of all clusters, so that scoring needs no horizontal sums: code + 128 of the
//                                          key means, and last the variance profile: of a channel, relative to the mean one
//     key_scales      fp16 [G][8]          of the key means, and last of the profile
//     variances       fp16 [7]             mean square of the clusters' residuals; largest fp16 where it is above
//     counts          u8 [7]               tokens; 0 is an empty cluster, and 7 of them are a block that cannot be estimated
//     value_scales    fp16 [G][7]
//     values          u32 [D]              value means of a channel: cluster j in bits 4j to 4j + 3, as code + 8; bits 28 to 31 are 0
//
// What scoring reads lies in front of what the tail reads.
//
// Little endian, nothing aligned. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

enum class SummaryForm : uint8_t { MEAN = 1, CLUSTERS7 = 2 };
enum class KvType : uint8_t { FLOAT32, FLOAT16, BFLOAT16 };

inline constexpr uint32_t CLUSTERS = 7;
inline constexpr uint32_t CHANNEL_GROUP = 32;
inline constexpr uint32_t HEAD_DIM_MAX = 256;
inline constexpr uint32_t SUMMARY_TOKENS_MAX = 255;  // a count is one byte
inline constexpr uint32_t QUERY_GROUP_MAX = 16;      // query heads of a KV head

[[nodiscard]] constexpr bool is_head_dim(uint32_t head_dim) noexcept {
  return head_dim >= CHANNEL_GROUP && head_dim <= HEAD_DIM_MAX && head_dim % CHANNEL_GROUP == 0;
}

[[nodiscard]] constexpr uint32_t kv_type_bytes(KvType type) noexcept { return type == KvType::FLOAT32 ? 4 : 2; }

// Lanes of a group of channels: the clusters, and the profile.
inline constexpr uint32_t KEY_LANES = CLUSTERS + 1;
inline constexpr int32_t KEY_ZERO = 128;  // the code of zero, of a key mean

// Where in a record of CLUSTERS7 the fields begin; the keys are first.
struct ClusterFields {
  uint32_t key_scales;
  uint32_t variances;
  uint32_t counts;
  uint32_t value_scales;
  uint32_t values;
  uint32_t bytes;
};

// REQUIRES: is_head_dim(head_dim).
[[nodiscard]] constexpr ClusterFields cluster_fields(uint32_t head_dim) noexcept {
  const uint32_t groups = head_dim / CHANNEL_GROUP;
  ClusterFields fields{};
  fields.key_scales = KEY_LANES * head_dim;
  fields.variances = fields.key_scales + KEY_LANES * groups * 2;
  fields.counts = fields.variances + CLUSTERS * 2;
  fields.value_scales = fields.counts + CLUSTERS;
  fields.values = fields.value_scales + CLUSTERS * groups * 2;
  fields.bytes = fields.values + head_dim * 4;
  return fields;
}

// Where the code of a channel and a lane lies.
[[nodiscard]] constexpr uint32_t key_at(uint32_t channel, uint32_t lane) noexcept {
  return (channel / 4 * KEY_LANES + lane) * 4 + channel % 4;
}

// Of one block and KV head. REQUIRES: is_head_dim(head_dim).
[[nodiscard]] constexpr uint64_t summary_bytes(SummaryForm form, uint32_t head_dim) noexcept {
  return form == SummaryForm::MEAN ? uint64_t{head_dim} * 2 : cluster_fields(head_dim).bytes;
}

static_assert(summary_bytes(SummaryForm::CLUSTERS7, 128) == 1677);
static_assert(summary_bytes(SummaryForm::CLUSTERS7, 64) == 849);
static_assert(summary_bytes(SummaryForm::MEAN, 128) == 256);
static_assert(cluster_fields(128).key_scales == 1024 && cluster_fields(128).value_scales == 1109);

}  // namespace kvpool
