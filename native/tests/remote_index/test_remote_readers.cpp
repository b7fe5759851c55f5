// Readers of the remote index: beside its writer, in front of headers that are wrong, and of tables of any content.
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "tests/harness.h"
#include "tests/remote_index/remote_table.h"

using namespace kvpool;
using kvpool::testing::remote_key;
using kvpool::testing::RemoteTable;

TEST(a_reader_refuses_other_regions_and_sizes) {
  RemoteTable table(64);
  EXPECT(table.reader->epoch() == std::string("\7\7\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16));
  EXPECT(RemoteView::attach(nullptr) == nullptr);
  // Cut off behind any of its pages.
  for (uint64_t size = PAGE_BYTES; size < remote_bytes(64); size += PAGE_BYTES) {
    EXPECT(RemoteView::attach(Mapping::attach(table.mapping->fd(), size, false).mapping) == nullptr);
  }
  auto* const header = reinterpret_cast<RemoteHeader*>(table.mapping->data());
  const RemoteHeader good = *header;
  const auto is_refused = [&](auto change) {
    change(*header);
    const bool refused = RemoteView::attach(table.mapping) == nullptr;
    std::memcpy(static_cast<void*>(header), &good, sizeof(good));
    return refused;
  };
  EXPECT(!is_refused([](RemoteHeader&) {}));
  EXPECT(is_refused([](RemoteHeader& one) { one.magic[0] = 'X'; }));
  EXPECT(is_refused([](RemoteHeader& one) { ++one.version; }));
  EXPECT(is_refused([](RemoteHeader& one) { one.version = 0; }));
  for (const uint64_t buckets : {uint64_t{0}, uint64_t{1}, uint64_t{65}, MAX_REMOTE_BUCKETS, MAX_REMOTE_BUCKETS + 1,
                                 uint64_t{1} << 58, UINT64_MAX}) {
    EXPECT(is_refused([buckets](RemoteHeader& one) { one.buckets = buckets; }));
  }
}

TEST(a_reader_sees_the_pace_of_the_fastest_live_owner) {
  RemoteTable table(64);
  const auto pace_of = [&](const ChunkKey& key) { return table.reader->pace_of(table.reader->place_of(key)); };
  const RemoteOwner slow = *table.index.add_owner();
  const RemoteOwner fast = *table.index.add_owner();
  const RemoteOwner unknown = *table.index.add_owner();
  const ChunkKey key = remote_key(1);
  EXPECT(pace_of(key) == RemotePace{});
  table.insert(unknown, key);
  EXPECT(pace_of(key) == RemotePace{});
  table.index.set_pace(slow, {20, 5000});
  table.index.set_pace(fast, {UINT32_MAX, 1000});
  table.insert(slow, key);
  EXPECT((pace_of(key) == RemotePace{20, 5000}));
  table.insert(fast, key);
  EXPECT((pace_of(key) == RemotePace{UINT32_MAX, 1000}));
  EXPECT(pace_of(remote_key(2)) == RemotePace{});
  table.index.retire(fast);
  EXPECT((pace_of(key) == RemotePace{20, 5000}));
  // An owner that gets the number of a former one has no pace of its own yet.
  table.index.retire(slow);
  table.index.sweep(64);
  RemoteOwner next = 0;
  while (next != slow) {
    next = *table.index.add_owner();
    table.insert(next, key);
    EXPECT(next != slow || pace_of(key) == RemotePace{});
    table.index.retire(next);
    table.index.sweep(64);
  }
}

// What a header says after a reader has read it moves no reader.
TEST(a_reader_of_any_content_answers_and_reads_nothing_outside) {
  std::mt19937_64 random(kvpool::testing::seed());
  RemoteTable table(64);
  uint64_t found = 0;
  for (int round = 0; round < 200; ++round) {
    for (uint64_t at = 0; at < table.mapping->size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(table.mapping->data() + at, &word, sizeof(word));
    }
    for (uint64_t id = 0; id < 100; ++id) {
      // Half of them have the tag of an entry in one of their buckets.
      RemotePlace place = table.reader->place_of(remote_key(random()));
      const auto* bucket = reinterpret_cast<const RemoteBucket*>(table.mapping->data() + PAGE_BYTES) + place.buckets[id % 2];
      place.tag = id % 4 < 2 ? bucket->entries[id % 8] >> TAG_SHIFT << TAG_SHIFT : place.tag;
      found += table.reader->has(place) ? 1U : 0U;
      static_cast<void>(table.reader->pace_of(place));
    }
  }
  EXPECT(found > 0);
}

// One writer inserts, removes, renews and ends owners beside keys that stay; readers always find these, and never what was never
// there.
TEST(readers_never_miss_a_stable_chunk_nor_find_an_unknown_one) {
  constexpr uint64_t STABLE = 400, CHANGING = 2000;
  RemoteTable table(1024);
  const RemoteOwner steady = *table.index.add_owner();
  RemoteOwner brief = *table.index.add_owner();
  for (uint64_t id = 0; id < STABLE; ++id) {
    table.insert(steady, remote_key(id));
  }
  const uint64_t seed = kvpool::testing::seed();
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> missed{0}, wrong{0}, looks{0}, changing{0};
  std::vector<std::thread> readers;
  for (uint64_t thread = 0; thread < 2; ++thread) {
    readers.emplace_back([&, thread] {
      std::mt19937_64 pick(seed + thread + 1);
      while (!is_over.load(std::memory_order_relaxed)) {
        missed += table.has(remote_key(pick() % STABLE)) ? 0U : 1U;
        wrong += table.has(remote_key(1'000'000 + pick() % 1000)) ? 1U : 0U;
        changing += table.has(remote_key(STABLE + pick() % CHANGING)) ? 1U : 0U;
        ++looks;
      }
    });
  }
  std::mt19937_64 random(seed);
  for (uint64_t round = 0; round < 20'000 || looks < 1000; ++round) {
    const ChunkKey key = remote_key(STABLE + random() % CHANGING);
    random() % 3 != 0 ? table.insert(brief, key) : table.remove(brief, key);
    if (round % 8 == 0) {
      table.insert(steady, remote_key(random() % STABLE));  // renewed
    }
    if (round % 2000 == 0) {
      table.index.retire(brief);
      brief = *table.index.add_owner();
      static_cast<void>(table.index.sweep(100));
    }
  }
  is_over = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT(missed == 0);
  EXPECT(wrong == 0);
  EXPECT(changing > 0);
  EXPECT(table.index.evicted() == 0);
  EXPECT(table.index.verify().empty());
}
