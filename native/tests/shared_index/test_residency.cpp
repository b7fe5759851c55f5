// Where keys are in several tiers of arenas, against a map, and under readers while it changes.
#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "tests/harness.h"
#include "shared_index/chunk_table.h"
#include "tests/table_keys.h"

using namespace kvpool;
using kvpool::testing::key_at;
using kvpool::testing::SEED;

namespace {

constexpr uint8_t EPOCH[16] = {3};
constexpr uint64_t SLOTS = 256;
constexpr uint32_t HBM_REGION = 1;

struct Index {
  Index()
      : shape{SLOTS, {{1 << 20, 512, 512}, {1 << 20, 512, 512, Tier::HBM, Backing::DEVICE}}},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        table(mapping, shape, EPOCH, SEED),
        reader(IndexView::attach(Mapping::attach(mapping->fd(), shape.total_bytes(), false).mapping)) {}
  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable table;
  std::shared_ptr<const IndexView> reader;
};

SlotAddress in_dram(uint64_t number) { return {DRAM_REGION, static_cast<uint32_t>(number)}; }
SlotAddress in_hbm(uint64_t number) { return {HBM_REGION, static_cast<uint32_t>(number)}; }
RecordId record_of(uint64_t id) { return RecordId(static_cast<uint32_t>(id)); }

// What the tables say of a key in a tier, by both sides.
std::optional<Residency> residency_of(const Index& index, const ChunkKey& key, Tier tier) {
  const auto read = index.reader->residency(key, tier);
  EXPECT(read == index.table.residency(key, tier));
  return read;
}

}  // namespace

TEST(a_key_is_resident_in_both_tiers_moved_and_erased) {
  Index index;
  const ChunkKey key = key_at(5, 1, SLOTS);
  EXPECT(!residency_of(index, key, Tier::DRAM));
  EXPECT(!residency_of(index, key, Tier::HBM));
  EXPECT(index.table.insert(key, record_of(1), 11, in_dram(3)));
  EXPECT(residency_of(index, key, Tier::DRAM) == Residency{11, in_dram(3)});
  EXPECT(!residency_of(index, key, Tier::HBM));
  index.table.set_residency(key, Tier::HBM, {12, in_hbm(9)});
  index.table.set_tiers(key, tier_bit(Tier::HBM) | tier_bit(Tier::DRAM) | tier_bit(Tier::SSD));
  EXPECT(residency_of(index, key, Tier::HBM) == Residency{12, in_hbm(9)});
  EXPECT(!residency_of(index, key, Tier::SSD));  // below: read through DRAM
  uint8_t level = 0;
  EXPECT(index.reader->lookup(reinterpret_cast<const uint8_t*>(key.words), 1, &level) == 1);
  EXPECT(level == static_cast<uint8_t>(Tier::HBM));
  index.table.move(key, record_of(1), 13, in_dram(4));
  EXPECT(residency_of(index, key, Tier::DRAM) == Residency{13, in_dram(4)});
  EXPECT(residency_of(index, key, Tier::HBM) == Residency{12, in_hbm(9)});
  index.table.move(key, RecordId(), 13, {});  // no longer in DRAM
  EXPECT(!residency_of(index, key, Tier::DRAM));
  EXPECT(residency_of(index, key, Tier::HBM) == Residency{12, in_hbm(9)});
  index.table.set_residency(key, Tier::HBM, {});
  EXPECT(!residency_of(index, key, Tier::HBM));
  index.table.set_residency(key, Tier::HBM, {14, in_hbm(1)});
  EXPECT(index.table.verify().empty());
  index.table.erase(key);
  EXPECT(!residency_of(index, key, Tier::HBM));
  // Who comes to the same place of the table inherits nothing.
  EXPECT(index.table.insert(key_at(5, 2, SLOTS), record_of(2), 15, in_dram(0)));
  EXPECT(!residency_of(index, key_at(5, 2, SLOTS), Tier::HBM));
  EXPECT(index.table.verify().empty());
}

TEST(random_moves_agree_with_a_map) {
  std::mt19937_64 random(kvpool::testing::seed());
  Index index;
  std::map<uint64_t, std::array<std::optional<Residency>, 2>> model;
  for (uint64_t step = 1; step < 20'000; ++step) {
    const uint64_t id = 1 + random() % 150;
    const ChunkKey key = key_at(250 + id % 5, id, SLOTS);  // crosses the table's end, so that erasing shifts
    const auto known = model.find(id);
    const Residency dram{step, in_dram(random() % 512)};
    if (known == model.end()) {
      if (index.table.insert(key, record_of(id), dram.generation, dram.slot)) {
        model[id] = {dram, std::nullopt};
      }
    } else if (random() % 4 == 0) {
      index.table.erase(key);
      model.erase(id);
    } else if (random() % 2 == 0) {
      index.table.move(key, record_of(id), dram.generation, dram.slot);
      known->second[0] = dram;
    } else if (random() % 3 == 0) {
      index.table.set_residency(key, Tier::HBM, {});
      known->second[1].reset();
    } else {
      known->second[1] = {step, in_hbm(random() % 512)};
      index.table.set_residency(key, Tier::HBM, *known->second[1]);
    }
    const uint64_t asked = 1 + random() % 150;
    const ChunkKey other = key_at(250 + asked % 5, asked, SLOTS);
    const auto expected = model.count(asked) != 0 ? model[asked] : std::array<std::optional<Residency>, 2>{};
    EXPECT(residency_of(index, other, Tier::DRAM) == expected[0]);
    EXPECT(residency_of(index, other, Tier::HBM) == expected[1]);
    EXPECT(step % 50 != 0 || index.table.verify().empty());
  }
}

// One writer moves keys within and between tiers and erases their neighbours, so that entries shift with their second lines.
// A residency names its key: its number is the key's id plus 150 for every other generation.
TEST(readers_see_no_residency_of_another_key_nor_a_mixed_one) {
  Index index;
  constexpr uint64_t IDS = 120;
  constexpr uint32_t LOOKS_AGAIN = 100'000;
  const auto residency = [](uint64_t id, uint64_t round, uint32_t region) {
    return Residency{round * 1000 + id, {region, static_cast<uint32_t>(id + round % 2 * 150)}};
  };
  const auto is_whole = [](const Residency& found, uint64_t id, uint32_t region) {
    const uint64_t round = found.generation / 1000;
    return found.generation % 1000 == id && found.slot.region == region && found.slot.number == id + round % 2 * 150;
  };
  std::vector<ChunkKey> keys;
  for (uint64_t id = 0; id < IDS; ++id) {
    keys.push_back(key_at(250 + id % 4, id, SLOTS));
  }
  for (uint64_t id = 0; id < IDS; id += 2) {  // these stay
    const Residency first = residency(id, 1, DRAM_REGION);
    EXPECT(index.table.insert(keys[id], record_of(id), first.generation, first.slot));
    index.table.set_residency(keys[id], Tier::HBM, residency(id, 1, HBM_REGION));
  }
  const uint64_t seed = kvpool::testing::seed();
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> missed{0}, mixed{0}, looks{0};
  std::vector<std::thread> readers;
  for (uint64_t thread = 0; thread < 2; ++thread) {
    readers.emplace_back([&, thread] {
      std::mt19937_64 pick(seed + thread + 1);
      while (!is_over.load(std::memory_order_relaxed)) {
        const uint64_t id = pick() % IDS;
        for (const auto& [tier, region] : {std::pair{Tier::DRAM, DRAM_REGION}, std::pair{Tier::HBM, HBM_REGION}}) {
          auto found = index.reader->residency(keys[id], tier);
          // A reader asks no longer than MAX_LOOKS times: it misses an entry at which the writer has lost its processor.
          for (uint32_t again = 0; !found && id % 2 == 0 && again < LOOKS_AGAIN; ++again) {
            std::this_thread::yield();
            found = index.reader->residency(keys[id], tier);
          }
          missed += !found && id % 2 == 0 ? 1U : 0U;
          mixed += found && !is_whole(*found, id, region) ? 1U : 0U;
        }
        ++looks;
      }
    });
  }
  std::mt19937_64 random(seed);
  std::vector<bool> is_in(IDS);
  for (uint64_t round = 2; round < 30'000 || looks < 1000; ++round) {
    const uint64_t id = random() % IDS;
    const Residency next = residency(id, round, DRAM_REGION);
    if (id % 2 == 0) {
      index.table.move(keys[id], record_of(id), next.generation, next.slot);
      index.table.set_residency(keys[id], Tier::HBM, residency(id, round + 1, HBM_REGION));
    } else if (is_in[id]) {
      index.table.erase(keys[id]);
      is_in[id] = false;
    } else {
      EXPECT(index.table.insert(keys[id], record_of(id), next.generation, next.slot));
      index.table.set_residency(keys[id], Tier::HBM, residency(id, round, HBM_REGION));
      is_in[id] = true;
    }
  }
  is_over = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT(missed == 0);
  EXPECT(mixed == 0);
  EXPECT(index.table.verify().empty());
}
