// What a verdict about bytes takes: the chunk in the generation that was read, and no other.
#include "tests/directory/directory_tiers.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(a_verdict_about_an_older_generation_drops_nothing) {
  Pool pool(8 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  const uint64_t read = pool.directory.place_of(key_of(1))->generation;
  EXPECT(pool.directory.drop(key_of(1), read) == 3);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(pool.directory.drop(key_of(1), read) == 0);
  EXPECT(pool.lookup({1, 2, 3}) == 3);
  EXPECT(pool.is_sound());
}

TEST(a_verdict_about_a_chunk_under_promotion_drops_nothing) {
  Tiers tiers(8, 16);
  EXPECT(tiers.memory.store({1, 2}) == 2);
  EXPECT(tiers.demote() == 2);
  EXPECT(tiers.memory.store({11, 12, 13, 14, 15, 16, 17, 18}) == 8);
  Directory& memory = tiers.memory.directory;
  const Reservation reading =
      memory.promotions().promote(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({1, 2}).data(), 2, ++tiers.memory.now);
  // Another engine has computed on what is on its way, and stored it.
  EXPECT(tiers.memory.store({3}, 2) == 1);
  EXPECT(memory.drop(key_of(1), reading.generations[0]) == 0);
  EXPECT(tiers.view_generation(reading.slots[0]) == reading.generations[0]);
  EXPECT(memory.promotions().landed(key_of(1), reading.generations[0]));
  EXPECT(memory.promotions().landed(key_of(2), reading.generations[1]));
  EXPECT(memory.release(reading.id, ++tiers.memory.now));
  EXPECT(tiers.memory.lookup({1, 2, 3}) == 3);
  EXPECT(tiers.is_sound());
}

TEST(a_verdict_about_a_chunk_that_is_being_written_drops_nothing) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve({1, 2});
  EXPECT(pool.directory.drop(key_of(1), made.generations[0]) == 0);
  EXPECT(all_are(pool.commit(made, 0, 2), SaveState::STORED));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.lookup({1, 2}) == 2);
  EXPECT(pool.is_sound());
}

TEST(a_verdict_about_one_tier_drops_nothing_of_the_other) {
  Tiers tiers(8, 16);
  EXPECT(tiers.memory.store({1, 2}) == 2);
  EXPECT(tiers.demote() == 2);
  EXPECT(drop(tiers.files, key_of(1)) == 2);
  EXPECT(tiers.memory.lookup({1, 2}) == 2);
  const uint64_t read = tiers.memory.directory.place_of(key_of(1))->generation;
  EXPECT(tiers.demote() == 0);  // what was written once is written again after a use
  EXPECT(tiers.files.drop(key_of(1), read) == 0);
  EXPECT(tiers.memory.directory.drop(key_of(1), read) == 2);
  EXPECT(tiers.is_sound());
}
