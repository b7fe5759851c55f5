// When the slot of a chunk that is gone may be used again: readers do not matter, writers and hardware do.
#include "tests/harness.h"

#include "tests/tiers/three_tiers.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

uint64_t used(const Pool& pool) { return pool.directory.stats().used_bytes / CHUNK; }

// Chunks 1 and 2 on their way from the files into memory, which has room for two.
struct OnItsWay : ThreeTiers {
  OnItsWay() : ThreeTiers(2, 4, 4) {
    EXPECT(memory.store({1, 2}) == 2 && copy(0, 1, {1, 2}) == 2 && drop(memory.directory, key_of(1)) == 2);
    made = memory.directory.promotions().promote(memory.owner, memory.small, std::nullopt, pack({1, 2}).data(), 2, ++memory.now);
    EXPECT(made.id != 0);
  }
  FailedLanding fail(size_t index) {
    return memory.directory.promotions().fail_landing(key_of(index + 1), made.generations[index], LoadFault::PATH);
  }
  Reservation made;
};

}  // namespace

TEST(a_reader_does_not_keep_the_slot_of_a_chunk_that_is_gone) {
  Pool pool(2 * CHUNK);
  EXPECT(pool.store({1, 2}) == 2);
  const Hold lease = pool.acquire({1, 2});
  const auto before = pool.directory.columns({lease.id});
  EXPECT(drop(pool.directory, key_of(1)) == 2);
  EXPECT(used(pool) == 0 && pool.directory.stats().zombies == 2 && pool.is_sound());
  EXPECT(pool.store({3, 4}) == 2);
  EXPECT(pool.view->generation_at(SlotAddress::unpacked(before->slots[0])) != before->generations[0]);  // what the reader looks at
  EXPECT(pool.directory.columns({lease.id})->levels == std::vector<uint8_t>({NO_LEVEL, NO_LEVEL}));
  EXPECT(pool.is_sound() && pool.directory.release(lease.id, ++pool.now));
  EXPECT(used(pool) == 2 && pool.directory.stats().zombies == 0 && pool.lookup({3, 4}) == 2 && pool.is_sound());
}

TEST(hardware_that_reads_for_a_check_keeps_the_slot_until_it_has_ended) {
  Pool pool(2 * CHUNK);
  EXPECT(pool.store({1}) == 1);
  const Hold lease = pool.acquire({1});
  const auto pin = pool.directory.pin_chunk(lease.id, 0);
  EXPECT(drop(pool.directory, key_of(1)) == 1);
  EXPECT(used(pool) == 1 && pool.is_sound());
  EXPECT(pin && pool.directory.unpin(*pin));
  EXPECT(used(pool) == 0 && pool.is_sound() && pool.directory.release(lease.id, ++pool.now) && pool.is_sound());
}

// Nobody reads a tier of files but hardware: there a hold says so.
TEST(a_hold_keeps_the_slot_in_a_tier_that_no_client_maps) {
  ThreeTiers tiers(2, 2, 2);
  EXPECT(tiers.memory.store({1}) == 1 && tiers.copy(0, 1, {1}) == 1);
  const Hold hold = tiers.files.acquire(tiers.memory.owner, pack({1}).data(), 1);
  EXPECT(drop(tiers.files, key_of(1)) == 1);
  EXPECT(tiers.files.stats().used_bytes == CHUNK && tiers.is_sound());
  EXPECT(tiers.files.release(hold.id, 9) && tiers.files.stats().used_bytes == 0 && tiers.is_sound());
}

TEST(a_failed_promotion_keeps_each_slot_until_its_own_io_has_ended) {
  OnItsWay tiers;
  const Hold lease = tiers.memory.acquire({1, 2});
  static_cast<void>(tiers.fail(0));  // the second one's I/O goes on
  EXPECT(used(tiers.memory) == 1 && tiers.is_sound());
  EXPECT(all_are(tiers.memory.reserve({11}).states, SaveState::RESERVED));
  EXPECT(!tiers.memory.directory.promotions().landed(key_of(2), tiers.made.generations[1]));
  EXPECT(used(tiers.memory) == 1 && tiers.is_sound());  // the new one's
  EXPECT(tiers.memory.directory.release(lease.id, 9) && tiers.memory.directory.release(tiers.made.id, 9) && tiers.is_sound());
}
