// The last run of chunks in a row: windows at the end of a prompt, against a search of every end.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "hash/key_hash.h"
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

TEST(a_probe_has_the_level_of_each_key_whatever_stands_before_it) {
  Table table;
  const uint8_t kinds[] = {0, tier_bit(Tier::DRAM), tier_bit(Tier::SSD), static_cast<uint8_t>(tier_bit(Tier::HBM) | tier_bit(Tier::DRAM)),
                           static_cast<uint8_t>(tier_bit(Tier::DRAM) | tier_bit(Tier::SSD))};
  const uint8_t levels[] = {0, 1, 2, 1, 1};
  constexpr size_t COUNT = 200;
  std::vector<uint8_t> expected(COUNT);
  std::mt19937_64 random(testing::seed());
  for (size_t id = 0; id < COUNT; ++id) {
    const size_t kind = random() % (std::size(kinds) + 1);  // one more: not even an entry
    if (kind < std::size(kinds)) {
      table.put(id, kinds[kind]);
      expected[id] = levels[kind];
    }
  }
  std::vector<uint8_t> found(COUNT, 9);
  table.reader->probe(packed(COUNT).data(), COUNT, found.data());
  EXPECT(found == expected);
  table.reader->probe(nullptr, 0, nullptr);
}

TEST(a_probe_by_names_has_the_slowest_of_the_ranks) {
  Table table;
  constexpr size_t COUNT = 130;
  std::vector<uint8_t> names = packed(COUNT);
  std::vector<uint8_t> roots(2 * HASH_BYTES, 1);
  roots[HASH_BYTES] = 2;
  std::vector<uint8_t> expected(COUNT);
  for (size_t rank = 0; rank < 2; ++rank) {
    std::vector<uint8_t> keys(names.size());
    name_keys(roots.data() + rank * HASH_BYTES, names.data(), COUNT, keys.data());
    for (size_t id = 0; id < COUNT; ++id) {
      const uint8_t level = id % 3 == 0 && rank == 1 ? 0 : static_cast<uint8_t>(id % 2 == rank ? 1 : 2);
      if (level != 0) {
        const ChunkKey key = ChunkKey::from_bytes(keys.data() + id * KEY_BYTES);
        EXPECT(table.table.insert(key, RecordId(1), 1 + id, {DRAM_REGION, static_cast<uint32_t>(2 * id + rank)}));
        table.table.set_tiers(key, tier_bit(static_cast<Tier>(level)));
      }
      expected[id] = id % 3 == 0 ? 0 : 2;
    }
  }
  std::vector<uint8_t> found(COUNT, 9);
  table.reader->probe_names(roots.data(), 2, names.data(), COUNT, found.data());
  EXPECT(found == expected);
  table.reader->probe_names(roots.data(), 1, names.data(), COUNT, found.data());
  for (size_t id = 0; id < COUNT; ++id) {
    EXPECT(found[id] == (id % 2 == 0 ? 1 : 2));
  }
}
