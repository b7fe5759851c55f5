// Which chunks are written down next, over several size classes, levels and queues.
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "tests/directory_pool.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// A pool of memory over files, with chunks of several sizes: one chain of one chunk for each number.
struct SizesOverFiles {
  SizesOverFiles(uint64_t capacity, const std::vector<uint64_t>& sizes, uint32_t max_chunks, PolicyKind policy = PolicyKind::LRU)
      : memory(capacity, 2 * max_chunks, true, 64 << 20, policy),
        file_geometry(*DirectoryGeometry::plan_files(1 << 20, 512, max_chunks)),
        files(nullptr, nullptr, file_geometry, nullptr, Tier::SSD),
        set({&memory.directory, &files}) {
    static_cast<void>(files.add_namespace());
    for (uint32_t segment = 0; segment < file_geometry.arena.segments; ++segment) {
      files.mark_segment_ready(segment);
    }
    for (const uint64_t size : sizes) {
      in_memory.push_back(*memory.directory.add_class(size, 1));
      in_files.push_back(*files.add_class(size + PAGE_BYTES, 1));
    }
  }

  bool store(size_t size, uint64_t id, uint8_t priority = DEFAULT_PRIORITY) {
    const auto keys = pack({id});
    const Reservation made =
        memory.directory.reserve(memory.owner, in_memory[size], std::nullopt, keys.data(), 1, ++memory.now);
    if (made.id == 0) {
      return false;
    }
    const uint32_t checksum = 0;
    static_cast<void>(memory.directory.commit(made.id, 0, 1, &checksum, memory.now));
    static_cast<void>(memory.directory.retention().retain(memory.owner, keys.data(), {{priority, 0}}, memory.now));
    return memory.directory.end_reservation(made.id, memory.now);
  }

  // Writes what is next; its size and number, as `store` got them.
  std::optional<std::pair<size_t, uint64_t>> demote(WriteOrder order = WriteOrder::COLDEST) {
    const Hold pin = memory.directory.pin_unsaved(512, order);
    if (pin.id == 0) {
      return std::nullopt;
    }
    const ChunkKey key = *memory.directory.holds().key_of(pin.id, 0);
    const ChunkRecord& record = memory.directory.record(*memory.directory.holds().record_of(pin.id, 0));
    const auto size = static_cast<size_t>(
        std::find(in_memory.begin(), in_memory.end(), record.size_class) - in_memory.begin());
    const Reservation made = files.reserve(memory.owner, in_files[size], std::nullopt,
                                           reinterpret_cast<const uint8_t*>(key.words), 1, memory.now);
    const uint32_t checksum = 0;
    EXPECT(made.id != 0);
    EXPECT(all_are(files.commit(made.id, 0, 1, &checksum), SaveState::STORED));
    EXPECT(files.end_reservation(made.id, memory.now));
    EXPECT(memory.directory.unpin(pin.id));
    return std::pair(size, key.words[1]);
  }

  Pool memory;
  DirectoryGeometry file_geometry;
  Directory files;
  TierSet set;
  std::vector<ClassId> in_memory;
  std::vector<ClassId> in_files;
};

// Bytes written of chunks of two sizes, of which as many bytes come, to a disk that takes half of them.
std::array<uint64_t, 2> shares(PolicyKind policy, bool newest_first, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<uint64_t> sizes{4 * PAGE_BYTES, 16 * PAGE_BYTES};
  SizesOverFiles tiers(1600 * PAGE_BYTES, sizes, 20'000, policy);
  std::array<uint64_t, 2> written{};
  int64_t budget = 0;
  for (uint64_t id = 1; id < 40'000; ++id) {
    if (random() % 5 == 0) {
      EXPECT(tiers.store(random() % 5 == 0 ? 1 : 0, id));  // 32 pages with every 25 numbers
    }
    for (budget += static_cast<int64_t>(PAGE_BYTES * 16 / 25); budget > 0;) {
      const auto demoted = tiers.demote(newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST);
      if (!demoted) {
        break;
      }
      written[demoted->first] += sizes[demoted->first];
      budget -= static_cast<int64_t>(sizes[demoted->first]);
    }
  }
  EXPECT(tiers.memory.is_sound());
  return written;
}

bool are_alike(const std::array<uint64_t, 2>& written) {
  std::printf("  %llu and %llu bytes\n", static_cast<unsigned long long>(written[0]),
              static_cast<unsigned long long>(written[1]));
  const auto half = static_cast<double>(written[0] + written[1]) / 2;
  return half > 0 && static_cast<double>(written[0]) > 0.9 * half && static_cast<double>(written[1]) > 0.9 * half;
}

// Microseconds for a look for the next chunk to write, the quickest of some, with so many classes and priorities in use.
double look_us(uint32_t classes, uint32_t priorities, bool newest_first) {
  std::vector<uint64_t> sizes;
  for (uint32_t number = 0; number < classes; ++number) {
    sizes.push_back((number + 1) * PAGE_BYTES);
  }
  SizesOverFiles tiers(uint64_t{classes} * 101 * (classes + 1) * PAGE_BYTES, sizes, 20'000, PolicyKind::CLASS_QUEUES);
  tiers.memory.directory.retention().ledger().cap(1);
  uint64_t id = 0;
  for (uint32_t number = 0; number < 100 * classes; ++number) {
    EXPECT(tiers.store(number % classes, ++id, static_cast<uint8_t>(number / classes % priorities)));
  }
  double quickest = std::numeric_limits<double>::max();
  for (uint32_t step = 0; step < 50; ++step) {
    EXPECT(tiers.store(step % classes, ++id, 50));
    const auto begin = std::chrono::steady_clock::now();
    const Hold pin = tiers.memory.directory.pin_unsaved(512, newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST);
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    EXPECT(pin.id != 0);
    EXPECT(tiers.memory.directory.unpin(pin.id));
    quickest = std::min(quickest, taken.count());
  }
  std::printf("  %u classes, %u priorities, %s first: %.1f us\n", classes, priorities, newest_first ? "newest" : "coldest", quickest);
  return quickest;
}

}  // namespace

TEST(chunks_of_all_sizes_are_written_in_the_order_in_which_they_would_go) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (const WriteOrder order : {WriteOrder::COLDEST, WriteOrder::NEWEST, WriteOrder::WORTHIEST}) {
    SizesOverFiles tiers(6000 * PAGE_BYTES, {PAGE_BYTES, 3 * PAGE_BYTES, 7 * PAGE_BYTES}, 1000);
    tiers.memory.directory.retention().ledger().cap(1);
    std::map<std::pair<uint64_t, uint64_t>, uint64_t> waiting;  // (priority or 0, time), from the last on or not -> number
    uint64_t last = 0;
    for (int step = 0; step < 600; ++step) {
      if (waiting.size() < 150 && random() % 3 != 0) {
        const auto priority = static_cast<uint8_t>(random() % 101);
        const size_t size = random() % 3;
        EXPECT(tiers.store(size, ++last, priority));
        waiting[order == WriteOrder::COLDEST  ? std::pair{uint64_t{priority}, last}
                : order == WriteOrder::NEWEST ? std::pair{uint64_t{0}, ~last}
                                              : std::pair{~uint64_t{priority}, ~last}] = last;
      } else {
        const auto demoted = tiers.demote(order);
        EXPECT(demoted.has_value() == !waiting.empty());
        EXPECT(!demoted || demoted->second == waiting.begin()->second);
        if (!waiting.empty()) {
          waiting.erase(waiting.begin());
        }
      }
      EXPECT(tiers.memory.directory.count_unsaved() == waiting.size());
    }
    EXPECT(tiers.memory.is_sound());
  }
}

TEST(models_with_the_same_traffic_get_the_same_share_of_a_disk_that_is_too_slow_for_both) {
  const uint64_t seed = kvpool::testing::seed();
  for (const PolicyKind policy : {PolicyKind::LRU, PolicyKind::CLASS_QUEUES}) {
    EXPECT(are_alike(shares(policy, false, seed)));
    EXPECT(are_alike(shares(policy, true, seed)));
  }
}

TEST(chunks_refused_by_the_lower_tier_are_not_examined_again_at_each_arrival) {
  SizesOverFiles tiers(3000 * PAGE_BYTES, {PAGE_BYTES}, 3000);
  uint64_t id = 0;
  while (id < 2000) {
    EXPECT(tiers.store(0, ++id));
  }
  tiers.memory.directory.demotion().admit(Admitted::USED_AGAIN);
  const auto look_ns = [&] {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT(tiers.memory.directory.pin_unsaved(512, WriteOrder::COLDEST).id == 0);
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
  };
  const double first_ns = look_ns();
  double next_ns = first_ns;
  for (int step = 0; step < 100; ++step) {
    next_ns = std::min(next_ns, look_ns());
  }
  EXPECT_TIME(next_ns < first_ns / 4);
  // What is worth a place is found as soon as there is any of it.
  tiers.memory.directory.demotion().admit(Admitted::ALL);
  EXPECT(tiers.demote().has_value());
  EXPECT(tiers.memory.is_sound());
}

TEST(a_chain_is_written_from_its_root_whatever_end_is_looked_at_first) {
  for (const bool newest_first : {false, true}) {
    SizesOverFiles tiers(100 * CHUNK, {PAGE_BYTES}, 100);
    EXPECT(tiers.memory.store(range(1, 10)) == 10);
    const Hold pin = tiers.memory.directory.pin_unsaved(512, newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST);
    EXPECT(pin.chunks == 10);
    EXPECT(tiers.memory.directory.holds().key_of(pin.id, 0) == key_of(1));
    // What follows chunks that are being written waits for them.
    EXPECT(tiers.memory.store(range(11, 2), 10) == 2);
    EXPECT(tiers.memory.directory.pin_unsaved(512, newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST).id == 0);
    EXPECT(tiers.memory.store({21}) == 1);
    const Hold other = tiers.memory.directory.pin_unsaved(512, newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST);
    EXPECT(other.chunks == 1);
    EXPECT(tiers.memory.directory.unpin(other.id));
    EXPECT(tiers.memory.directory.unpin(pin.id));
    EXPECT(tiers.memory.is_sound());
  }
}

TIMED_TEST(the_next_chunk_is_found_with_many_classes_and_priorities_as_with_few) {
  for (const bool newest_first : {false, true}) {
    const double many_us = look_us(60, 101, newest_first);
    const double few_us = look_us(2, 1, newest_first);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // whose own work rules the time
    EXPECT_TIME(many_us < 20 * few_us + 20);
#else
    static_cast<void>(many_us);
    static_cast<void>(few_us);
#endif
  }
}
