// Lookups over both tables: the run goes on where a chunk is here or on another node.
#include <algorithm>
#include <random>

#include "shared_index/chunk_table.h"
#include "tests/harness.h"
#include "tests/remote_index/remote_table.h"

using namespace kvpool;
using kvpool::testing::packed;
using kvpool::testing::remote_key;
using kvpool::testing::RemoteTable;

namespace {

constexpr uint8_t EPOCH[16] = {3};
constexpr uint8_t PEER_LEVEL = static_cast<uint8_t>(Tier::PEER);

struct BothTables {
  BothTables()
      : shape{2048, {{1 << 20, 2048, 2048}}},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        here(mapping, shape, EPOCH),
        elsewhere(512),
        owner(*elsewhere.index.add_owner()),
        plain(IndexView::attach(mapping)),
        reader(IndexView::attach(mapping, elsewhere.reader)) {}

  void store(uint64_t id, Tier tier) {
    EXPECT(here.insert(remote_key(id), RecordId(1), 1 + id, {DRAM_REGION, static_cast<uint32_t>(id)}));
    here.set_tiers(remote_key(id), tier_bit(tier));
  }
  [[nodiscard]] static std::vector<uint8_t> lookup(const IndexView& view, uint64_t n) {
    std::vector<ChunkKey> keys;
    for (uint64_t id = 0; id < n; ++id) {
      keys.push_back(remote_key(id));
    }
    std::vector<uint8_t> levels(n, NO_LEVEL);
    const size_t found = view.lookup(packed(keys).data(), n, levels.data());
    EXPECT(found <= n);
    levels.resize(found);
    return levels;
  }

  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable here;
  RemoteTable elsewhere;
  RemoteOwner owner;
  std::shared_ptr<const IndexView> plain;
  std::shared_ptr<const IndexView> reader;
};

}  // namespace

TEST(a_miss_in_both_is_a_miss) {
  BothTables tables;
  EXPECT(BothTables::lookup(*tables.reader, 100).empty());
  EXPECT(tables.reader->lookup(nullptr, 0, nullptr) == 0);
}

TEST(chunks_of_this_node_come_first_and_the_others_are_at_a_peer) {
  BothTables tables;
  const uint8_t dram = static_cast<uint8_t>(Tier::DRAM), ssd = static_cast<uint8_t>(Tier::SSD);
  tables.store(0, Tier::DRAM);
  tables.store(1, Tier::SSD);
  tables.store(4, Tier::DRAM);
  EXPECT(tables.here.insert(remote_key(5), RecordId(1), 9, {}));  // being written here
  for (const uint64_t id : {1U, 2U, 3U, 5U, 6U, 8U}) {
    tables.elsewhere.insert(tables.owner, remote_key(id));
  }
  const std::vector<uint8_t> expected{dram, ssd, PEER_LEVEL, PEER_LEVEL, dram, PEER_LEVEL, PEER_LEVEL};
  EXPECT(BothTables::lookup(*tables.reader, 20) == expected);
  EXPECT(BothTables::lookup(*tables.reader, 3).size() == 3);
  EXPECT(BothTables::lookup(*tables.plain, 20).size() == 2);
  tables.elsewhere.index.retire(tables.owner);
  EXPECT(BothTables::lookup(*tables.reader, 20).size() == 2);
}

TEST(a_last_run_goes_on_over_chunks_of_other_nodes) {
  BothTables tables;
  tables.store(2, Tier::DRAM);
  tables.store(6, Tier::SSD);
  for (const uint64_t id : {1U, 3U, 5U, 8U}) {
    tables.elsewhere.insert(tables.owner, remote_key(id));
  }
  std::vector<ChunkKey> ids;
  for (uint64_t id = 0; id < 10; ++id) {
    ids.push_back(remote_key(id));
  }
  const auto keys = packed(ids);
  std::vector<uint8_t> levels(10, NO_LEVEL);
  EXPECT(tables.reader->last_run(keys.data(), 10, 2, false, levels.data()) == 7);
  EXPECT(levels[5] == PEER_LEVEL && levels[6] == static_cast<uint8_t>(Tier::SSD));
  EXPECT(tables.reader->last_run(keys.data(), 10, 3, false, levels.data()) == 4);
  EXPECT(levels[1] == PEER_LEVEL && levels[2] == static_cast<uint8_t>(Tier::DRAM) && levels[3] == PEER_LEVEL);
  EXPECT(tables.reader->last_run(keys.data(), 10, 1, true, levels.data()) == 7);
  EXPECT(tables.reader->last_run(keys.data(), 10, 2, true, levels.data()) == 0);
  EXPECT(tables.plain->last_run(keys.data(), 10, 2, false, levels.data()) == 0);
  tables.elsewhere.index.retire(tables.owner);
  EXPECT(tables.reader->last_run(keys.data(), 10, 2, false, levels.data()) == 0);
}

TEST(random_lookups_agree_with_sets) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int round = 0; round < 200; ++round) {
    BothTables tables;
    const uint64_t n = 1 + random() % 300;
    const uint64_t rare = 2 + random() % 200;
    std::vector<uint8_t> expected;
    bool is_over = false;
    for (uint64_t id = 0; id < n; ++id) {
      const uint64_t where = random() % rare == 0 ? 0 : 1 + random() % 3;
      if (where == 1 || where == 3) {
        tables.store(id, Tier::DRAM);
      }
      if (where >= 2) {
        tables.elsewhere.insert(tables.owner, remote_key(id));
      }
      is_over = is_over || where == 0;
      if (!is_over) {
        expected.push_back(where == 2 ? PEER_LEVEL : static_cast<uint8_t>(Tier::DRAM));
      }
    }
    EXPECT(BothTables::lookup(*tables.reader, n) == expected);
  }
}
