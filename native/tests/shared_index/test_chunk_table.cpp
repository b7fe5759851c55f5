// The shared index against a map, and under concurrent readers.
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include "tests/harness.h"
#include "shared_index/chunk_table.h"
#include "tests/table_keys.h"

using namespace kvpool;
using kvpool::testing::key_at;
using kvpool::testing::SEED;

namespace {

constexpr uint8_t EPOCH[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

struct Index {
  explicit Index(uint64_t slots, std::vector<RegionShape> regions = {{1024 * PAGE_BYTES, 1024, 4096}})
      : shape{slots, std::move(regions)},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        table(mapping, shape, EPOCH, SEED),
        reader(IndexView::attach(Mapping::attach(mapping->fd(), shape.total_bytes(), false).mapping)) {}
  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable table;
  std::shared_ptr<const IndexView> reader;
};

SlotAddress slot_at(uint64_t number) { return {DRAM_REGION, static_cast<uint32_t>(number)}; }

bool is_whole(const TableEntry& entry, uint64_t id) {
  return entry.generation % 1000 == id % 1000 && entry.record == RecordId(static_cast<uint32_t>(id));
}

}  // namespace

TEST(reader_sees_header_and_refuses_other_regions) {
  const Index index(128);
  EXPECT(index.reader != nullptr);
  EXPECT(index.reader->shape().regions.size() == 1);
  EXPECT(index.reader->shape().regions[0].bytes == 1024 * PAGE_BYTES);
  EXPECT(std::memcmp(index.reader->epoch().data(), EPOCH, 16) == 0);
  EXPECT(IndexView::attach(nullptr) == nullptr);
  const auto blank = Mapping::create("blank", 8 * PAGE_BYTES, false).mapping;
  EXPECT(IndexView::attach(blank) == nullptr);
  std::memcpy(blank->data(), index.mapping->data(), PAGE_BYTES);
  EXPECT(IndexView::attach(blank) == nullptr);  // header promises more than the region has
  const auto copy = Mapping::create("copy", index.shape.total_bytes(), false).mapping;
  std::memcpy(copy->data(), index.mapping->data(), index.shape.total_bytes());
  EXPECT(IndexView::attach(copy) != nullptr);
  reinterpret_cast<IndexHeader*>(copy->data())->slots = uint64_t{1} << 63;
  EXPECT(IndexView::attach(copy) == nullptr);
  reinterpret_cast<IndexHeader*>(copy->data())->slots = 128;
  reinterpret_cast<IndexHeader*>(copy->data())->version = 2;
  EXPECT(IndexView::attach(copy) == nullptr);
}

TEST(generations_are_of_one_life) {
  Index index(128);
  index.table.open_slot(slot_at(7), 0);
  index.table.set_generation(slot_at(7), 5);
  const LifePage page(Mapping::create("life", PAGE_BYTES, false).mapping);
  EXPECT(page.life() == 0);
  const auto view = IndexView::attach(index.mapping, nullptr, IndexLife{page, 3});
  EXPECT(view->generation_at(slot_at(7)) == 0);  // its life has not begun
  page.begin(3);
  EXPECT(view->generation_at(slot_at(7)) == 5);
  page.begin(4);
  EXPECT(view->generation_at(slot_at(7)) == 0);
  EXPECT(index.reader->generation_at(slot_at(7)) == 5);  // of an arena that nobody takes over
}

TEST(words_outside_the_regions_read_as_absent) {
  Index index(128);
  const uint32_t sums[4] = {1, 2, 3, 4};
  index.table.open_slot(slot_at(1023), 4092);
  index.table.set_checksums(slot_at(1023), sums, 4);
  index.table.set_generation(slot_at(1023), 5);
  EXPECT(index.reader->generation_at(slot_at(1023)) == 5);
  EXPECT(index.reader->generation_at(slot_at(1024)) == 0);
  EXPECT(index.reader->generation_at({1, 1023}) == 0);
  EXPECT(index.reader->generation_at({}) == 0);
  EXPECT(index.reader->generation_at(SlotAddress::unpacked(uint64_t{1} << 63)) == 0);
  EXPECT(index.reader->landing_word({1, 0}) == nullptr);
  EXPECT(index.reader->checksum_at(slot_at(1023), 3) == 4);
  EXPECT(index.reader->checksum_at(slot_at(1023), 4) == 0);
  EXPECT(index.reader->covers(slot_at(1023), 4));
  EXPECT(!index.reader->covers(slot_at(1023), 5));
  EXPECT(!index.reader->covers(slot_at(1023), UINT32_MAX));
  EXPECT(!index.reader->covers(slot_at(1024), 1));
}

TEST(lookup_ends_at_the_first_chunk_that_is_absent_or_being_written) {
  Index index(128);
  std::vector<uint8_t> keys(20 * KEY_BYTES);
  for (uint32_t id = 0; id < 20; ++id) {
    const ChunkKey key = key_at(id % 3, id + 1, 128);
    std::memcpy(&keys[id * KEY_BYTES], key.words, KEY_BYTES);
    if (id != 15) {
      EXPECT(index.table.insert(key, RecordId(id), id + 1, slot_at(id)));
      if (id != 12) {
        index.table.set_tiers(key, static_cast<uint8_t>(id % 2 == 0 ? 0b0110 : 0b0100));
      }
    }
  }
  uint8_t levels[20] = {};
  EXPECT(index.reader->lookup(keys.data(), 20, levels) == 12);
  EXPECT(index.reader->is_being_written(key_at(0, 13, 128)));
  EXPECT(index.reader->is_being_written(key_at(2, 12, 128)));  // another tier has it, and it has a slot of the arena
  EXPECT(!index.reader->is_being_written(key_at(1, 11, 128)));
  EXPECT(!index.reader->is_being_written(key_at(0, 16, 128)));
  EXPECT(levels[0] == 1);
  EXPECT(levels[1] == 2);
  index.table.set_tiers(key_at(0, 13, 128), tier_bit(Tier::DRAM));
  EXPECT(index.reader->lookup(keys.data(), 20, levels) == 15);
  EXPECT(index.reader->lookup(keys.data(), 0, levels) == 0);
}

TEST(full_table_and_long_probes_are_refused) {
  Index index(1024);
  uint32_t taken = 0;
  while (index.table.insert(key_at(5, taken + 1, 1024), RecordId(taken), taken + 1, slot_at(1))) {
    ++taken;
  }
  EXPECT(taken == MAX_PROBE);
  EXPECT(!index.table.has_room(key_at(5, 9999, 1024)));
  EXPECT(index.table.has_room(key_at(900, 9999, 1024)));
  for (uint32_t id = taken; id < 640; ++id) {
    EXPECT(index.table.insert(key_at(300 + id, id + 1, 1024), RecordId(id), id + 1, slot_at(1)));
  }
  EXPECT(!index.table.has_room(key_at(280, 7777, 1024)));  // as full as it may be
  EXPECT(index.table.verify().empty());
}

TEST(a_key_without_a_free_bucket_takes_the_bucket_of_an_idle_chunk_in_reach) {
  Index index(1024);
  std::vector<ChunkKey> crowd;
  for (uint64_t id = 1; id <= MAX_PROBE; ++id) {
    crowd.push_back(key_at(5, id, 1024));
    EXPECT(index.table.insert(crowd.back(), RecordId(1), id, slot_at(1)));
  }
  // Behind them entries of other homes, which would close the gap that a mere erasure makes.
  for (uint64_t id = 301; id < 400; ++id) {
    EXPECT(index.table.insert(key_at(150, id, 1024), RecordId(1), id, slot_at(1)));
  }
  const ChunkKey late = key_at(5, 999, 1024);
  EXPECT(!index.table.is_in_reach(late));
  EXPECT(index.table.keys_in_reach(late).size() == MAX_PROBE);
  EXPECT(!index.table.bequeath(key_at(150, 399, 1024), late));  // stands out of its reach
  EXPECT(index.table.bequeath(crowd[77], late));
  index.table.erase(crowd[77]);
  EXPECT(!index.reader->find(crowd[77]));
  EXPECT(index.reader->is_being_written(late));
  index.table.move(late, RecordId(7), 12345, slot_at(3));
  EXPECT(index.reader->find(late)->generation == 12345);
  EXPECT(index.table.verify().empty());
  index.table.erase(late);
  EXPECT(index.table.verify().empty());
}

TEST(a_look_for_a_key_says_whether_it_has_a_place_and_enter_moves_or_inserts_it) {
  Index index(1024);
  const ChunkKey key = key_at(150, 1, 1024);
  TableLook look = index.table.look_from(index.table.prefetch(key), key);
  EXPECT(!look.entry);
  EXPECT(look.has_place);
  EXPECT(index.table.enter(key, RecordId(4), 11, slot_at(1)) == uint8_t{0});
  index.table.set_tiers(key, 0b0110);
  EXPECT(index.table.enter(key, RecordId(5), 12, slot_at(2)) == uint8_t{0b0110});
  EXPECT(index.table.count() == 1);
  look = index.table.look_from(index.table.prefetch(key), key);
  EXPECT(look.entry && look.entry->record == RecordId(5) && look.entry->generation == 12 && look.entry->slot == slot_at(2));
  EXPECT(look.has_place);
  for (uint32_t id = 2; id <= MAX_PROBE; ++id) {
    EXPECT(index.table.enter(key_at(150, id, 1024), RecordId(id), id, slot_at(1)) == uint8_t{0});
  }
  const ChunkKey late = key_at(150, 1000, 1024);
  look = index.table.look_from(index.table.prefetch(late), late);
  EXPECT(!look.entry);
  EXPECT(!look.has_place);
  EXPECT(!index.table.enter(late, RecordId(1), 1, slot_at(1)));
  EXPECT(index.table.look_from(index.table.prefetch(key), key).has_place);  // it stands there itself
  index.table.erase(key_at(150, 77, 1024));
  EXPECT(index.table.look_from(index.table.prefetch(late), late).has_place);
  EXPECT(index.table.verify().empty());
}

// Chance at the largest load: what the bounds in chunk_table.h stand on.
TEST(probes_stay_short_at_the_largest_load) {
  Index index(IndexShape::slots_for(200'000));
  std::mt19937_64 random(kvpool::testing::seed());
  uint64_t refused = 0;
  uint64_t longest = 0;
  for (uint64_t id = 1; id <= 200'000; ++id) {
    const ChunkKey key{{random(), random(), random(), random()}};
    refused += index.table.insert(key, RecordId(1), id, slot_at(1)) ? 0U : 1U;
    longest = std::max(longest, index.table.probe_length(key).value_or(0));
  }
  std::printf("  longest probe: %llu slots\n", static_cast<unsigned long long>(longest));
  EXPECT(refused == 0);
  EXPECT(longest < MAX_PROBE);
}

TEST(random_operations_agree_with_a_map) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (const uint64_t homes : {3ULL, 40ULL, 1000000ULL}) {
    Index index(256);
    std::map<uint64_t, uint8_t> model;  // id -> tiers
    const auto home = [&](uint64_t id) { return ((id * 7919 % homes) + 250) % 256; };  // crosses the table's end
    for (int step = 0; step < 4000; ++step) {
      const uint64_t id = 1 + random() % 200;
      const ChunkKey key = key_at(home(id), id, 256);
      const bool present = model.count(id) != 0;
      if (!present && random() % 2 == 0) {
        const bool room = index.table.has_room(key);
        EXPECT(room == index.table.insert(key, RecordId(static_cast<uint32_t>(id)), id, slot_at(0)));
        EXPECT(room == (model.size() < 160));
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
      const auto found = index.reader->find(key_at(home(probe), probe, 256));
      EXPECT(found.has_value() == (model.count(probe) != 0));
      EXPECT(!found || (found->tiers == model[probe] && is_whole(*found, probe)));
    }
    EXPECT(index.reader->count() == model.size());
  }
}

// One writer inserts, commits and erases odd ids among stable even ids that share a handful of homes, so that
// almost every erase shifts stable entries. Readers must always find the stable ones, and never a mixed entry.
TEST(readers_never_miss_a_stable_key_nor_see_a_mixed_one) {
  Index index(256);
  constexpr uint64_t IDS = 100;
  constexpr uint32_t LOOKS_AGAIN = 100'000;
  std::vector<ChunkKey> keys;
  for (uint64_t id = 0; id < IDS; ++id) {
    keys.push_back(key_at(240 + id % 4, id, 256));
  }
  std::mt19937_64 random(kvpool::testing::seed());
  for (uint64_t id = 0; id < IDS; id += 2) {
    EXPECT(index.table.insert(keys[id], RecordId(static_cast<uint32_t>(id)), 1000 + id, slot_at(0)));
    index.table.set_tiers(keys[id], 2);
  }
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> missed{0};
  std::atomic<uint64_t> mixed{0};
  std::atomic<uint64_t> finds{0};
  const auto read = [&](uint64_t seed) {
    std::mt19937_64 pick(seed);
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t id = pick() % IDS;
      auto found = index.reader->find(keys[id]);
      // A reader asks no longer than MAX_LOOKS times: it misses an entry at which the writer has lost its processor.
      for (uint32_t again = 0; !found && id % 2 == 0 && again < LOOKS_AGAIN; ++again) {
        std::this_thread::yield();
        found = index.reader->find(keys[id]);
      }
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
    const ChunkKey key = keys[id];
    if (present[id]) {
      index.table.set_generation(slot_at(id), 0);
      index.table.erase(key);
    } else {
      generation += 1000;
      const auto record = RecordId(static_cast<uint32_t>(id));
      EXPECT(index.table.insert(key, record, generation + id, slot_at(id)));
      index.table.set_generation(slot_at(id), generation + id);
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

TEST(a_recount_takes_no_memory_for_what_was_never_used) {
  Index index(1 << 16);
  EXPECT(index.table.insert(key_at(60000, 1, 1 << 16), RecordId(1), 1, slot_at(0)));
  struct stat before = {};
  struct stat after = {};
  EXPECT(fstat(index.mapping->fd(), &before) == 0);
  EXPECT(index.table.verify().empty());
  EXPECT(index.table.count_in(1) == 0);
  EXPECT(index.table.count_placeless() == 0);
  EXPECT(fstat(index.mapping->fd(), &after) == 0);
  EXPECT(after.st_blocks == before.st_blocks);
}
