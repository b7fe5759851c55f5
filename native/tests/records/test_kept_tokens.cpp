// Token ids in cells of a kept region: what was stored last is found, in this life and by the reader of a later one.
#include <map>
#include <random>
#include <vector>

#include "records/token_ids.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

constexpr uint32_t RECORDS = 200;

struct Region {
  explicit Region(uint64_t slabs)
      : shape{.capacity = 1, .segment_bytes = PAGE_BYTES, .slot_bytes_min = PAGE_BYTES, .checksum_bytes_min = 1,
              .token_bytes = slabs * KeptTokens::SLAB_BYTES, .segments = 1, .max_run_segments = 1, .max_chunks = RECORDS,
              .record_bytes = sizeof(ChunkRecord)},
        mapping(Mapping::create("records", KeptRegion::bytes(shape), false).mapping),
        records(mapping, shape),
        tokens(&records) {
    for (uint32_t number = 0; number < RECORDS; ++number) {
      records[records.allocate()].generation = number + 1;
    }
  }
  bool has(uint32_t id, const std::vector<int32_t>& wanted) const {
    const auto stored = tokens.of(RecordId(id));
    const auto later = read_cell(records.region().tokens(), shape.token_bytes, records.seal_at(RecordId(id)).tokens, id + 1);
    return std::ranges::equal(stored, wanted) && std::ranges::equal(later, wanted);
  }

  KeptShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkRecords records;
  TokenIds tokens;
};

std::vector<int32_t> ids_of(std::mt19937_64& random, size_t count) {
  std::vector<int32_t> ids(count);
  std::ranges::generate(ids, [&random] { return static_cast<int32_t>(random()); });
  return ids;
}

}  // namespace

TEST(what_was_stored_last_is_found_now_and_later) {
  std::mt19937_64 random(kvpool::testing::seed());
  Region region(24);
  std::map<uint32_t, std::vector<int32_t>> model;
  uint64_t left_out = 0;
  for (int step = 0; step < 20'000 && kvpool::testing::failures() == 0; ++step) {
    const auto id = static_cast<uint32_t>(random() % RECORDS);
    if (random() % 3 == 0) {
      region.tokens.forget(RecordId(id));
      model.erase(id);
    } else {
      const size_t count = random() % 4 == 0 ? random() % TOKEN_IDS_MAX : 16 * (1 + random() % 3);
      const auto ids = ids_of(random, count);
      region.tokens.store(RecordId(id), {packed_words(ids), {}});
      const bool is_left_out = region.tokens.left_out() > left_out;
      left_out = region.tokens.left_out();
      model.erase(id);
      if (!is_left_out && count > 0) {
        model[id] = ids;
      }
    }
    const auto other = static_cast<uint32_t>(random() % RECORDS);
    EXPECT(region.has(other, model.contains(other) ? model[other] : std::vector<int32_t>{}));
  }
  EXPECT(left_out > 0);  // 24 slabs are too few now and then
  uint64_t bytes = 0;
  for (const auto& [id, ids] : model) {
    EXPECT(region.has(id, ids));
    bytes += ids.size() * sizeof(int32_t);
  }
  EXPECT(region.tokens.bytes() == bytes);
}

TEST(a_slab_that_is_empty_serves_another_size) {
  std::mt19937_64 random(1);
  Region region(1);
  const auto longest = ids_of(random, TOKEN_IDS_MAX), shorter = ids_of(random, 16);
  for (int round = 0; round < 3; ++round) {
    for (uint32_t id = 0; id < 4; ++id) {
      region.tokens.store(RecordId(id), {packed_words(longest), {}});
    }
    EXPECT(region.tokens.left_out() == static_cast<uint64_t>(2 * round + 1));  // three fit
    region.tokens.store(RecordId(9), {packed_words(shorter), {}});
    EXPECT(region.tokens.left_out() == static_cast<uint64_t>(2 * round + 2) && region.has(9, {}));
    for (uint32_t id = 0; id < 4; ++id) {
      region.tokens.forget(RecordId(id));
    }
    region.tokens.store(RecordId(9), {packed_words(shorter), {}});
    EXPECT(region.has(9, shorter));
    region.tokens.forget(RecordId(9));
  }
  EXPECT(region.tokens.bytes() == 0);
}

TEST(a_cell_of_another_chunk_or_with_a_flipped_bit_has_no_ids) {
  std::mt19937_64 random(kvpool::testing::seed());
  Region region(1);
  const auto ids = ids_of(random, 40);
  region.tokens.store(RecordId(5), {packed_words(ids), {}});
  const uint32_t number = region.records.seal_at(RecordId(5)).tokens;
  uint8_t* const memory = region.records.region().tokens();
  const auto read = [&](uint64_t bytes, uint32_t cell, uint64_t generation) { return read_cell(memory, bytes, cell, generation).size(); };
  EXPECT(read(region.shape.token_bytes, number, 6) == 40);
  EXPECT(read(region.shape.token_bytes, number, 7) == 0);
  EXPECT(read(region.shape.token_bytes, number + 1, 6) == 0);
  EXPECT(read(region.shape.token_bytes, UINT32_MAX, 6) == 0);
  EXPECT(read(sizeof(TokenCell) + 39 * sizeof(int32_t), number, 6) == 0);
  for (uint64_t bit = 0; bit < 8 * (sizeof(TokenCell) + 160); ++bit) {
    memory[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
    EXPECT(read(region.shape.token_bytes, number, 6) == 0);
    memory[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
  }
  EXPECT(read(region.shape.token_bytes, number, 6) == 40);
}
