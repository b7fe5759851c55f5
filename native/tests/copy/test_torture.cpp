// Readers beside a writer that never rests: the shared table, and slots that change under a load. Seeds are printed.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tests/copy/copy_jobs.h"
#include "tests/harness.h"
#include "shared_index/chunk_table.h"
#include "tests/table_keys.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr auto DURATION = std::chrono::milliseconds(1500);
constexpr size_t READERS = 3;
constexpr uint64_t SLOTS = 512;

uint64_t fresh_seed() {
  const uint64_t seed = std::random_device{}();
  std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Keys of one neighbourhood, so that erasing one shifts others: few homes, many keys.
const std::vector<ChunkKey>& crowded_keys() {
  static const std::vector<ChunkKey> keys = [] {
    std::vector<ChunkKey> made;
    for (uint64_t id = 0; id <= 140; ++id) {
      made.push_back(key_at(id % 7, id, SLOTS));
    }
    return made;
  }();
  return keys;
}

const ChunkKey& crowded_key(uint64_t id) { return crowded_keys()[id]; }

// What an entry says follows from its key and round, so that a mixture of two shows.
uint64_t generation_of(uint64_t id, uint64_t round) { return (id << 32) | (round + 1); }

bool is_whole(const TableEntry& entry, uint64_t id) {
  const uint64_t round = (entry.generation & 0xFFFFFFFFU) - 1;
  return entry.generation >> 32 == id && entry.record.value() == id + 100 && entry.slot.number == (id + round) % 64;
}

}  // namespace

TEST(a_key_that_stays_is_always_found_and_no_entry_is_a_mixture) {
  const uint64_t seed = fresh_seed();
  const IndexShape shape{SLOTS, {{64 * PAGE_BYTES, 64, 64}}};
  const auto words = Mapping::create("torture", shape.total_bytes(), false).mapping;
  const uint8_t epoch[16] = {1};
  ChunkTable table(words, shape, epoch, SEED);
  const auto view = IndexView::attach(words);
  constexpr uint64_t STABLE = 40;  // ids 1..40 stay; 41..140 come and go
  const auto insert = [&](uint64_t id, uint64_t round) {
    return table.insert(crowded_key(id), RecordId(static_cast<uint32_t>(id + 100)), generation_of(id, round),
                        {DRAM_REGION, static_cast<uint32_t>((id + round) % 64)});
  };
  for (uint64_t id = 1; id <= STABLE; ++id) {
    EXPECT(insert(id, 0));
    table.set_tiers(crowded_key(id), tier_bit(Tier::DRAM));
  }
  std::atomic<bool> is_over = false;
  std::atomic<uint64_t> missed = 0;
  std::atomic<uint64_t> mixed = 0;
  std::atomic<uint64_t> looks = 0;
  std::vector<std::thread> readers;
  for (size_t number = 0; number < READERS; ++number) {
    readers.emplace_back([&, number] {
      std::mt19937_64 random(seed + number + 1);
      while (!is_over) {
        const uint64_t id = 1 + random() % 140;
        const auto entry = view->find(crowded_key(id));
        missed += id <= STABLE && !entry ? 1U : 0U;
        mixed += entry && !is_whole(*entry, id) ? 1U : 0U;
        ++looks;
      }
    });
  }
  std::mt19937_64 random(seed);
  std::vector<bool> is_in(141);
  uint64_t round = 0;
  for (const auto end = std::chrono::steady_clock::now() + DURATION; std::chrono::steady_clock::now() < end; ++round) {
    const uint64_t id = STABLE + 1 + random() % 100;
    if (is_in[id]) {
      table.erase(crowded_key(id));
    } else {
      EXPECT(insert(id, round & 0xFFFFFFF));
    }
    is_in[id] = !is_in[id];
  }
  is_over = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  std::printf("  %llu changes, %llu looks\n", static_cast<unsigned long long>(round),
              static_cast<unsigned long long>(looks.load()));
  EXPECT(missed == 0);
  EXPECT(mixed == 0);
  EXPECT(looks > 0);
  EXPECT(table.verify().empty());
}

// The writer gives slots to other chunks while loads copy them without comparing checksums: the generation words alone must
// show it. The bytes of a slot follow from its generation. Under the thread sanitizer the bytes stay: copying bytes that change
// is what the words are there to notice, and what the sanitizer would report.
TEST(a_load_that_calls_itself_complete_has_the_bytes_of_its_generations) {
  const uint64_t seed = fresh_seed();
  constexpr size_t CHUNKS = 16;
  CopySetting setting(CHUNKS, 2, 4096, seed);
  const auto byte_of = [](uint64_t generation) { return static_cast<uint8_t>(generation * 41 + 7); };
  const auto write = [&](size_t chunk, uint64_t generation) {
    std::memset(setting.extent(chunk, 0), byte_of(generation), 2 * setting.extent_bytes);
  };
  std::vector<std::atomic<uint64_t>> current(CHUNKS);
  for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
    current[chunk] = chunk + 1;
    write(chunk, chunk + 1);
  }
  CopyPool pool(2);
  std::atomic<bool> is_over = false;
  std::thread writer([&] {
    std::mt19937_64 random(seed);
    for (uint64_t generation = CHUNKS + 1; !is_over; ++generation) {
      const size_t chunk = random() % CHUNKS;
      setting.table->set_generation(setting.slot(chunk), 0);
#if defined(__SANITIZE_THREAD__)
      const uint64_t next = current[chunk] + 256;  // whose bytes are the same
#else
      const uint64_t next = generation * CHUNKS;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      write(chunk, next);
#endif
      setting.table->set_generation(setting.slot(chunk), next);
      current[chunk] = next;
      for (uint64_t pause = random() % 64; pause > 0; --pause) {
        std::this_thread::yield();
      }
    }
  });
  uint64_t complete = 0;
  uint64_t shortened = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto has_lasted = [&](auto time) { return std::chrono::steady_clock::now() - start > time; };
  // On a busy machine one of the two may have to wait for its turn.
  while (!has_lasted(DURATION) || ((complete == 0 || shortened == 0) && !has_lasted(20 * DURATION))) {
    LoadPlan plan = setting.load_plan();
    const uint32_t first = (complete + shortened) % 2;  // every other load is of the second extent alone
    if (first == 1) {
      plan = setting.load_plan_of({1}, setting.extent_bytes);
    }
    plan.verifies = false;
    for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
      plan.generations[chunk] = current[chunk];
    }
    const std::vector<uint64_t> wanted = plan.generations;
    const auto job = start_load(pool, std::move(plan));
    EXPECT(job->wait(LONG_S));
    const uint64_t good = job->chunks();
    (good == CHUNKS ? complete : shortened) += 1;
    EXPECT(good == CHUNKS || job->reason() == LoadReason::GONE);
    for (size_t chunk = 0; chunk < good; ++chunk) {
      for (uint32_t extent = first; extent < setting.extents; ++extent) {
        const uint8_t* block = setting.block(chunk, extent);
        EXPECT(std::all_of(block, block + setting.extent_bytes,
                           [&](uint8_t byte) { return byte == byte_of(wanted[chunk]); }));
      }
    }
  }
  is_over = true;
  writer.join();
  std::printf("  %llu loads complete, %llu shortened\n", static_cast<unsigned long long>(complete),
              static_cast<unsigned long long>(shortened));
  EXPECT(complete > 0);
  EXPECT(shortened > 0);
}
