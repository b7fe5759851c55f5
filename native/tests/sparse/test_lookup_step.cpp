// A step by lookup against its parts: a recall, attention to what it chose, and their merge in double precision.
#include "sparse/lookup_step.h"
#include "tests/harness.h"
#include "tests/sparse/sparse_model.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr float NEVER = std::numeric_limits<float>::infinity();
constexpr RecallShape SHAPE{SummaryForm::CLUSTERS7, 64, 2, 3};
constexpr uint32_t TOKENS = 32;
constexpr uint32_t FIRST = 2;
constexpr uint32_t BLOCKS = 40;
constexpr uint32_t RUNS = FIRST + BLOCKS + 3;
constexpr uint64_t STRIDE = uint64_t{SHAPE.kv_heads} * SHAPE.head_dim * 4;

// Runs of float32, of which the last is not full, and summaries of the middle ones.
struct Setting {
  explicit Setting(SummaryForm form = SummaryForm::CLUSTERS7, uint64_t seed = 5) : shape(SHAPE) {
    std::mt19937_64 random(seed);
    shape.form = form;
    const uint64_t size = summary_bytes(form, shape.head_dim);
    for (uint32_t run = 0; run < RUNS; ++run) {
      keys.emplace_back(TOKENS * STRIDE / 4);
      values.emplace_back(TOKENS * STRIDE / 4);
      records.emplace_back(shape.kv_heads * size);
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const Block block = random_block(random, KvType::FLOAT32, shape.head_dim, TOKENS);
        for (uint32_t t = 0; t < TOKENS; ++t) {
          const size_t to = (size_t{t} * shape.kv_heads + head) * shape.head_dim;
          std::copy_n(block.keys.data() + size_t{t} * shape.head_dim, shape.head_dim, keys.back().data() + to);
          std::copy_n(block.values.data() + size_t{t} * shape.head_dim, shape.head_dim, values.back().data() + to);
        }
        const auto record = block.summary(form);
        std::memcpy(records.back().data() + head * size, record.data(), size);
      }
    }
    for (uint32_t run = 0; run < RUNS; ++run) {
      runs.push_back({reinterpret_cast<const uint8_t*>(keys[run].data()), reinterpret_cast<const uint8_t*>(values[run].data()),
                      run + 1 < RUNS ? TOKENS : TOKENS - 5});
    }
    for (uint32_t block = 0; block < BLOCKS; ++block) {
      summaries.push_back(records[FIRST + block].data());
    }
    query = random_queries(random, shape, 0.6F);
  }

  struct Step {
    std::vector<float> values;
    LookupCounts counts;
  };

  [[nodiscard]] Step step(uint32_t take, float loose_share = NEVER, float tail_weight_max = NEVER) const {
    WorkerTeam team(2);
    Recall recall(shape, RULE);
    Step done{std::vector<float>(query.size()), {}};
    done.counts = attend_by_lookup(recall, {KvType::FLOAT32, STRIDE, runs, FIRST, summaries, take, loose_share, tail_weight_max},
                                   query.data(), done.values.data(), team);
    return done;
  }

  [[nodiscard]] Answered recalled(uint32_t take) const {
    WorkerTeam team(1);
    Recall recall(shape, RULE);
    Answered answered(shape, take, shape.form != SummaryForm::MEAN);
    recall.run(team, summaries, query.data(), take, answered.view());
    return answered;
  }

  struct Part {
    std::vector<float> logits;
    std::vector<float> values;
  };

  [[nodiscard]] Part attended(const std::vector<uint8_t>& wanted) const {
    WorkerTeam team(1);
    Part part{std::vector<float>(shape.heads()), std::vector<float>(query.size())};
    attend({{KvType::FLOAT32, shape.head_dim, shape.kv_heads, shape.group, STRIDE}, runs, wanted}, query.data(), part.logits.data(),
           part.values.data(), team);
    return part;
  }

  [[nodiscard]] Part everything() const { return attended(std::vector<uint8_t>(size_t{RUNS} * shape.kv_heads, 1)); }

  [[nodiscard]] std::vector<uint8_t> wanted_by(const Answered& answered, uint32_t take) const {
    std::vector<uint8_t> wanted(size_t{RUNS} * shape.kv_heads, 1);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      for (uint32_t block = 0; block < BLOCKS; ++block) {
        const int32_t* first = answered.chosen.data() + size_t{head} * take;
        const bool is_chosen = std::find(first, first + take, static_cast<int32_t>(block)) != first + take;
        wanted[size_t{FIRST + block} * shape.kv_heads + head] = is_chosen || answered.is_dense[head] != 0 ? 1 : 0;
      }
    }
    return wanted;
  }

  static constexpr RecallRule RULE{4.0F, 1.0F};
  RecallShape shape;
  std::vector<std::vector<float>> keys;
  std::vector<std::vector<float>> values;
  std::vector<std::vector<uint8_t>> records;
  std::vector<KvRun> runs;
  std::vector<const uint8_t*> summaries;
  std::vector<float> query;
};

}  // namespace

TEST(a_step_is_the_merge_of_what_was_read_and_the_estimate_of_the_rest) {
  const Setting setting;
  constexpr uint32_t TAKE = 4;
  const Setting::Step step = setting.step(TAKE);
  const Answered answered = setting.recalled(TAKE);
  const Setting::Part part = setting.attended(setting.wanted_by(answered, TAKE));
  double mass = 0;
  for (uint32_t head = 0; head < SHAPE.heads(); ++head) {
    mass += double{answered.kept_mass[head]};
    const double weight = 1.0 / (1.0 + std::exp(double{answered.tail_logits[head]} - double{part.logits[head]}));
    EXPECT(weight > 0.0);
    for (uint32_t d = 0; d < SHAPE.head_dim; ++d) {
      const size_t at = size_t{head} * SHAPE.head_dim + d;
      const double expected = weight * double{part.values[at]} + (1.0 - weight) * double{answered.tail_values[at]};
      EXPECT(std::fabs(double{step.values[at]} - expected) < 1e-5);
    }
  }
  EXPECT(step.counts.kept_masses == SHAPE.heads());
  EXPECT(std::fabs(step.counts.kept_mass - mass) < 1e-9);
  EXPECT(step.counts.dense_heads == 0);
}

TEST(a_step_of_all_blocks_has_the_bits_of_attention_to_everything) {
  const Setting setting;
  EXPECT(setting.step(BLOCKS).values == setting.everything().values);
}

TEST(heads_whose_estimate_weighs_too_much_read_everything_where_they_are_doubtful) {
  const Setting setting;
  const Setting::Step whole = setting.step(4, -1.0F, -1.0F);
  EXPECT(whole.values == setting.everything().values);
  EXPECT(whole.counts.dense_heads == SHAPE.kv_heads);
  EXPECT(setting.step(4, -1.0F, NEVER).values == setting.step(4).values);  // doubtful, and light
  EXPECT(setting.step(4, NEVER, -1.0F).values == setting.step(4).values);  // heavy, and trusted
}

TEST(a_head_with_more_blocks_without_an_estimate_than_it_may_take_reads_everything) {
  Setting setting;
  for (const uint32_t block : {1U, 7U, 9U}) {
    std::memset(setting.records[FIRST + block].data() + cluster_fields(SHAPE.head_dim).counts, 0, CLUSTERS);
  }
  const Setting::Step step = setting.step(2);
  const auto expected = setting.everything().values;
  const size_t head_floats = size_t{SHAPE.group} * SHAPE.head_dim;
  EXPECT(std::equal(expected.begin(), expected.begin() + static_cast<ptrdiff_t>(head_floats), step.values.begin()));
  EXPECT(!std::equal(expected.begin() + static_cast<ptrdiff_t>(head_floats), expected.end(),
                    step.values.begin() + static_cast<ptrdiff_t>(head_floats)));
  EXPECT(step.counts.dense_heads == 1);
}

TEST(means_estimate_nothing_and_have_no_kept_mass) {
  const Setting setting(SummaryForm::MEAN);
  const Setting::Step step = setting.step(4);
  EXPECT(step.values == setting.attended(setting.wanted_by(setting.recalled(4), 4)).values);
  EXPECT(step.counts.kept_masses == 0);
  EXPECT(step.counts.kept_mass == 0.0);
}

TEST(a_query_that_is_no_number_has_no_outcome_that_is_one) {
  Setting setting;
  setting.query[0] = std::numeric_limits<float>::quiet_NaN();
  const Setting::Step step = setting.step(4);
  EXPECT(std::isnan(step.values[0]));
  EXPECT(step.counts.dense_heads == 1);
}
