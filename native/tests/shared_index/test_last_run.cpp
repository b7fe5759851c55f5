// The last run of chunks in a row: windows at the end of a prompt, against a search of every end.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "shared_index/chunk_table.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

constexpr uint8_t EPOCH[16] = {5};

ChunkKey numbered(uint64_t id) { return {{id * 0x9E3779B97F4A7C15ULL, id, ~id, 7}}; }

struct Table {
  Table()
      : shape{1024, {{1 << 20, 1024, 1024}}},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        table(mapping, shape, EPOCH),
        reader(IndexView::attach(mapping)) {}

  void put(uint64_t id, uint8_t tiers) {
    EXPECT(table.insert(numbered(id), RecordId(1), 1 + id, {DRAM_REGION, static_cast<uint32_t>(id)}));
    table.set_tiers(numbered(id), tiers);
  }

  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable table;
  std::shared_ptr<const IndexView> reader;
};

// Every end from the largest on, each chunk before it.
size_t searched(const std::vector<uint8_t>& tiers, size_t end, size_t length) {
  for (size_t last = end; last > 0; --last) {
    bool whole = true;
    for (size_t index = last - std::min(last, length); index < last; ++index) {
      whole = whole && tiers[index] != 0;
    }
    if (whole) {
      return last;
    }
  }
  return 0;
}

std::vector<uint8_t> packed(size_t count) {
  std::vector<uint8_t> bytes(count * KEY_BYTES);
  for (size_t id = 0; id < count; ++id) {
    const ChunkKey key = numbered(id);
    std::memcpy(bytes.data() + id * KEY_BYTES, key.words, KEY_BYTES);
  }
  return bytes;
}

}  // namespace

TEST(nothing_has_no_run) {
  Table table;
  EXPECT(table.reader->last_run(nullptr, 0, 3, true, nullptr) == 0);
  std::vector<uint8_t> levels(20);
  EXPECT(table.reader->last_run(packed(20).data(), 20, 3, true, levels.data()) == 0);
}

TEST(random_runs_agree_with_a_search_of_every_end) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int round = 0; round < 2000; ++round) {
    Table table;
    const size_t count = random() % 40;
    const uint64_t density = 1 + random() % 8;
    std::vector<uint8_t> tiers(count);
    for (size_t id = 0; id < count; ++id) {
      tiers[id] = random() % density != 0 ? tier_bit(random() % 2 != 0 ? Tier::DRAM : Tier::SSD) : uint8_t{0};
      if (tiers[id] != 0 || random() % 2 != 0) {  // the others are being written, or were never stored
        table.put(id, tiers[id]);
      }
    }
    const size_t length = 1 + random() % 12;
    const size_t end = count == 0 ? 0 : random() % (count + 1);
    const auto keys = packed(count);
    std::vector<uint8_t> levels(count, NO_LEVEL);
    const size_t found = table.reader->last_run(keys.data(), end, length, false, levels.data());
    EXPECT(found == searched(tiers, end, length));
    for (size_t index = found - std::min(found, length); index < found; ++index) {
      EXPECT(tier_bit(static_cast<Tier>(levels[index])) == tiers[index]);
    }
  }
}
