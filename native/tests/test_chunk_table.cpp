// The shared index against a map, and under concurrent readers.
#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include "harness.h"
#include "kvpool/chunk_table.h"

using namespace kvpool;

namespace {

constexpr uint8_t EPOCH[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

struct Index {
  explicit Index(uint32_t table_log2, uint64_t arena_bytes = 1024 * PAGE_BYTES)
      : shape{table_log2, arena_bytes},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        table(mapping, shape, EPOCH),
        reader(IndexView::attach(Mapping::attach(mapping->fd(), shape.total_bytes(), false).mapping)) {}
  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable table;
  std::shared_ptr<const IndexView> reader;
};

// A key whose home is `home` (crowded on purpose) and whose identity is `id`. The last words prove it is whole.
ChunkKey key_of(uint64_t home, uint64_t id) {
  return {{home, id, id * 0x9E3779B97F4A7C15ULL, ~id}};
}

bool is_whole(const TableEntry& entry, uint64_t id) {
  return entry.generation % 1000 == id % 1000 && entry.record == RecordId(static_cast<uint32_t>(id));
}

}  // namespace

TEST(reader_sees_header_and_refuses_other_regions) {
  const Index index(7);
  EXPECT(index.reader != nullptr);
  EXPECT(index.reader->arena_bytes() == 1024 * PAGE_BYTES);
  EXPECT(std::memcmp(index.reader->epoch().data(), EPOCH, 16) == 0);
  EXPECT(IndexView::attach(nullptr) == nullptr);
  const auto blank = Mapping::create("blank", 8 * PAGE_BYTES, false).mapping;
  EXPECT(IndexView::attach(blank) == nullptr);
  std::memcpy(blank->data(), index.mapping->data(), PAGE_BYTES);
  EXPECT(IndexView::attach(blank) == nullptr);  // header promises more than the region has
  const auto copy = Mapping::create("copy", index.shape.total_bytes(), false).mapping;
  std::memcpy(copy->data(), index.mapping->data(), index.shape.total_bytes());
  EXPECT(IndexView::attach(copy) != nullptr);
  reinterpret_cast<IndexHeader*>(copy->data())->table_log2 = 63;
  EXPECT(IndexView::attach(copy) == nullptr);
  reinterpret_cast<IndexHeader*>(copy->data())->table_log2 = 7;
  reinterpret_cast<IndexHeader*>(copy->data())->version = 2;
  EXPECT(IndexView::attach(copy) == nullptr);
}

TEST(words_outside_the_arena_read_as_nothing) {
  Index index(7);
  index.table.set_generation(PageIndex(1023), 5);
  const uint32_t sums[4] = {1, 2, 3, 4};
  index.table.set_checksums(PageIndex(1023), sums, 4);
  EXPECT(index.reader->generation_at(1023 * PAGE_BYTES) == 5);
  EXPECT(index.reader->generation_at(1024 * PAGE_BYTES) == 0);
  EXPECT(index.reader->generation_at(1023 * PAGE_BYTES + 1) == 0);
  EXPECT(index.reader->generation_at(UINT64_MAX) == 0);
  EXPECT(index.reader->checksum_at(1023 * PAGE_BYTES, 3) == 4);
  EXPECT(index.reader->checksum_at(1023 * PAGE_BYTES, 4) == 0);
  EXPECT(index.reader->covers(1023 * PAGE_BYTES, 4));
  EXPECT(!index.reader->covers(1023 * PAGE_BYTES, 5));
}

TEST(lookup_ends_at_the_first_chunk_that_is_absent_or_being_written) {
  Index index(7);
  std::vector<uint8_t> keys(20 * KEY_BYTES);
  for (uint32_t id = 0; id < 20; ++id) {
    const ChunkKey key = key_of(id % 3, id + 1);
    std::memcpy(&keys[id * KEY_BYTES], key.words, KEY_BYTES);
    if (id != 15) {
      EXPECT(index.table.insert(key, RecordId(id), id + 1, PageIndex(id)));
      if (id != 12) {
        index.table.set_tiers(key, static_cast<uint8_t>(id % 2 == 0 ? 0b0110 : 0b0100));
      }
    }
  }
  uint8_t levels[20] = {};
  EXPECT(index.reader->lookup(keys.data(), 20, levels) == 12);
  EXPECT(index.reader->is_being_written(key_of(0, 13)));
  EXPECT(!index.reader->is_being_written(key_of(2, 12)));
  EXPECT(!index.reader->is_being_written(key_of(0, 16)));
  EXPECT(levels[0] == 1);
  EXPECT(levels[1] == 2);
  index.table.set_tiers(key_of(0, 13), tier_bit(Tier::DRAM));
  EXPECT(index.reader->lookup(keys.data(), 20, levels) == 15);
  EXPECT(index.reader->lookup(keys.data(), 0, levels) == 0);
}

TEST(full_table_and_long_probes_are_refused) {
  Index index(10);
  uint32_t taken = 0;
  while (index.table.insert(key_of(5, taken + 1), RecordId(taken), taken + 1, PageIndex(1))) {
    ++taken;
  }
  EXPECT(taken == MAX_PROBE);
  EXPECT(!index.table.has_room(key_of(5, 9999)));
  EXPECT(index.table.has_room(key_of(900, 9999)));
  for (uint32_t id = taken; id < 512; ++id) {
    EXPECT(index.table.insert(key_of(400 + id, id + 1), RecordId(id), id + 1, PageIndex(1)));
  }
  EXPECT(!index.table.has_room(key_of(300, 7777)));  // half full
  EXPECT(index.table.verify().empty());
}

TEST(random_operations_agree_with_a_map) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (const uint64_t homes : {3ULL, 40ULL, 1000000ULL}) {
    Index index(8);
    std::map<uint64_t, uint8_t> model;  // id -> tiers
    const auto home = [&](uint64_t id) { return (id * 7919 % homes) + 250; };  // crosses the table's end
    for (int step = 0; step < 4000; ++step) {
      const uint64_t id = 1 + random() % 200;
      const ChunkKey key = key_of(home(id), id);
      const bool present = model.count(id) != 0;
      if (!present && random() % 2 == 0) {
        const bool room = index.table.has_room(key);
        EXPECT(room == index.table.insert(key, RecordId(static_cast<uint32_t>(id)), id, PageIndex(0)));
        EXPECT(room == (model.size() < 128));
        if (room) {
          model[id] = 0;
        }
      } else if (present && random() % 3 == 0) {
        model[id] = static_cast<uint8_t>(random() % 16);
        index.table.set_tiers(key, model[id]);
      } else if (present) {
        index.table.erase(key);
        model.erase(id);
      }
      EXPECT(index.table.verify().empty());
      const uint64_t probe = 1 + random() % 200;
      const auto found = index.reader->find(key_of(home(probe), probe));
      EXPECT(found.has_value() == (model.count(probe) != 0));
      EXPECT(!found || (found->tiers == model[probe] && is_whole(*found, probe)));
    }
    EXPECT(index.reader->count() == model.size());
  }
}

// One writer inserts, commits and erases odd ids among stable even ids that share a handful of homes, so that
// almost every erase shifts stable entries. Readers must always find the stable ones, and never a mixed entry.
TEST(readers_never_miss_a_stable_key_nor_see_a_mixed_one) {
  Index index(8);
  constexpr uint64_t IDS = 100;
  const auto home = [](uint64_t id) { return 240 + id % 4; };
  std::mt19937_64 random(kvpool::testing::seed());
  for (uint64_t id = 0; id < IDS; id += 2) {
    EXPECT(index.table.insert(key_of(home(id), id), RecordId(static_cast<uint32_t>(id)), 1000 + id, PageIndex(0)));
    index.table.set_tiers(key_of(home(id), id), 2);
  }
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> missed{0};
  std::atomic<uint64_t> mixed{0};
  std::atomic<uint64_t> finds{0};
  const auto read = [&](uint64_t seed) {
    std::mt19937_64 pick(seed);
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t id = pick() % IDS;
      const auto found = index.reader->find(key_of(home(id), id));
      missed += (!found || found->tiers != 2) && id % 2 == 0 ? 1U : 0U;
      mixed += found && !is_whole(*found, id) ? 1U : 0U;
      ++finds;
    }
  };
  std::vector<std::thread> readers;
  for (uint64_t thread = 0; thread < 3; ++thread) {
    readers.emplace_back(read, random());
  }
  std::map<uint64_t, bool> present;
  uint64_t generation = 2000;
  for (int step = 0; step < 60000; ++step) {
    const uint64_t id = random() % (IDS / 2) * 2 + 1;
    const ChunkKey key = key_of(home(id), id);
    if (present[id]) {
      index.table.set_generation(PageIndex(static_cast<uint32_t>(id)), 0);
      index.table.erase(key);
    } else {
      generation += 1000;
      const auto record = RecordId(static_cast<uint32_t>(id));
      EXPECT(index.table.insert(key, record, generation + id, PageIndex(static_cast<uint32_t>(id))));
      index.table.set_generation(PageIndex(static_cast<uint32_t>(id)), generation + id);
      index.table.set_tiers(key, 2);
    }
    present[id] = !present[id];
  }
  while (finds.load() < 1000) {
    std::this_thread::yield();
  }
  stop = true;
  for (auto& reader : readers) {
    reader.join();
  }
  std::printf("  %llu finds beside 60000 changes\n", static_cast<unsigned long long>(finds.load()));
  EXPECT(missed.load() == 0);
  EXPECT(mixed.load() == 0);
  EXPECT(index.table.verify().empty());
}
