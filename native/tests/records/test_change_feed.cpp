// The change feed: order, what a full one forgets, and that a reader who adds up changes knows what the directory has.
#include <poll.h>

#include <map>
#include <random>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

bool is_readable(const ChangeFeed& feed) {
  pollfd entry{feed.fd(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

std::vector<Change> take(ChangeFeed& feed, size_t limit, bool& has_gap) {
  std::vector<Change> rows(limit);
  rows.resize(feed.take(rows.data(), limit, has_gap));
  return rows;
}

Change numbered(uint32_t number) {
  Change change{};
  change.owner = number;
  return change;
}

// Keys and the tiers that have them, as `list` gives them page by page.
std::map<uint64_t, uint8_t> listed(const Directory& directory) {
  std::map<uint64_t, uint8_t> found;
  uint32_t cursor = 0;
  do {
    std::vector<Change> rows;
    cursor = directory.reports().list(cursor, 3, rows);
    for (const Change& row : rows) {
      found[row.key.words[1]] = row.tiers;
    }
  } while (cursor != 0);
  return found;
}

}  // namespace

TEST(a_full_feed_drops_its_oldest_and_reports_a_gap) {
  const auto feed = ChangeFeed::create(3);
  for (uint32_t number = 0; number < 5; ++number) {
    feed->add(numbered(number));
  }
  bool has_gap = false;
  EXPECT(feed->lost() == 2);
  const std::vector<Change> first = take(*feed, 2, has_gap);
  EXPECT(has_gap && first.size() == 2 && first[0].owner == 2 && first[1].owner == 3);
  feed->add(numbered(9));
  const std::vector<Change> rest = take(*feed, 5, has_gap);
  EXPECT(!has_gap && rest.size() == 2 && rest[0].owner == 4 && rest[1].owner == 9);
}

TEST(a_marked_gap_drops_the_waiting_changes) {
  const auto feed = ChangeFeed::create(8);
  feed->add(numbered(1));
  feed->mark_gap();
  feed->add(numbered(2));
  bool has_gap = false;
  const std::vector<Change> rows = take(*feed, 8, has_gap);
  EXPECT(has_gap && rows.size() == 1 && rows[0].owner == 2 && feed->lost() == 1);
}

TEST(the_descriptor_is_readable_while_nobody_has_taken) {
  const auto feed = ChangeFeed::create(8);
  bool has_gap = false;
  EXPECT(!is_readable(*feed));
  feed->add(numbered(1));
  feed->add(numbered(2));
  EXPECT(is_readable(*feed));
  EXPECT(take(*feed, 1, has_gap).size() == 1);
  EXPECT(!is_readable(*feed) && feed->waiting() == 1);
  feed->mark_gap();
  EXPECT(is_readable(*feed));
}

TEST(every_departure_has_its_reason) {
  Pool pool(4 * CHUNK);
  const auto feed = ChangeFeed::create(64);
  pool.directory.reports().report_to(feed);
  bool has_gap = false;
  EXPECT(pool.store(range(0, 2)) == 2);
  const std::vector<Change> stored = take(*feed, 9, has_gap);
  EXPECT(stored.size() == 2 && stored[0].kind == ChangeKind::ARRIVED && stored[0].cause == Cause::STORED);
  EXPECT(stored[0].parent == ChunkKey{} && stored[1].parent == key_of(0) && stored[1].tiers == tier_bit(Tier::DRAM));
  EXPECT(pool.store(range(10, 4)) == 4);
  const std::vector<Change> evicted = take(*feed, 2, has_gap);
  EXPECT(evicted.size() == 2 && evicted[0].kind == ChangeKind::LEFT && evicted[0].key == key_of(1));
  EXPECT(evicted[0].parent == key_of(0) && evicted[0].cause == Cause::OWN_CLASS && evicted[0].tiers == 0);
  EXPECT(take(*feed, 9, has_gap).size() == 4);
  EXPECT(drop(pool.directory, key_of(13)) == 1 && pool.directory.discard(key_of(12)) == 1);
  static_cast<void>(flush(pool.directory, std::nullopt, pool.now + 1));
  const std::vector<Change> gone = take(*feed, 9, has_gap);
  EXPECT(gone.size() == 4 && gone[0].cause == Cause::DROPPED && gone[1].cause == Cause::DISCARDED);
  EXPECT(gone[3].cause == Cause::FLUSHED && gone[3].key == key_of(10));
}

TEST(a_save_that_is_given_up_is_no_change) {
  Pool pool(4 * CHUNK);
  const auto feed = ChangeFeed::create(64);
  pool.directory.reports().report_to(feed);
  const Reservation made = pool.reserve(range(0, 3));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(feed->waiting() == 0);
}

TEST(the_sum_of_all_changes_is_what_is_stored) {
  Pool pool(12 * CHUNK);
  const auto feed = ChangeFeed::create(256);
  pool.directory.reports().report_to(feed);
  std::mt19937_64 random(seed());
  std::map<uint64_t, uint8_t> known;
  for (int step = 0; step < 2000; ++step) {
    const uint64_t family = random() % 6 * 100;
    if (random() % 8 == 0) {
      static_cast<void>(drop(pool.directory, key_of(family + random() % 6)));
    } else if (random() % 40 == 0) {
      static_cast<void>(flush(pool.directory, std::nullopt, pool.now - pool.now / 8));
    } else {
      static_cast<void>(pool.store(range(family, 1 + random() % 6)));
    }
    bool has_gap = false;
    for (const Change& change : take(*feed, 256, has_gap)) {
      EXPECT(!has_gap);
      if (change.kind == ChangeKind::LEFT) {
        EXPECT(change.tiers == 0 && known.erase(change.key.words[1]) == 1);
      } else {
        EXPECT(change.parent == ChunkKey{} || known.count(change.parent.words[1]) == 1);
        EXPECT(known.emplace(change.key.words[1], change.tiers).second);
      }
    }
    EXPECT(known == listed(pool.directory));
  }
  EXPECT(pool.is_sound());
}
