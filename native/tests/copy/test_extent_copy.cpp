// Gathers and scatters against a byte-by-byte model: every form of cache, odd sizes, skipped blocks, guard bytes,
// and an extent that another process writes meanwhile.
#include "copy/extent_copy.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/harness.h"
#include "checksum/crc32c.h"
#include "tests/arena/racing_writer.h"

using namespace kvpool;

namespace {

constexpr size_t BLOCKS = 13;
constexpr size_t GAP = 24;  // bytes between blocks that belong to nobody

struct Engine {
  std::vector<uint8_t> memory;
  CacheView view;
};

enum class Form { KV_FIRST, BLOCK_FIRST, PACKED };

Engine make_engine(Form form, size_t plane_bytes, std::mt19937_64& random) {
  Engine engine;
  const uint32_t planes = form == Form::PACKED ? 1 : 2;
  const size_t step = plane_bytes + GAP;
  engine.memory.resize(planes * BLOCKS * step + GAP);
  std::generate(engine.memory.begin(), engine.memory.end(), [&] { return static_cast<uint8_t>(random()); });
  engine.view.planes = planes;
  engine.view.blocks = BLOCKS;
  engine.view.plane_block_bytes = plane_bytes;
  engine.view.plane_stride = form == Form::KV_FIRST ? BLOCKS * step : step;
  engine.view.block_stride = form == Form::KV_FIRST ? step : planes * step;
  engine.view.bases = {engine.memory.data() + GAP};
  return engine;
}

// Where byte i of an extent lies in engine memory.
size_t place_of(const Engine& engine, const std::vector<int64_t>& ids, size_t i) {
  const size_t plane_bytes = engine.view.plane_block_bytes;
  const size_t plane = i / (ids.size() * plane_bytes);
  const auto id = static_cast<size_t>(ids[i / plane_bytes % ids.size()]);
  return GAP + plane * engine.view.plane_stride + id * engine.view.block_stride + i % plane_bytes;
}

std::vector<int64_t> some_ids(size_t count, std::mt19937_64& random) {
  std::vector<int64_t> ids(BLOCKS);
  std::iota(ids.begin(), ids.end(), int64_t{0});
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(count);
  return ids;
}

template <typename Check>
void for_every_form(Check check) {
  std::mt19937_64 random(testing::seed());
  for (const Form form : {Form::KV_FIRST, Form::BLOCK_FIRST, Form::PACKED}) {
    for (const size_t plane_bytes : std::initializer_list<size_t>{1, 33, 64, 100, 256, 320, 1000, 4096}) {
      for (const size_t count : std::initializer_list<size_t>{1, 2, 7, BLOCKS}) {
        Engine engine = make_engine(form, plane_bytes, random);
        check(engine, some_ids(count, random), random);
      }
    }
  }
}

}  // namespace

TEST(a_gather_stores_plane_by_plane_in_the_chunks_order) {
  for_every_form([](Engine& engine, const std::vector<int64_t>& ids, std::mt19937_64&) {
    const size_t size = engine.view.payload_bytes(ids.size());
    const std::vector<uint8_t> before = engine.memory;
    std::vector<uint8_t> extent(size + 1, 0xEE);
    const uint32_t crc = gather_payload(engine.view, 0, ids, extent.data());
    for (size_t i = 0; i < size; ++i) {
      EXPECT(extent[i] == before[place_of(engine, ids, i)]);
    }
    EXPECT(crc == crc32c(0, extent.data(), size));
    EXPECT(extent[size] == 0xEE);
    EXPECT(engine.memory == before);
  });
}

TEST(a_scatter_writes_its_blocks_and_nothing_else) {
  for_every_form([](Engine& engine, const std::vector<int64_t>& ids, std::mt19937_64& random) {
    std::vector<uint8_t> extent(engine.view.payload_bytes(ids.size()));
    std::generate(extent.begin(), extent.end(), [&] { return static_cast<uint8_t>(random()); });
    std::vector<uint8_t> expected = engine.memory;
    for (size_t i = 0; i < extent.size(); ++i) {
      expected[place_of(engine, ids, i)] = extent[i];
    }
    const uint32_t crc = scatter_payload(engine.view, 0, ids, extent.data());
    EXPECT(crc == crc32c(0, extent.data(), extent.size()));
    EXPECT(engine.memory == expected);
  });
}

TEST(a_skipped_block_is_checksummed_and_not_written) {
  for_every_form([](Engine& engine, const std::vector<int64_t>& ids, std::mt19937_64& random) {
    std::vector<uint8_t> extent(engine.view.payload_bytes(ids.size()));
    std::generate(extent.begin(), extent.end(), [&] { return static_cast<uint8_t>(random()); });
    const size_t skipped = random() % ids.size();
    std::vector<uint8_t> expected = engine.memory;
    for (size_t i = 0; i < extent.size(); ++i) {
      if (i / engine.view.plane_block_bytes % ids.size() != skipped) {
        expected[place_of(engine, ids, i)] = extent[i];
      }
    }
    std::vector<int64_t> partly = ids;
    partly[skipped] = SKIP_BLOCK;
    EXPECT(scatter_payload(engine.view, 0, partly, extent.data()) == crc32c(0, extent.data(), extent.size()));
    EXPECT(engine.memory == expected);
  });
}

TEST(a_scatter_verifies_the_bytes_that_it_delivered_though_the_extent_changes) {
  std::mt19937_64 random(testing::seed());
  const testing::RacingWriter writer;
  size_t wrong = 0;
  for (const size_t plane_bytes : std::initializer_list<size_t>{33, 64, 100, 320}) {
    Engine engine = make_engine(Form::KV_FIRST, plane_bytes, random);
    const std::vector<int64_t> ids = {3};
    for (size_t round = 0; round < 100'000; ++round) {
      const uint32_t crc = scatter_payload(engine.view, 0, ids, writer.bytes() + random() % 300);
      const uint32_t first = crc32c(0, engine.view.block(0, 0, ids[0]), plane_bytes);
      wrong += static_cast<size_t>(crc != crc32c(first, engine.view.block(0, 1, ids[0]), plane_bytes));
    }
  }
  EXPECT(wrong == 0);
}

TEST(extents_from_staging_answer_for_the_bytes_that_were_stored) {
  std::mt19937_64 random(testing::seed());
  const testing::RacingWriter writer;
  size_t wrong = 0;
  for (const uint64_t extent_bytes : std::initializer_list<uint64_t>{1, 33, 64, 100, 320}) {
    std::vector<uint8_t> slot(3 * extent_bytes + 1, 0xEE);
    for (size_t round = 0; round < 20'000; ++round) {
      uint32_t crcs[3];
      copy_whole_extents(slot.data(), writer.bytes() + random() % 60, 3, extent_bytes, crcs);
      for (size_t extent = 0; extent < 3; ++extent) {
        wrong += static_cast<size_t>(crcs[extent] != crc32c(0, &slot[extent * extent_bytes], extent_bytes));
      }
    }
    EXPECT(slot.back() == 0xEE);
  }
  EXPECT(wrong == 0);
}
