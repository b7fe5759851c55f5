// Retention: levels of priority, durations on a clock of the test's own, the cap, and both tiers.
#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "retention/retention_timers.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND = 1'000'000'000;
constexpr uint8_t ACCEPTED = static_cast<uint8_t>(RetainState::ACCEPTED);
constexpr uint8_t CLIPPED = static_cast<uint8_t>(RetainState::CLIPPED);
constexpr uint8_t ABSENT = static_cast<uint8_t>(RetainState::ABSENT);

std::vector<uint8_t> retain(Pool& pool, const std::vector<uint64_t>& ids, Retention retention) {
  return pool.directory.retention().retain(pool.owner, pack(ids).data(), std::vector<Retention>(ids.size(), retention), ++pool.now);
}

// Of the chunks, those that are still stored.
std::vector<uint64_t> stored(Pool& pool, const std::vector<uint64_t>& ids) {
  std::vector<uint64_t> found;
  for (const uint64_t id : ids) {
    if (pool.view->find(key_of(id))) {
      found.push_back(id);
    }
  }
  return found;
}

bool touch(Pool& pool, const std::vector<uint64_t>& ids, uint64_t now_ns) {
  pool.now = now_ns;
  const Hold hold = pool.directory.acquire(pool.owner, pack(ids).data(), ids.size(), now_ns);
  return hold.chunks == ids.size() && pool.directory.release(hold.id, now_ns);
}

}  // namespace

TEST(the_lowest_priority_goes_first_and_the_highest_only_when_nothing_else_can) {
  Pool pool(4 * CHUNK);
  pool.directory.retention().ledger().cap(1.0);
  for (uint64_t id = 1; id <= 4; ++id) {
    EXPECT(pool.store({id}) == 1);
  }
  EXPECT(retain(pool, {1}, {100, 0})[0] == ACCEPTED);
  EXPECT(retain(pool, {2}, {36, 0})[0] == ACCEPTED);
  EXPECT(retain(pool, {4}, {0, 0})[0] == ACCEPTED);
  EXPECT(retain(pool, {5}, {100, 0})[0] == ABSENT);
  EXPECT(pool.is_sound());
  const std::vector<std::vector<uint64_t>> expected = {{1, 2, 3}, {1, 2}, {1}, {}};
  for (uint64_t round = 0; round < 4; ++round) {
    const uint64_t fresh = 11 + round;
    EXPECT(pool.store({fresh}) == 1);
    EXPECT(retain(pool, {fresh}, {100, 0})[0] == ACCEPTED);
    EXPECT(stored(pool, {1, 2, 3, 4}) == expected[round]);
    EXPECT(pool.is_sound());
  }
  EXPECT(pool.directory.stats().evicted_chunks == 4);
}

// The first worked example of TensorRT-LLM's post on retention: a request that will not come again.
TEST(a_one_off_request_of_priority_zero_goes_before_everything_older) {
  Pool pool(10 * CHUNK);
  EXPECT(pool.store(range(1, 4)) == 4);
  EXPECT(pool.store(range(101, 4)) == 4);
  EXPECT(retain(pool, range(101, 4), {0, 0}) == std::vector<uint8_t>(4, ACCEPTED));
  EXPECT(pool.store(range(201, 6)) == 6);
  EXPECT(pool.lookup(range(1, 4)) == 4);
  EXPECT(pool.lookup(range(101, 4)) == 0);
  EXPECT(pool.is_sound());
}

// The second: a system prompt of 1000 tokens at the highest priority. In chunks of 256 tokens its range touches four.
TEST(a_system_prompt_of_the_highest_priority_stays_under_any_traffic) {
  for (const PolicyKind policy : {PolicyKind::LRU, PolicyKind::CLASS_QUEUES}) {
    Pool pool(16 * CHUNK, 1000, true, 64 << 20, policy);
    const std::vector<uint64_t> prompt = range(1, 4);
    EXPECT(pool.store(prompt) == 4);
    EXPECT(retain(pool, prompt, {100, 0}) == std::vector<uint8_t>(4, ACCEPTED));
    for (uint64_t request = 0; request < 300; ++request) {
      const std::vector<uint64_t> fresh = range(1000 * (request + 1), 3 + request % 6);
      EXPECT(pool.store(fresh, request % 2 == 0 ? std::optional<uint64_t>(4) : std::nullopt) == fresh.size());
      EXPECT(pool.lookup(prompt) == 4);
    }
    EXPECT(pool.is_sound());
    EXPECT(pool.directory.stats().retention.bytes == 4 * CHUNK);
  }
}

// The third: the context is wanted for 30 s after its last use, what was decoded for 10 s.
TEST(context_is_retained_for_thirty_seconds_and_decoded_tokens_for_ten) {
  const auto store_conversation = [](Pool& pool) {
    pool.directory.retention().ledger().cap(1.0);
    pool.now = 100 * SECOND;
    EXPECT(pool.store(range(1, 3)) == 3);
    EXPECT(pool.store(range(4, 2), 3) == 2);
    EXPECT(retain(pool, range(1, 3), {80, 30'000}) == std::vector<uint8_t>(3, ACCEPTED));
    EXPECT(retain(pool, range(4, 2), {60, 10'000}) == std::vector<uint8_t>(2, ACCEPTED));
    pool.now = 101 * SECOND;
    EXPECT(pool.store(range(11, 3)) == 3);  // of the default priority, and newer
  };
  const auto left_after = [&](uint64_t seconds, uint64_t wanted) {
    Pool pool(8 * CHUNK);
    store_conversation(pool);
    pool.now = 100 * SECOND + seconds * SECOND;
    EXPECT(pool.store(range(21, wanted)) == wanted);
    EXPECT(pool.is_sound());
    return stored(pool, {1, 2, 3, 4, 5, 11, 12, 13});
  };
  EXPECT(left_after(9, 3) == std::vector<uint64_t>({1, 2, 3, 4, 5}));
  EXPECT(left_after(11, 2) == std::vector<uint64_t>({1, 2, 3, 11, 12, 13}));  // older than what is of the same priority now
  EXPECT(left_after(29, 5) == std::vector<uint64_t>({1, 2, 3}));
  EXPECT(left_after(31, 5) == std::vector<uint64_t>({11, 12, 13}));
}

TEST(duration_runs_from_the_last_use) {
  Pool pool(4 * CHUNK);
  pool.directory.retention().ledger().cap(1.0);
  pool.now = 10 * SECOND;
  EXPECT(pool.store({1}) == 1);
  EXPECT(retain(pool, {1}, {80, 30'000})[0] == ACCEPTED);
  EXPECT(touch(pool, {1}, 35 * SECOND));
  pool.directory.retention().expire_due(60 * SECOND);
  EXPECT(pool.directory.retention().of(key_of(1)) == (Retention{80, 30'000}));
  const Hold hold = pool.acquire({1});
  pool.directory.retention().expire_due(500 * SECOND);  // in use all the while
  EXPECT(pool.directory.retention().of(key_of(1)) == (Retention{80, 30'000}));
  EXPECT(pool.directory.release(hold.id, 500 * SECOND));
  pool.directory.retention().expire_due(529 * SECOND);
  EXPECT(pool.directory.stats().retention.expired == 0);
  pool.directory.retention().expire_due(531 * SECOND);
  EXPECT(pool.directory.retention().of(key_of(1)) == Retention{});
  EXPECT(pool.directory.stats().retention.expired == 1);
  EXPECT(pool.directory.stats().retention.bytes == 0);
  EXPECT(!pool.directory.retention().of(key_of(2)));
  EXPECT(pool.is_sound());
}

TEST(a_parent_is_worth_as_much_as_what_follows_it) {
  for (const PolicyKind policy : {PolicyKind::LRU, PolicyKind::CLASS_QUEUES}) {
    Pool pool(6 * CHUNK, 1000, true, 64 << 20, policy);
    pool.directory.retention().ledger().cap(1.0);
    EXPECT(pool.store({1, 2, 3}) == 3);
    EXPECT(retain(pool, {1, 2, 3}, {0, 0}) == std::vector<uint8_t>(3, ACCEPTED));
    EXPECT(retain(pool, {3}, {90, 0})[0] == ACCEPTED);
    EXPECT(pool.directory.stats().retention.chunks == 3);
    EXPECT(pool.store({11, 12, 13}) == 3);
    EXPECT(pool.store({21, 22}) == 2);
    EXPECT(pool.lookup({1, 2, 3}) == 3);
    EXPECT(pool.lookup({11, 12}) == 1);
    EXPECT(retain(pool, {3}, {35, 0})[0] == ACCEPTED);  // then its ancestors are worth nothing once it has gone
    EXPECT(pool.directory.stats().retention.chunks == 0);
    EXPECT(pool.is_sound());
    EXPECT(pool.store(range(31, 5)) == 5);
    EXPECT(pool.lookup({1}) == 0);
    EXPECT(pool.is_sound());
  }
}

// Tens of times what it takes, and a tenth of what it takes where each chunk is moved past each other.
TEST(a_long_chain_of_another_priority_goes_leaf_first_without_delay) {
  constexpr uint64_t LENGTH = 8000;
  for (const PolicyKind policy : {PolicyKind::LRU, PolicyKind::CLASS_QUEUES}) {
    for (const bool is_root_first : {true, false}) {
      Pool pool(LENGTH * CHUNK, 2 * LENGTH, true, 64 << 20, policy);
      std::vector<uint64_t> ids = range(1, LENGTH);
      EXPECT(pool.store(ids) == LENGTH);
      if (!is_root_first) {
        std::reverse(ids.begin(), ids.end());
      }
      EXPECT(retain(pool, ids, {20, 0}) == std::vector<uint8_t>(LENGTH, ACCEPTED));
      const auto before = std::chrono::steady_clock::now();
      EXPECT(pool.store({LENGTH + 1}) == 1);
      EXPECT_TIME(std::chrono::steady_clock::now() - before < std::chrono::milliseconds(100));
      EXPECT(pool.lookup(range(1, LENGTH)) == LENGTH - 1);
      EXPECT(pool.is_sound());
    }
  }
}

TEST(retention_requests_whose_walks_find_nothing_share_one_bound) {
  constexpr uint64_t LENGTH = 8000;
  Pool pool(LENGTH * CHUNK, 2 * LENGTH);
  pool.directory.retention().ledger().cap(0.9);
  EXPECT(pool.store(range(1, LENGTH)) == LENGTH);
  const auto before = std::chrono::steady_clock::now();
  EXPECT(retain(pool, std::vector<uint64_t>(4096, LENGTH), {90, 0}) == std::vector<uint8_t>(4096, CLIPPED));
  EXPECT_TIME(std::chrono::steady_clock::now() - before < std::chrono::milliseconds(100));
  EXPECT(retain(pool, {LENGTH / 2}, {90, 0})[0] == ACCEPTED);  // the next call walks anew
  EXPECT(pool.is_sound());
}

TEST(retained_chunks_and_their_ancestors_take_no_more_than_the_share) {
  Pool pool(10 * CHUNK);
  pool.directory.retention().ledger().cap(0.3);
  EXPECT(pool.store({1, 2, 3, 4}) == 4);
  EXPECT(retain(pool, {4}, {90, 0})[0] == CLIPPED);  // with its ancestors it would be four tenths
  EXPECT(pool.directory.retention().of(key_of(4)) == Retention{});
  EXPECT(retain(pool, {3}, {90, 0})[0] == ACCEPTED);
  EXPECT(retain(pool, {2}, {100, 0})[0] == ACCEPTED);  // kept anyway
  EXPECT(pool.store({11}) == 1);
  EXPECT(retain(pool, {11}, {36, 0})[0] == CLIPPED);
  EXPECT(retain(pool, {11}, {20, 0})[0] == ACCEPTED);  // below the default there is no cap
  EXPECT(pool.directory.stats().retention.clipped == 2);
  EXPECT(pool.directory.stats().retention.bytes == 3 * CHUNK);
  EXPECT(drop(pool.directory, key_of(3)) == 2);
  EXPECT(pool.directory.stats().retention.chunks == 2);
  EXPECT(retain(pool, {11}, {36, 0})[0] == ACCEPTED);
  EXPECT(pool.is_sound());
}

TEST(a_chunk_being_written_can_be_retained_and_another_namespace_cannot) {
  Pool pool(10 * CHUNK);
  const Reservation made = pool.reserve({1, 2});
  EXPECT(retain(pool, {1, 2}, {50, 5'000}) == std::vector<uint8_t>(2, ACCEPTED));
  EXPECT(pool.commit(made, 0, 1)[0] == static_cast<uint8_t>(SaveState::STORED));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.retention().of(key_of(1)) == (Retention{50, 5'000}));
  EXPECT(pool.directory.stats().retention.chunks == 1);  // the other was given up
  const NamespaceId other = pool.directory.add_namespace();
  EXPECT(pool.directory.retention().retain(other, pack({1}).data(), {Retention{100, 0}}, ++pool.now)[0] == ABSENT);
  const Hold hold = pool.acquire({1});
  EXPECT(pool.directory.retention().of_hold(hold.id)->front() == (Retention{50, 5'000}));
  EXPECT(!pool.directory.retention().of_hold(hold.id + 1));
  EXPECT(pool.is_sound());
}

TEST(memory_of_another_size_class_is_not_taken_from_what_is_kept) {
  Pool pool(64 * CHUNK, 1000, true, 8 * CHUNK);
  const ClassId large = *pool.directory.add_class(8 * CHUNK, EXTENTS);
  const auto store_large = [&](uint64_t id) {
    const auto made = pool.directory.reserve(pool.owner, large, std::nullopt, pack({id}).data(), 1, ++pool.now);
    EXPECT(all_are(made.states, SaveState::RESERVED));
    EXPECT(pool.commit(made, 0, 1)[0] == 7);
    EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  };
  for (uint64_t id = 1; id <= 64; ++id) {
    EXPECT(pool.store({id}) == 1);
  }
  EXPECT(retain(pool, range(1, 8), {70, 0}) == std::vector<uint8_t>(8, ACCEPTED));  // the oldest
  for (uint64_t id = 101; id <= 130; ++id) {
    store_large(id);
    EXPECT(stored(pool, range(1, 8)).size() == 8);
    EXPECT(pool.is_sound());
  }
  EXPECT(stored(pool, range(9, 56)).empty());
}

TEST(retention_travels_into_the_lower_tier_and_back) {
  const auto geometry = *DirectoryGeometry::plan_files(8 * (CHUNK + PAGE_BYTES), 2, 100);
  Pool pool(4 * CHUNK);
  Directory files(nullptr, nullptr, geometry, nullptr, Tier::SSD);
  const TierSet set({&pool.directory, &files});
  EXPECT(files.add_namespace() == pool.owner);
  const ClassId in_files = *files.add_class(CHUNK + PAGE_BYTES, EXTENTS);
  files.mark_segment_ready(0);
  files.mark_segment_ready(1);
  EXPECT(pool.store({1, 2}) == 2);
  EXPECT(retain(pool, {1}, {60, 9'000})[0] == ACCEPTED);
  const auto below = files.reserve(pool.owner, in_files, std::nullopt, pack({1, 2}).data(), 2, ++pool.now);
  const std::vector<uint32_t> sums(2 * EXTENTS);
  EXPECT(all_are(files.commit(below.id, 0, 2, sums.data()), SaveState::STORED));
  EXPECT(files.end_reservation(below.id, ++pool.now));
  EXPECT(files.retention().of(key_of(1)) == Retention{});  // the lower tier learns it when the chunk is evicted, or by retain
  EXPECT(retain(pool, {2, 3}, {40, 0}) == std::vector<uint8_t>({CLIPPED, ABSENT}));  // three tenths of four chunks is one
  EXPECT(files.retention().of(key_of(2)) == (Retention{40, 0}));
  EXPECT(pool.store(range(11, 4)) == 4);
  EXPECT(pool.directory.stats().shed_chunks == 2);
  EXPECT(files.retention().of(key_of(1)) == (Retention{60, 9'000}));
  EXPECT(files.verify().empty());
  const auto made = pool.directory.promotions().promote(pool.owner, pool.small, std::nullopt, pack({1, 2}).data(), 2, ++pool.now);
  EXPECT(pool.directory.retention().of(key_of(1)) == (Retention{60, 9'000}));
  EXPECT(pool.directory.retention().of(key_of(2)) == Retention{});
  EXPECT(pool.directory.stats().retention.clipped == 2);
  EXPECT(pool.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(pool.directory.promotions().landed(key_of(2), made.generations[1]));
  EXPECT(pool.directory.release(made.id, ++pool.now));
  EXPECT(pool.is_sound());
  EXPECT(files.verify().empty());
}

TEST(restored_chunks_have_their_former_retention) {
  const auto geometry = *DirectoryGeometry::plan_files(8 * CHUNK, 2, 100);
  Directory files(nullptr, nullptr, geometry, nullptr, Tier::SSD);
  const NamespaceId owner = files.add_namespace();
  const ClassId in_files = *files.add_class(CHUNK, EXTENTS);
  files.mark_segment_ready(0);
  const uint64_t start = 1000 * SECOND;
  const uint32_t slot_pages = static_cast<uint32_t>(files.arena().size_class(in_files).slot_bytes / PAGE_BYTES);
  EXPECT(files.restore(owner, in_files, std::nullopt, key_of(1), PageIndex(0), 5, {70, 20'000}, start));
  EXPECT(files.restore(owner, in_files, key_of(1), key_of(2), PageIndex(slot_pages), 6, {0, 0}, start));
  files.finish_restore();
  EXPECT(files.verify().empty());
  EXPECT(files.retention().of(key_of(1)) == (Retention{70, 20'000}));
  EXPECT(files.retention().of(key_of(2)) == (Retention{0, 0}));
  files.retention().expire_due(start + 19 * SECOND);
  EXPECT(files.stats().retention.chunks == 1);
  files.retention().expire_due(start + 21 * SECOND);
  EXPECT(files.stats().retention.chunks == 0);
  EXPECT(files.verify().empty());
}

TEST(timers_are_handed_out_when_they_are_due_and_not_much_later) {
  const uint64_t seed = kvpool::testing::seed();
  std::mt19937_64 random(seed);
  ChunkRecords records(200);
  RetentionTimers timers(records);
  std::map<uint32_t, uint64_t> due;  // by record
  std::vector<RecordId> free;
  for (uint32_t number = 0; number < 200; ++number) {
    free.push_back(records.allocate());
    records[free.back()].duration_ms = 1;
  }
  constexpr uint64_t TICK = uint64_t{1} << TICK_SHIFT;
  uint64_t now = 5000 * SECOND;
  for (int step = 0; step < 20000; ++step) {
    now += random() % (uint64_t{1} << (random() % 45));  // steps of up to nine hours
    if (!free.empty() && random() % 2 == 0) {
      due[free.back().value()] = now + random() % (uint64_t{1} << (random() % 52));  // up to 52 days ahead
      timers.set(free.back(), due[free.back().value()], now);
      free.pop_back();
    } else if (!due.empty() && random() % 8 == 0) {
      timers.cancel(RecordId(due.begin()->first));
      free.push_back(RecordId(due.begin()->first));
      due.erase(due.begin());
    }
    for (RecordId id = timers.take_due(now); id.valid(); id = timers.take_due(now)) {
      if (due[id.value()] > now) {
        timers.set(id, due[id.value()], now);
        continue;
      }
      free.push_back(id);
      due.erase(id.value());
    }
    for (const auto& [id, at] : due) {
      EXPECT(at + 2 * TICK > now);
    }
    EXPECT(timers.size() == due.size());
  }
  EXPECT(timers.verify().empty());
}
