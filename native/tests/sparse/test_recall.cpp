// Recall against a plain model in double precision: scores, choice, kept mass, tail, and what cannot be estimated.
#include "tests/harness.h"
#include "tests/sparse/sparse_model.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

bool is_near(double value, double expected, double relative) {
  return std::fabs(value - expected) <= relative * std::max(1.0, std::fabs(expected));
}

struct Case {
  RecallShape shape;
  uint32_t blocks;
  uint32_t tokens;
  float query_size;
};

// The model's answers for one KV head.
struct Model {
  std::vector<std::vector<double>> logits;  // [group][block]
  std::vector<double> scores;               // [block]

  Model(const Case& one, const std::vector<std::vector<Decoded>>& decoded, const std::vector<float>& queries, uint32_t kv_head)
      : scores(one.blocks) {
    for (uint32_t h = 0; h < one.shape.group; ++h) {
      const float* query = queries.data() + size_t{kv_head * one.shape.group + h} * one.shape.head_dim;
      logits.emplace_back();
      for (uint32_t b = 0; b < one.blocks; ++b) {
        logits.back().push_back(log_sum_exp(decoded[b][kv_head].logits(query, 1.0)));
      }
      const double all = log_sum_exp(logits.back());
      for (uint32_t b = 0; b < one.blocks; ++b) {
        scores[b] += std::exp(logits.back()[b] - all);
      }
    }
  }
};

std::vector<std::vector<Decoded>> decode(const Case& one, const Records& records) {
  std::vector<std::vector<Decoded>> decoded(one.blocks);
  const uint64_t size = summary_bytes(one.shape.form, one.shape.head_dim);
  for (uint32_t b = 0; b < one.blocks; ++b) {
    for (uint32_t g = 0; g < one.shape.kv_heads; ++g) {
      decoded[b].emplace_back(records.pointers[b] + g * size, one.shape.head_dim);
    }
  }
  return decoded;
}

void check_tail(const Case& one, const std::vector<std::vector<Decoded>>& decoded, const std::vector<float>& queries,
                uint32_t take, const Answered& answered) {
  const uint32_t dim = one.shape.head_dim;
  for (uint32_t head = 0; head < one.shape.heads(); ++head) {
    const uint32_t g = head / one.shape.group;
    const int32_t* chosen = answered.chosen.data() + size_t{g} * take;
    std::vector<double> all;
    std::vector<const std::vector<double>*> values;
    for (uint32_t b = 0; b < one.blocks; ++b) {
      if (!std::binary_search(chosen, chosen + take, static_cast<int32_t>(b))) {
        const auto logits = decoded[b][g].logits(queries.data() + size_t{head} * dim, 0.5);
        all.insert(all.end(), logits.begin(), logits.end());
        for (const auto& value : decoded[b][g].value_means) {
          values.push_back(&value);
        }
      }
    }
    if (all.empty()) {
      EXPECT(answered.tail_logits[head] == -INFINITE);
      continue;
    }
    const double total = log_sum_exp(all);
    EXPECT(is_near(answered.tail_logits[head], total, 5e-4));
    double error = 0;
    double size = 0;
    for (uint32_t d = 0; d < dim; ++d) {
      double value = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        value += std::exp(all[i] - total) * (*values[i])[d];
      }
      error += std::pow(value - static_cast<double>(answered.tail_values[size_t{head} * dim + d]), 2);
      size += value * value;
    }
    // 1.6 % of the mass may be left out.
    EXPECT(std::sqrt(error) <= 0.03 * std::sqrt(size) + 1e-4);
  }
}

void check(std::mt19937_64& random, const Case& one) {
  const Records records(random, one.shape, one.blocks, one.tokens);
  const auto queries = random_queries(random, one.shape, one.query_size);
  const auto decoded = decode(one, records);
  WorkerTeam team(2);
  Recall recall(one.shape);
  for (const uint32_t take : {0U, 1U, one.blocks / 5, one.blocks}) {
    Answered answered(one.shape, take, true);
    recall.run(team, records.pointers, queries.data(), take, answered.view());
    for (uint32_t g = 0; g < one.shape.kv_heads; ++g) {
      const Model model(one, decoded, queries, g);
      const int32_t* chosen = answered.chosen.data() + size_t{g} * take;
      double least = 1e9;
      std::vector<bool> is_chosen(one.blocks);
      for (uint32_t i = 0; i < take; ++i) {
        EXPECT(i == 0 || chosen[i] > chosen[i - 1]);
        EXPECT(chosen[i] >= 0 && chosen[i] < static_cast<int32_t>(one.blocks));
        is_chosen[static_cast<size_t>(chosen[i])] = true;
        least = std::min(least, model.scores[static_cast<size_t>(chosen[i])]);
      }
      for (uint32_t b = 0; b < one.blocks; ++b) {
        EXPECT(is_chosen[b] || take == 0 || model.scores[b] <= least * (1 + 1e-3) + 1e-9);
      }
      for (uint32_t h = 0; h < one.shape.group; ++h) {
        double kept = 0;
        for (uint32_t b = 0; b < one.blocks; ++b) {
          kept += is_chosen[b] ? std::exp(model.logits[h][b] - log_sum_exp(model.logits[h])) : 0.0;
        }
        EXPECT(is_near(answered.kept_mass[g * one.shape.group + h], kept, 1e-3));
      }
    }
    check_tail(one, decoded, queries, take, answered);
  }
}

RecallShape clusters(uint32_t head_dim, uint32_t kv_heads, uint32_t group) {
  return {SummaryForm::CLUSTERS7, head_dim, kv_heads, group};
}

}  // namespace

TEST(choice_kept_mass_and_tail_are_those_of_the_formulas) {
  std::mt19937_64 random(seed());
  for (const uint32_t dim : {32U, 64U, 96U, 128U, 256U}) {
    for (uint32_t group = 1; group <= 8; ++group) {
      const auto blocks = static_cast<uint32_t>(1 + random() % 90);
      check(random, {clusters(dim, 1 + group % 3, group), blocks, static_cast<uint32_t>(1 + random() % 130), 1.0F});
    }
  }
  check(random, {clusters(128, 2, 16), 131, 128, 2.0F});
  check(random, {clusters(64, 1, 4), 65, 255, 0.1F});
}

TEST(a_query_of_zeros_has_the_mean_of_all_tokens_left) {
  std::mt19937_64 random(seed());
  const RecallShape shape = clusters(64, 2, 2);
  const Records records(random, shape, 70, 100);
  const std::vector<float> queries(size_t{shape.heads()} * shape.head_dim);
  WorkerTeam team(1);
  Recall recall(shape);
  const uint32_t take = 7;
  Answered answered(shape, take, true);
  recall.run(team, records.pointers, queries.data(), take, answered.view());
  for (uint32_t head = 0; head < shape.heads(); ++head) {
    EXPECT(is_near(answered.tail_logits[head], std::log(63.0 * 100.0), 1e-6));
    const int32_t* chosen = answered.chosen.data() + size_t{head / 2} * take;
    for (uint32_t d = 0; d < shape.head_dim; ++d) {
      double sum = 0;
      for (uint32_t b = 0; b < 70; ++b) {
        const uint8_t* record = records.pointers[b] + head / 2 * summary_bytes(shape.form, shape.head_dim);
        const Decoded decoded(record, shape.head_dim);
        for (uint32_t j = 0; j < CLUSTERS && !std::binary_search(chosen, chosen + take, static_cast<int32_t>(b)); ++j) {
          sum += decoded.counts[j] * decoded.value_means[j][d];
        }
      }
      EXPECT(std::fabs(sum / 6300.0 - static_cast<double>(answered.tail_values[head * shape.head_dim + d])) < 1e-4);
    }
  }
}

TEST(equal_blocks_go_by_number) {
  std::mt19937_64 random(seed());
  const RecallShape shape = clusters(32, 1, 3);
  const Records one(random, shape, 1, 16);
  const std::vector<const uint8_t*> pointers(150, one.pointers[0]);
  WorkerTeam team(2);
  Recall recall(shape);
  Answered answered(shape, 20, false);
  recall.run(team, pointers, random_queries(random, shape, 1.0F).data(), 20, answered.view());
  for (int32_t i = 0; i < 20; ++i) {
    EXPECT(answered.chosen[static_cast<size_t>(i)] == i);
  }
}

TEST(a_block_that_cannot_be_estimated_is_chosen_first) {
  std::mt19937_64 random(seed());
  const RecallShape shape = clusters(64, 2, 4);
  Records records(random, shape, 80, 32);
  const uint64_t size = summary_bytes(shape.form, shape.head_dim);
  for (const size_t block : {3U, 77U}) {  // of KV head 1 alone
    std::memset(records.bytes[block].data() + size, 0, size);
  }
  WorkerTeam team(2);
  Recall recall(shape);
  const auto queries = random_queries(random, shape, 1.0F);
  for (const uint32_t take : {0U, 1U, 2U, 10U}) {
    Answered answered(shape, take, true);
    recall.run(team, records.pointers, queries.data(), take, answered.view());
    EXPECT(answered.is_dense[0] == 0);
    EXPECT((answered.is_dense[1] != 0) == (take < 2));
    if (take >= 2) {
      const auto first = answered.chosen.begin() + take;
      EXPECT(std::count(first, first + take, 3) == 1);
      EXPECT(std::count(first, first + take, 77) == 1);
    }
    for (const float value : answered.tail_values) {
      EXPECT(std::isfinite(value));
    }
  }
}

TEST(a_query_that_is_not_finite_is_dense_and_harms_no_other_head) {
  std::mt19937_64 random(seed());
  const RecallShape shape = clusters(64, 3, 2);
  const Records records(random, shape, 40, 32);
  auto queries = random_queries(random, shape, 1.0F);
  WorkerTeam team(1);
  Recall recall(shape);
  Answered before(shape, 5, true);
  recall.run(team, records.pointers, queries.data(), 5, before.view());
  queries[64 * 2 + 7] = std::numeric_limits<float>::quiet_NaN();
  queries[64 * 2 + 9] = INFINITE;
  Answered after(shape, 5, true);
  recall.run(team, records.pointers, queries.data(), 5, after.view());
  EXPECT(after.is_dense == std::vector<uint8_t>({0, 1, 0}));
  EXPECT(std::equal(before.chosen.begin(), before.chosen.begin() + 5, after.chosen.begin()));
  EXPECT(std::equal(before.chosen.end() - 5, before.chosen.end(), after.chosen.end() - 5));
}

TEST(spread_beyond_the_bound_makes_a_head_dense) {
  std::mt19937_64 random(seed());
  const RecallShape shape = clusters(64, 1, 1);
  const Records records(random, shape, 30, 64);
  WorkerTeam team(1);
  for (const float size : {0.01F, 30.0F}) {
    Recall recall(shape);
    Answered answered(shape, 3, false);
    recall.run(team, records.pointers, random_queries(random, shape, size).data(), 3, answered.view());
    EXPECT((answered.is_dense[0] != 0) == (size > 1));
    EXPECT(answered.loose_share[0] == (size > 1 ? 1.0F : 0.0F));
    Recall lenient(shape, {1e9F, 0.5F});
    lenient.run(team, records.pointers, random_queries(random, shape, size).data(), 3, answered.view());
    EXPECT(answered.is_dense[0] == 0);
  }
}

TEST(no_blocks_are_no_tail) {
  const RecallShape shape = clusters(64, 2, 2);
  WorkerTeam team(2);
  Recall recall(shape);
  const std::vector<float> queries(size_t{shape.heads()} * shape.head_dim, 1.0F);
  Answered answered(shape, 0, true);
  recall.run(team, {}, queries.data(), 0, answered.view());
  for (const float logit : answered.tail_logits) {
    EXPECT(logit == -INFINITE);
  }
  EXPECT(answered.is_dense == std::vector<uint8_t>({0, 0}));
}

TEST(means_are_ranked_by_the_inner_product_with_the_mean_query) {
  std::mt19937_64 random(seed());
  const RecallShape shape{SummaryForm::MEAN, 96, 2, 3};
  Records records(random, shape, 75, 40);
  const uint16_t nan = HALF_NAN;
  std::memcpy(records.bytes[70].data(), &nan, 2);
  const auto queries = random_queries(random, shape, 1.0F);
  WorkerTeam team(2);
  Recall recall(shape);
  Answered answered(shape, 9, false);
  recall.run(team, records.pointers, queries.data(), 9, answered.view());
  for (uint32_t g = 0; g < 2; ++g) {
    std::vector<std::pair<double, int32_t>> ranked;
    for (size_t b = 0; b < 75; ++b) {
      double product = 0;
      for (uint32_t d = 0; d < 96; ++d) {
        uint16_t half;
        std::memcpy(&half, records.pointers[b] + g * 192 + d * 2, 2);
        for (uint32_t h = 0; h < 3; ++h) {
          product += static_cast<double>(queries[(g * 3 + h) * 96 + d]) * static_cast<double>(from_half(half));
        }
      }
      ranked.emplace_back(g == 0 && b == 70 ? -1e9 : -product, b);
    }
    std::sort(ranked.begin(), ranked.end());
    std::vector<int32_t> expected;
    for (size_t i = 0; i < 9; ++i) {
      expected.push_back(ranked[i].second);
    }
    std::sort(expected.begin(), expected.end());
    EXPECT(std::equal(expected.begin(), expected.end(), answered.chosen.begin() + g * 9));
  }
  EXPECT(std::isnan(answered.kept_mass[0]));
}
