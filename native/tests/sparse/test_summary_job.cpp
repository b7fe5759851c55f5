// Summaries of chunks in an arena: the records of each block, zeros behind them, checksums; cancelled and refused jobs.
#include "checksum/crc32c.h"
#include "sparse/summary_job.h"
#include "tests/harness.h"
#include "tests/sparse/sparse_model.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint32_t DIM = 64;
constexpr uint32_t KV_HEADS = 2;
constexpr uint32_t LAYERS = 3;
constexpr uint32_t CHUNK_TOKENS = 64;
constexpr uint32_t BLOCK_TOKENS = 32;
constexpr uint64_t LAYER_BYTES = uint64_t{2} * CHUNK_TOKENS * KV_HEADS * DIM * 2;
constexpr uint32_t EXTENTS = 1;
constexpr uint64_t SLOT_BYTES = (LAYERS + EXTENTS) * LAYER_BYTES;
constexpr double LONG_S = 30;

SummaryPlan plan_of(const std::shared_ptr<Mapping>& arena, std::vector<uint64_t> offsets) {
  return {arena, std::move(offsets), nullptr, 0, SummaryForm::CLUSTERS7, KvType::BFLOAT16, DIM, KV_HEADS, LAYERS, LAYER_BYTES,
          CHUNK_TOKENS, BLOCK_TOKENS, EXTENTS};
}

std::shared_ptr<Mapping> random_arena(std::mt19937_64& random, uint64_t slots) {
  auto arena = Mapping::create("summaries", round_up(slots * SLOT_BYTES, PAGE_BYTES), false).mapping;
  std::normal_distribution<float> normal;
  for (uint64_t at = 0; at < slots * SLOT_BYTES; at += 2) {
    const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
    std::memcpy(arena->data() + at, &half, 2);
  }
  return arena;
}

std::vector<uint8_t> expected_extents(const uint8_t* chunk) {
  std::vector<uint8_t> bytes(EXTENTS * LAYER_BYTES);
  const uint64_t size = summary_bytes(SummaryForm::CLUSTERS7, DIM);
  uint64_t at = 0;
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    for (uint32_t token = 0; token < CHUNK_TOKENS; token += BLOCK_TOKENS) {
      for (uint32_t head = 0; head < KV_HEADS; ++head) {
        const uint8_t* keys = chunk + layer * LAYER_BYTES + (token * KV_HEADS + head) * DIM * 2;
        build_summary(SummaryForm::CLUSTERS7, KvType::BFLOAT16, DIM, keys, keys + LAYER_BYTES / 2, KV_HEADS * DIM * 2, BLOCK_TOKENS,
                      bytes.data() + at);
        at += size;
      }
    }
  }
  return bytes;
}

}  // namespace

TEST(summaries_lie_behind_the_layers_with_their_checksums) {
  std::mt19937_64 random(seed());
  const auto arena = random_arena(random, 5);
  CopyPool pool(2);
  const std::vector<uint64_t> offsets = {0, 3 * SLOT_BYTES, SLOT_BYTES};
  const auto job = std::make_shared<SummaryJob>(plan_of(arena, offsets));
  EXPECT(job->checksums().empty());
  EXPECT(pool.queue()->add(job));
  EXPECT(job->wait(LONG_S));
  EXPECT(!job->is_cancelled());
  EXPECT(job->progress() == 3 * LAYERS);
  const auto sums = job->checksums();
  for (size_t chunk = 0; chunk < 3; ++chunk) {
    const uint8_t* slot = arena->data() + offsets[chunk];
    const auto expected = expected_extents(slot);
    EXPECT(std::memcmp(slot + LAYERS * LAYER_BYTES, expected.data(), expected.size()) == 0);
    EXPECT(sums[chunk] == crc32c(0, expected.data(), expected.size()));
  }
}

TEST(summaries_go_to_other_memory_where_it_is_given) {
  std::mt19937_64 random(seed());
  const auto arena = random_arena(random, 2);
  CopyPool pool(3);
  std::vector<uint8_t> target(2 * EXTENTS * LAYER_BYTES, 0xFF);
  const std::vector<uint8_t> before(arena->data(), arena->data() + 2 * SLOT_BYTES);
  SummaryPlan plan = plan_of(arena, {SLOT_BYTES, 0});
  plan.target = target.data();
  plan.target_bytes = target.size();
  const auto job = std::make_shared<SummaryJob>(plan);
  EXPECT(pool.queue()->add(job));
  EXPECT(job->wait(LONG_S));
  for (uint64_t chunk = 0; chunk < 2; ++chunk) {
    const auto expected = expected_extents(arena->data() + (1 - chunk) * SLOT_BYTES);
    EXPECT(std::memcmp(target.data() + chunk * EXTENTS * LAYER_BYTES, expected.data(), expected.size()) == 0);
  }
  EXPECT(std::memcmp(arena->data(), before.data(), before.size()) == 0);
}

// A job may be whole before it is cancelled, on a quick machine or one that stops for a moment: not every time.
TEST(a_cancelled_job_ends_without_checksums) {
  std::mt19937_64 random(seed());
  const auto arena = random_arena(random, 4);
  CopyPool pool(2);
  std::vector<uint8_t> target(200 * EXTENTS * LAYER_BYTES);
  SummaryPlan plan = plan_of(arena, std::vector<uint64_t>(200, SLOT_BYTES));
  plan.target = target.data();  // one slot read 200 times: each reading writes a place of its own
  plan.target_bytes = target.size();
  size_t ended_before = 0;
  for (int round = 0; round < 50; ++round) {
    const auto job = std::make_shared<SummaryJob>(plan);
    EXPECT(pool.queue()->add(job));
    job->cancel();
    EXPECT(job->wait(LONG_S));
    EXPECT(job->is_cancelled());
    const size_t sums = job->checksums().size();
    EXPECT(sums == 0 || sums == 200 * EXTENTS);
    ended_before += sums == 0 ? 1 : 0;
  }
  EXPECT(ended_before > 0);
  const auto nothing = std::make_shared<SummaryJob>(plan_of(arena, {}));
  EXPECT(nothing->wait(0));
}

TEST(a_plan_that_does_not_fit_is_refused) {
  std::mt19937_64 random(seed());
  const auto arena = random_arena(random, 2);
  const SummaryPlan good = plan_of(arena, {SLOT_BYTES});
  EXPECT(summary_fault(good) == nullptr);
  const auto is_refused = [&](const auto& change) {
    SummaryPlan plan = good;
    change(plan);
    return summary_fault(plan) != nullptr;
  };
  EXPECT(is_refused([](SummaryPlan& plan) { plan.offsets = {2 * SLOT_BYTES - LAYER_BYTES}; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.offsets = {UINT64_MAX}; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.extents = 0; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.extents = UINT32_MAX; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.layers = UINT32_MAX; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.layers = 0; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.layer_bytes += 2; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.head_dim = 48; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.block_tokens = 48; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.block_tokens = 0; }));
  EXPECT(is_refused([](SummaryPlan& plan) { plan.type = KvType::FLOAT32; }));
  uint8_t byte = 0;
  EXPECT(is_refused([&](SummaryPlan& plan) { plan.target = &byte; plan.target_bytes = 1; }));
}
