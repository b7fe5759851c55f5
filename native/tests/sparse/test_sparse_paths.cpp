// All instruction sets and numbers of threads give the same bits, on odd shapes and odd numbers.
#include "tests/harness.h"
#include "tests/sparse/sparse_model.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// Constants, outliers, denormals, huge numbers, NaN and infinity, at random places.
void spoil(std::mt19937_64& random, Block& block) {
  const float odd[] = {0.0F, -0.0F, 1e-42F, 1e-30F, 150.0F, -3e4F, 1e6F, 1e25F, std::numeric_limits<float>::infinity(), std::nanf("")};
  const uint64_t kinds = random() % 3 == 0 ? 10 : 7;
  for (uint64_t i = random() % 6; i > 0; --i) {
    auto& numbers = random() % 2 == 0 ? block.keys : block.values;
    const float number = odd[random() % kinds];
    if (random() % 2 == 0) {  // a whole channel
      for (size_t at = random() % block.dim; at < numbers.size(); at += block.dim) {
        numbers[at] = number;
      }
    } else {
      numbers[random() % numbers.size()] = number;
    }
  }
  block.pack(random() % 2 * 64);
}

}  // namespace

TEST(summaries_are_the_same_bits_on_all_paths) {
  std::mt19937_64 random(seed());
  const SparsePath best = sparse_path();
  for (int round = 0; round < 300; ++round) {
    const uint32_t dims[] = {32, 64, 96, 128, 256};
    const auto type = static_cast<KvType>(random() % 3);
    Block block = random_block(random, type, dims[random() % 5], static_cast<uint32_t>(1 + random() % 255));
    if (round % 2 == 1) {
      spoil(random, block);
    }
    for (const SummaryForm form : {SummaryForm::CLUSTERS7, SummaryForm::MEAN}) {
      choose_sparse_path(SparsePath::PORTABLE);
      const auto expected = block.summary(form);
      for (const SparsePath path : available_paths()) {
        choose_sparse_path(path);
        EXPECT(block.summary(form) == expected);
      }
      EXPECT(std::all_of(expected.end() - 16, expected.end(), [](uint8_t byte) { return byte == 0xA5; }));
    }
  }
  choose_sparse_path(best);
}

TEST(answers_are_the_same_bits_on_all_paths_and_teams) {
  std::mt19937_64 random(seed());
  const SparsePath best = sparse_path();
  for (const uint32_t dim : {32U, 64U, 96U, 128U, 256U}) {
    for (uint32_t group = 1; group <= 8; ++group) {
      const SummaryForm form = group == 7 ? SummaryForm::MEAN : SummaryForm::CLUSTERS7;
      const RecallShape shape{form, dim, static_cast<uint32_t>(1 + random() % 4), group};
      Records records(random, shape, static_cast<uint32_t>(1 + random() % 150), static_cast<uint32_t>(1 + random() % 60));
      if (group % 2 == 0) {  // damaged ones: any byte may be anything
        for (auto& bytes : records.bytes) {
          bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
          bytes[bytes.size() - 1 - random() % 30] = static_cast<uint8_t>(random());
        }
      }
      const auto blocks = static_cast<uint32_t>(records.pointers.size());
      const auto queries = random_queries(random, shape, group == 3 ? 1e20F : 1.0F);
      const uint32_t take = static_cast<uint32_t>(random() % (blocks + 1));
      choose_sparse_path(SparsePath::PORTABLE);
      Recall recall(shape);
      const bool wants_tail = form == SummaryForm::CLUSTERS7;
      Answered expected(shape, take, wants_tail);
      WorkerTeam alone(1);
      recall.run(alone, records.pointers, queries.data(), take, expected.view());
      for (const SparsePath path : available_paths()) {
        choose_sparse_path(path);
        for (const unsigned threads : {1U, 2U, 5U}) {
          WorkerTeam team(threads);
          Answered answered(shape, take, wants_tail);
          recall.run(team, records.pointers, queries.data(), take, answered.view());
          EXPECT(answered.has_same_bits(expected));
        }
      }
    }
  }
  choose_sparse_path(best);
}
