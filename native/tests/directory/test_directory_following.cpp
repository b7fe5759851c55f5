// Saves that are followed before their commit: extents land in order, the last one with the commit, and nothing of one given up stays.
#include "tests/directory_pool.h"
#include "tests/harness.h"

using namespace kvpool;
using kvpool::testing::CHUNK;
using kvpool::testing::EXTENTS;
using kvpool::testing::pack;
using kvpool::testing::Pool;
using kvpool::testing::range;

namespace {

Columns follow(Pool& pool, const std::vector<uint64_t>& keys) {
  const auto packed = pack(keys);
  return pool.directory.follow_saves(pool.owner, std::nullopt, packed.data(), keys.size());
}

std::vector<uint32_t> sums_of(size_t words) {
  std::vector<uint32_t> sums(words);
  for (size_t word = 0; word < words; ++word) {
    sums[word] = static_cast<uint32_t>(100 + word);
  }
  return sums;
}

}  // namespace

TEST(extents_of_a_save_land_before_its_commit_and_the_last_one_with_it) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve(range(1, 3));
  const Columns found = follow(pool, range(1, 5));
  EXPECT(found.slots.size() == 3);
  EXPECT(found.generations == made.generations);
  const SlotAddress slot = SlotAddress::unpacked(found.slots[1]);
  EXPECT(pool.view->generation_at(slot) == found.generations[1]);
  EXPECT(pool.view->landed_at(slot) == 0);
  const auto sums = sums_of(3 * EXTENTS);
  EXPECT(pool.directory.land_saved(made.id, 0, 3, 0, sums));
  EXPECT(pool.view->landed_at(slot) == EXTENTS - 1);
  EXPECT(pool.view->checksum_at(slot, 0) == sums[EXTENTS]);
  EXPECT(pool.is_sound());
  const auto states = pool.directory.commit(made.id, 0, 3, sums.data(), ++pool.now);
  EXPECT(kvpool::testing::all_are(states, SaveState::STORED));
  EXPECT(pool.view->landed_at(slot) == EXTENTS);
  EXPECT(follow(pool, range(1, 3)).slots.empty());
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(a_commit_with_other_checksums_than_those_that_have_landed_stores_nothing) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve(range(1, 2));
  const auto sums = sums_of(2 * EXTENTS);
  EXPECT(pool.directory.land_saved(made.id, 0, 2, 0, sums));
  auto others = sums;
  others[EXTENTS] += 1;  // extent 0 of the second chunk, which others may have read
  others[2] += 1;       // the last extent of the first one, which nobody has
  const auto states = pool.directory.commit(made.id, 0, 2, others.data(), ++pool.now);
  EXPECT(states == std::vector<uint8_t>({static_cast<uint8_t>(SaveState::STORED), static_cast<uint8_t>(SaveState::CHECKSUM)}));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(extents_out_of_order_repeated_or_of_a_stored_chunk_change_nothing) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve(range(1, 2));
  const SlotAddress slot = SlotAddress::unpacked(follow(pool, range(1, 2)).slots[0]);
  const auto sums = sums_of(2);
  EXPECT(pool.directory.land_saved(made.id, 0, 2, 1, sums));
  EXPECT(pool.view->landed_at(slot) == 0);
  EXPECT(pool.directory.land_saved(made.id, 0, 2, EXTENTS - 1, sums));  // the last one alone
  EXPECT(pool.view->landed_at(slot) == 0);
  EXPECT(pool.directory.land_saved(made.id, 7, 2, 0, sums));  // no such chunks
  EXPECT(pool.view->landed_at(slot) == 0);
  EXPECT(!pool.directory.land_saved(made.id + 1000, 0, 2, 0, sums));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(!pool.directory.land_saved(made.id, 0, 2, 0, sums));
}

TEST(a_save_that_is_given_up_or_expires_leaves_no_generation) {
  Pool pool(8 * CHUNK);
  for (const bool expires : {false, true}) {
    const Reservation made = pool.reserve(range(1, 2));
    const Columns found = follow(pool, range(1, 2));
    EXPECT(pool.directory.land_saved(made.id, 0, 2, 0, sums_of(2)));
    EXPECT(expires ? pool.directory.expire_part(made.id, SIZE_MAX, ++pool.now) : pool.directory.end_reservation(made.id, ++pool.now));
    for (const uint64_t slot : found.slots) {
      EXPECT(pool.view->generation_at(SlotAddress::unpacked(slot)) == 0);
      EXPECT(pool.view->landed_at(SlotAddress::unpacked(slot)) == LANDING_FAILED);  // the word that followers wait on
    }
    EXPECT(follow(pool, range(1, 2)).slots.empty());
    EXPECT(pool.is_sound());
    static_cast<void>(pool.directory.end_reservation(made.id, ++pool.now));
  }
}

TEST(saves_of_another_model_or_parent_are_not_followed) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve(range(1, 2));
  const NamespaceId other = pool.directory.add_namespace();
  const auto packed = pack(range(1, 2));
  EXPECT(pool.directory.follow_saves(other, std::nullopt, packed.data(), 2).slots.empty());
  EXPECT(pool.directory.follow_saves(pool.owner, kvpool::testing::key_of(77), packed.data(), 2).slots.empty());
  const auto second = pack(range(2, 1));
  EXPECT(pool.directory.follow_saves(pool.owner, std::nullopt, second.data(), 1).slots.empty());
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
}
