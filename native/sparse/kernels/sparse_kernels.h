// The kernels of this folder as tables of functions, one table for each instruction set.
//
// What it is: what the sources of sparse/ call. Each table's functions are compiled in a source of its own, with its own flags, from
// the same templates; their results are the same bits. Pure but for what they write; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse/summary_format.h"

namespace kvpool::sparse_detail {

// Blocks of one task: sums over them are made one by one, and then combined in their order, so that no sum depends on threads.
inline constexpr uint32_t SLICE_BLOCKS = 64;
// Blocks that are scored at once: sums over them are counts, so that there may be many for the threads to end together.
inline constexpr uint32_t PART_BLOCKS = 32;

// Keys or values of one block of one KV head.
struct BlockSource {
  KvType type;
  uint32_t head_dim;
  uint32_t tokens;
  uint64_t token_stride;  // bytes
  const uint8_t* keys;
  const uint8_t* values;
};

// Bytes of the codes of four channels of a query: two vectors of eight lanes, in a form of the instruction set's own.
inline constexpr uint32_t QUERY_STEP_BYTES = 64;

[[nodiscard]] constexpr uint64_t query_bytes(uint32_t head_dim) noexcept { return uint64_t{head_dim} / 4 * QUERY_STEP_BYTES; }

// One query head, to be encoded. REQUIRES: finite numbers.
struct QueryWork {
  uint32_t head_dim;
  const float* query;  // [head_dim]
  uint8_t* codes;      // [query_bytes(head_dim)]
  int32_t* biases;     // [head_dim / 32][16]: where sums of products begin
  float* scales;       // [head_dim / 32][16], 1 / sqrt(head_dim) in it
};

// What scoring reads and writes. `padded`: blocks, rounded up to slices. Heads are query heads; those of KV head g are the
// `group` from g * group on.
struct ScoreWork {
  uint32_t head_dim;
  uint32_t kv_heads;
  uint32_t group;
  uint32_t blocks;
  uint32_t padded;
  const uint8_t* const* records;  // [blocks]: of the first KV head
  const uint8_t* query_codes;     // [heads][query_bytes]
  const int32_t* query_biases;    // [heads][head_dim / 32][16]
  const float* query_scales;      // [heads][head_dim / 32][16]
  float loose_bound;
  float* logits;     // [heads][padded]: log-sum-exp of a block; -inf where it cannot be estimated
  float* peaks;      // [heads][padded]: its largest logit
  float* tails;      // [kv_heads][padded / 16][group][7][16]: logits of sixteen blocks' clusters for the tail, or nullptr
  int32_t* loose;    // [padded / PART_BLOCKS][heads]: how many blocks are above `loose_bound`
};

// One KV head: what its query heads have of each block.
struct ShareWork {
  uint32_t group;
  uint32_t padded;
  const float* logits;  // [group][padded]
  float* shares;        // [group][padded]
  int32_t* ranks;       // [padded]: greater is better; as `rank_of` the sum of shares, RANK_UNREADABLE for -inf
};

// One KV head's tail: its clusters' weights in place of their logits.
struct WeighWork {
  uint32_t group;
  uint32_t first_head;
  uint32_t padded;
  const uint8_t* is_left;  // [padded]
  const float* peaks;      // [heads][padded]
  float* tails;            // [padded / 16][group][7][16]: of this KV head
  float* references;       // [heads]: weights are exp(logit - reference); -inf where nothing is left
  float* totals;           // [heads]: sums of the weights
  float* logits;           // [heads]: logarithm of the sum of exponentials; -inf where nothing is left
};

// One slice: weights times value means.
struct TailWork {
  uint32_t head_dim;
  uint32_t group;
  uint32_t kv_heads;
  uint32_t slice;
  uint32_t padded;
  const uint8_t* const* records;  // [blocks]
  const uint8_t* is_left;         // [kv_heads][padded]
  const float* tails;             // [kv_heads][padded / 16][group][7][16]: weights
  const float* least;             // [heads]: a block whose clusters are below it for every head of the group is left out
  float* used;                    // [heads]: sums of the weights that are not left out
  float* values;                  // [heads][head_dim]
};

inline constexpr int32_t RANK_UNREADABLE = INT32_MAX;

struct SparseKernels {
  void (*build_clusters)(const BlockSource& source, uint8_t* record) noexcept;
  void (*build_mean)(const BlockSource& source, uint8_t* record) noexcept;
  void (*encode_query)(const QueryWork& work) noexcept;
  void (*score_part)(const ScoreWork& work, uint32_t part) noexcept;
  void (*share_blocks)(const ShareWork& work) noexcept;
  void (*weigh_tail)(const WeighWork& work) noexcept;
  void (*sum_tail)(const TailWork& work) noexcept;
  // ranks[b] of the inner products with the means of one KV head. `query` [head_dim].
  void (*rank_means)(const uint8_t* const* records, uint64_t offset, uint32_t blocks, const float* query, uint32_t head_dim,
                     int32_t* ranks) noexcept;
  uint32_t (*count_at_least)(const int32_t* ranks, uint32_t padded, int32_t bound) noexcept;
};

extern const SparseKernels PORTABLE_KERNELS;
#if defined(__x86_64__)
extern const SparseKernels AVX2_KERNELS;
extern const SparseKernels AVX512_KERNELS;
#endif

}  // namespace kvpool::sparse_detail
