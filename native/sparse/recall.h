// Recall: which blocks a query needs most, by their summaries, and an estimate of all others.
//
// What it is: the choice for one layer and step. Passes over slices of blocks or KV heads, on a team: queries, scores, shares and
// choice, sums of the tail, their combination. What it is not: attention, or an owner of records, which it reads where they lie.
// Invariant: the answer is the same bits for each instruction set and number of threads.
// Memory grows to the largest call and stays. One call at a time (guarded); different Recalls are independent.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "sparse/summary_format.h"
#include "sparse/worker_team.h"

namespace kvpool {

inline constexpr uint32_t RECALL_BLOCKS_MAX = 1 << 24;

// When the estimates of a head are not to be trusted: where the correction for the spread of a block, by its mean token, is
// above `loose_bound` in more than `loose_share` of the blocks. Both are guesses that measurements may replace.
struct RecallRule {
  static constexpr float LOOSE_BOUND = 8.0F;
  static constexpr float LOOSE_SHARE = 0.5F;
  float loose_bound = LOOSE_BOUND;
  float loose_share = LOOSE_SHARE;
};

struct RecallShape {
  SummaryForm form = SummaryForm::CLUSTERS7;
  uint32_t head_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t group = 0;  // query heads of each KV head

  [[nodiscard]] uint32_t heads() const noexcept { return kv_heads * group; }
};

// Where the answer goes. Of the form MEAN there is no tail, no kept mass and no doubt: NaN, and false.
struct RecallAnswer {
  int32_t* chosen;      // [kv_heads][take], ascending
  uint8_t* is_dense;    // [kv_heads]: all blocks must be attended; the rest of the answer is then no more than a guess
  float* kept_mass;     // [heads]: estimated share of the blocks' mass that the chosen ones have
  float* loose_share;   // [heads]: share of the blocks above the rule's bound
  float* tail_logits;   // [heads], or nullptr: natural logarithm; -inf where nothing is left
  float* tail_values;   // [heads][head_dim], or nullptr
};

class Recall {
 public:
  // REQUIRES: is_head_dim(shape.head_dim); kv_heads > 0; 1 <= group <= QUERY_GROUP_MAX.
  explicit Recall(const RecallShape& shape, const RecallRule& rule = {});
  Recall(const Recall&) = delete;
  Recall& operator=(const Recall&) = delete;

  [[nodiscard]] const RecallShape& shape() const noexcept { return shape_; }

  // `records`: for each block the record of its first KV head. `queries` [heads][head_dim], not scaled. Ties go to the lower
  // block; a block that cannot be estimated is chosen first, and where there are more of them than `take` the head is dense, as
  // it is for queries that are not finite.
  // REQUIRES: take <= records.size() <= RECALL_BLOCKS_MAX; no tail is asked for of the form MEAN.
  void run(WorkerTeam& team, std::span<const uint8_t* const> records, const float* queries, uint32_t take,
           const RecallAnswer& answer);

 private:
  void prepare(uint32_t blocks, bool wants_tail);
  void prepare_head(const float* query, uint32_t head);
  void score(WorkerTeam& team, std::span<const uint8_t* const> records, bool wants_tail);
  void score_means(WorkerTeam& team, std::span<const uint8_t* const> records, const float* queries);
  void choose(uint32_t kv_head, uint32_t take, const RecallAnswer& answer);
  void take_best(uint32_t kv_head, uint32_t take, int32_t* chosen);
  void judge(uint32_t kv_head, uint32_t take, const RecallAnswer& answer);
  void weigh(uint32_t kv_head);
  [[nodiscard]] float* tails_of(uint32_t kv_head) noexcept {
    return tails_.data() + uint64_t{kv_head} * shape_.group * padded_ * CLUSTERS;
  }
  void combine(uint32_t kv_head, const RecallAnswer& answer);

  const RecallShape shape_;
  const RecallRule rule_;
  std::mutex lock_;
  // All below: guarded by lock_, and of one call. Heads are query heads.
  uint32_t blocks_ = 0;
  uint32_t padded_ = 0;  // to whole slices
  std::vector<uint8_t> query_codes_;
  std::vector<int32_t> query_biases_;
  std::vector<float> query_scales_;
  std::vector<uint8_t> is_wild_;  // [kv_heads]: a query is not finite
  std::vector<float> logits_;
  std::vector<float> peaks_;
  std::vector<float> shares_;
  std::vector<float> tails_;
  std::vector<int32_t> loose_;
  std::vector<int32_t> ranks_;     // [kv_heads][padded]
  std::vector<uint8_t> is_left_;   // [kv_heads][padded]: for the tail
  std::vector<float> references_;  // [heads]
  std::vector<float> totals_;      // [heads]
  std::vector<float> tail_logits_;  // [heads]
  std::vector<float> least_;       // [heads]
  std::vector<float> used_;        // [slices][heads]
  std::vector<float> values_;      // [slices][heads][head_dim]
};

}  // namespace kvpool
