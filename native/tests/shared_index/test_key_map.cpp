// A tier's map of its records, against a map of the standard library, and what it costs.
#include <map>

#include "tests/harness.h"
#include "records/key_map.h"
#include "tests/table_keys.h"

using namespace kvpool;

TEST(random_operations_agree_with_a_map) {
  std::mt19937_64 random(kvpool::testing::seed());
  constexpr uint32_t KEYS = 400;
  for (const bool is_crowded : {false, true}) {
    ChunkRecords records(KEYS);
    KeyMap keys(KEYS, records, kvpool::testing::SEED);
    std::map<uint64_t, RecordId> model;
    const auto key_of = [&](uint64_t id) {
      return is_crowded ? kvpool::testing::key_at(569 + id % 3, id, KEYS * 10 / 7 + 1) : ChunkKey{{id, 1, 2, 3}};
    };
    for (int step = 0; step < 20000; ++step) {
      const uint64_t id = 1 + random() % (is_crowded ? 90 : 500);
      const ChunkKey key = key_of(id);
      const auto known = model.find(id);
      EXPECT(keys.find(key) == (known == model.end() ? RecordId() : known->second));
      if (known != model.end()) {
        keys.erase(key);
        records.release(known->second);
        model.erase(known);
      } else if (keys.has_room()) {
        const RecordId record = records.allocate();
        records[record].key = key;
        keys.insert(record);
        model.emplace(id, record);
      }
      EXPECT(keys.count() == model.size());
      EXPECT(keys.has_room() == (model.size() < KEYS));
      EXPECT(step % 97 != 0 || keys.verify().empty());
    }
  }
}

TEST(a_full_map_finds_every_key) {
  constexpr uint32_t KEYS = 10'000;
  ChunkRecords records(KEYS);
  KeyMap keys(KEYS, records);
  for (uint64_t id = 0; id < KEYS; ++id) {
    const RecordId record = records.allocate();
    records[record].key = {{id, id * id, 7, ~id}};
    keys.insert(record);
  }
  EXPECT(!keys.has_room());
  for (uint64_t id = 0; id < KEYS; ++id) {
    EXPECT(keys.find({{id, id * id, 7, ~id}}).value() == id);
    EXPECT(!keys.find({{id, id * id, 8, ~id}}).valid());
  }
  EXPECT(keys.verify().empty());
}
