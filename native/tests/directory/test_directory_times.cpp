// What the directory counts for operators: why chunks were evicted, how long they lived, how long until they were reused.
#include <numeric>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND = 1'000'000'000;

uint64_t total(const TimeHistogram& times) {
  return std::accumulate(times.counts().begin(), times.counts().end(), uint64_t{0});
}

// Stores one chain at a time of the caller's choice.
void store_at(Pool& pool, const std::vector<uint64_t>& ids, uint64_t now_ns) {
  pool.now = now_ns - 1;
  const Reservation made = pool.reserve(ids);
  const std::vector<uint32_t> sums(ids.size() * EXTENTS);
  const auto states = pool.directory.commit(made.id, 0, ids.size(), sums.data(), now_ns);
  EXPECT(all_are(states, SaveState::STORED));
  EXPECT(pool.directory.end_reservation(made.id, now_ns));
}

}  // namespace

TEST(buckets_are_powers_of_two_of_a_second_inclusive) {
  TimeHistogram times;
  for (const uint64_t ns : {uint64_t{0}, SECOND, SECOND + 1, 2 * SECOND, 2 * SECOND + 1, 4 * SECOND}) {
    times.add(ns);
  }
  EXPECT(times.counts()[0] == 2);
  EXPECT(times.counts()[1] == 2);
  EXPECT(times.counts()[2] == 2);
  times.add((uint64_t{1} << 22) * SECOND);
  EXPECT(times.counts()[22] == 1);
  times.add((uint64_t{1} << 22) * SECOND + 1);
  times.add(UINT64_MAX);
  EXPECT(times.counts()[23] == 2);
}

TEST(sum_is_right_to_a_millisecond_for_each_time) {
  TimeHistogram times;
  for (int count = 0; count < 1000; ++count) {
    times.add(100 * SECOND);
  }
  EXPECT(times.sum_s() <= 100'000.0);
  EXPECT(times.sum_s() > 100'000.0 - 1000 * 0.0011);
}

TEST(reuse_gap_counts_from_the_last_access) {
  Pool pool(20 * CHUNK);
  store_at(pool, {1, 2, 3}, 10 * SECOND);
  const auto keys = pack({1, 2, 3});
  const Hold first = pool.directory.acquire(pool.owner, keys.data(), 3, 16 * SECOND);
  EXPECT(pool.directory.stats().reuse_gaps.counts()[3] == 3);  // 6 s: in (4, 8]
  const Hold second = pool.directory.acquire(pool.owner, keys.data(), 2, 1000 * SECOND);
  EXPECT(pool.directory.stats().reuse_gaps.counts()[0] == 2);  // held: in use
  EXPECT(pool.directory.release(first.id, 1000 * SECOND));
  EXPECT(pool.directory.release(second.id, 1000 * SECOND));
  EXPECT(pool.directory.acquire(pool.owner, keys.data(), 1, 1001 * SECOND).chunks == 1);
  EXPECT(pool.directory.stats().reuse_gaps.counts()[0] == 3);  // 1 s after the release
  EXPECT(total(pool.directory.stats().reuse_gaps) == 6);
  EXPECT(pool.directory.acquire(pool.owner, keys.data(), 3, 1 * SECOND).chunks == 3);
  EXPECT(total(pool.directory.stats().reuse_gaps) == 9);  // a clock that steps back counts as no time
  EXPECT(pool.is_sound());
}

TEST(a_miss_does_not_count_as_reuse) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.acquire({1, 2}).id == 0);
  EXPECT(total(pool.directory.stats().reuse_gaps) == 0);
}

TEST(eviction_names_its_reason_and_the_age) {
  Pool pool(64 * CHUNK, 1000, true, 8 * CHUNK);
  const ClassId large = *pool.directory.add_class(8 * CHUNK, EXTENTS);
  store_at(pool, range(100, 64), 10 * SECOND);
  store_at(pool, {1, 2}, 40 * SECOND);
  DirectoryStats stats = pool.directory.stats();
  EXPECT(stats.evictions[static_cast<size_t>(Eviction::OWN_CLASS)] == 2);
  EXPECT(stats.lifetimes.counts()[5] == 2);  // 30 s: in (16, 32]
  EXPECT(stats.lifetimes.sum_s() > 59.0 && stats.lifetimes.sum_s() < 61.0);
  const auto keys = pack({9000});
  const Reservation made = pool.directory.reserve(pool.owner, large, std::nullopt, keys.data(), 1, 50 * SECOND);
  EXPECT(all_are(made.states, SaveState::RESERVED));
  stats = pool.directory.stats();
  EXPECT(stats.evictions[static_cast<size_t>(Eviction::OTHER_CLASS)] >= 6);
  EXPECT(stats.evictions[static_cast<size_t>(Eviction::INDEX_FULL)] == 0);
  EXPECT(total(stats.lifetimes) == stats.evicted_chunks);
  EXPECT(pool.directory.end_reservation(made.id, 50 * SECOND));
  EXPECT(pool.is_sound());
}

TEST(a_full_index_is_a_reason_of_its_own) {
  Pool pool(100 * CHUNK, 5);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(pool.store({11, 12, 13}) == 3);
  EXPECT(pool.directory.stats().evictions[static_cast<size_t>(Eviction::INDEX_FULL)] == 1);
  EXPECT(pool.directory.stats().evicted_chunks == 1);
  EXPECT(pool.is_sound());
}

TEST(flush_and_drop_are_no_evictions) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(drop(pool.directory, key_of(3)) == 1);
  EXPECT(flush(pool.directory, std::nullopt, UINT64_MAX).chunks == 2);
  EXPECT(total(pool.directory.stats().lifetimes) == 0);
  EXPECT(pool.directory.stats().evicted_chunks == 0);
}

TEST(age_survives_the_wrap_of_its_ticks) {
  ChunkRecord record;
  const uint64_t late_ns = (uint64_t{UINT32_MAX} << TICK_SHIFT) + 1;
  record.stored_tick = tick_of(late_ns);
  EXPECT(age_ns(record, late_ns) == 0);
  EXPECT(age_ns(record, late_ns + 100 * SECOND) / SECOND == 99 || age_ns(record, late_ns + 100 * SECOND) / SECOND == 100);
}

TEST(lent_slots_follow_the_runs) {
  Pool pool(64 * CHUNK, 1000, true, 8 * CHUNK);
  EXPECT(pool.directory.arena().lent_slots(pool.small) == 0);
  EXPECT(pool.store({1}) == 1);
  EXPECT(pool.directory.arena().lent_slots(pool.small) == 8);
  EXPECT(flush(pool.directory, std::nullopt, UINT64_MAX).chunks == 1);
  EXPECT(pool.directory.arena().lent_slots(pool.small) == 0);
}
