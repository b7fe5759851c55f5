// A promotion reads each chunk from the tier that is named, and a failed one drops only what was bad, and only there.
#include "tests/harness.h"

#include "tests/tiers/three_tiers.h"
#include "shared_index/landing_board.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr auto NO_PARENT = static_cast<uint8_t>(SaveState::NO_PARENT);
constexpr auto OUTSIDE = static_cast<Tier>(5);  // no directory here has it
constexpr auto RESERVED = static_cast<uint8_t>(SaveState::RESERVED);

// Chunks 1 and 2 in all lower tiers, 3 in the store alone, nothing in memory.
struct Stored : ThreeTiers {
  Stored() : ThreeTiers(4, 4, 4) {
    EXPECT(memory.store({1, 2, 3}) == 3 && copy(0, 1, {1, 2}) == 2 && copy(0, 2, {1, 2, 3}) == 3);
    EXPECT(drop(memory.directory, key_of(1)) == 3);
  }
  Reservation promote(const std::vector<PromotionSource>& sources) {
    const auto keys = pack(range(1, sources.size()));
    return memory.directory.promotions().promote(memory.owner, memory.small, std::nullopt, keys.data(), sources.size(), ++memory.now, sources);
  }
  FailedLanding fail(uint64_t id, const Reservation& made, LoadFault fault) {
    return memory.directory.promotions().fail_landing(key_of(id), made.generations[id - 1], fault);
  }
  [[nodiscard]] uint64_t generation(Directory& tier, uint64_t id) const { return tier.place_of(key_of(id))->generation; }
};

}  // namespace

TEST(each_chunk_comes_from_the_tier_that_is_named) {
  Stored tiers;
  const Reservation made = tiers.promote({{Tier::PEER}, {Tier::SSD, tiers.generation(tiers.files, 2)}, {Tier::PEER}});
  EXPECT(made.states == std::vector<uint8_t>({RESERVED, RESERVED, RESERVED}));
  EXPECT(tiers.memory.directory.columns({made.id})->levels == std::vector<uint8_t>({3, 2, 3}));
  EXPECT(tiers.memory.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.memory.directory.place_of(key_of(1)) && !tiers.memory.directory.place_of(key_of(2)) && tiers.is_sound());
}

TEST(a_source_that_has_not_the_chunk_or_another_one_is_refused) {
  Stored tiers;
  EXPECT(tiers.promote({{Tier::DRAM}}).states == std::vector<uint8_t>({NO_PARENT}));
  EXPECT(tiers.promote({{.tier = Tier::PEER, .generation = 1, .is_external = true}}).states == std::vector<uint8_t>({NO_PARENT}));
  EXPECT(tiers.promote({{Tier::HBM}}).states == std::vector<uint8_t>({NO_PARENT}));
  EXPECT(tiers.promote({{Tier::SSD, tiers.generation(tiers.files, 1) + 100}}).states == std::vector<uint8_t>({NO_PARENT}));
  const Reservation made = tiers.promote({{Tier::SSD}, {Tier::SSD}, {Tier::SSD}});
  EXPECT(made.states == std::vector<uint8_t>({RESERVED, RESERVED, NO_PARENT}));
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now) && tiers.is_sound());
}

TEST(only_a_bad_source_drops_the_chunk_in_that_tier) {
  Stored tiers;
  for (const LoadFault fault : {LoadFault::PATH, LoadFault::MEMORY}) {
    const Reservation made = tiers.promote({{Tier::SSD}, {Tier::SSD}});
    const FailedLanding failed = tiers.fail(1, made, fault);
    EXPECT(failed.removed == 0 && failed.dropped_in_source == 0 && failed.next == Tier::SSD);
    EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now) && tiers.is_sound());
  }
  EXPECT(tiers.found(key_of(1)) == (tier_bit(Tier::SSD) | tier_bit(Tier::PEER)));
  const Reservation made = tiers.promote({{Tier::SSD}, {Tier::SSD}});
  EXPECT(tiers.memory.directory.promotions().landed(key_of(2), made.generations[1]));
  const FailedLanding failed = tiers.fail(1, made, LoadFault::SOURCE);
  EXPECT(failed.removed == 1 && failed.dropped_in_source == 2 && failed.next == Tier::PEER);
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.found(key_of(1)) == tier_bit(Tier::PEER) && tiers.found(key_of(2)) == tier_bit(Tier::PEER));
  const DirectoryStats stats = tiers.memory.directory.stats();
  EXPECT(stats.failed_landings[0] == 1 && stats.failed_landings[1] == 1 && stats.failed_landings[2] == 1);
  EXPECT(tiers.is_sound());
}

TEST(a_verdict_about_a_source_drops_no_newer_chunk_there) {
  Stored tiers;
  const Reservation made = tiers.promote({{Tier::PEER}});
  EXPECT(drop(tiers.store, key_of(1)) == 3);
  EXPECT(tiers.copy(1, 2, {1}) == 1);
  const FailedLanding failed = tiers.fail(1, made, LoadFault::SOURCE);
  EXPECT(failed.dropped_in_source == 0 && tiers.store.place_of(key_of(1)));
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now) && tiers.is_sound());
}

// Whoever reads may hear of the bad source when the chunk is no longer wanted here.
TEST(a_bad_source_is_dropped_though_the_promotion_was_given_up) {
  Stored tiers;
  const Reservation made = tiers.promote({{Tier::SSD}});
  EXPECT(tiers.memory.directory.discard(key_of(1)) == 0);
  EXPECT(tiers.fail(1, made, LoadFault::SOURCE).dropped_in_source == 2);
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now) && tiers.is_sound());
}

TEST(a_promotion_ends_once) {
  Stored tiers;
  const Reservation made = tiers.promote({{Tier::SSD}, {Tier::SSD}});
  EXPECT(tiers.memory.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(!tiers.memory.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(tiers.fail(1, made, LoadFault::SOURCE).dropped_in_source == 0);
  static_cast<void>(tiers.fail(2, made, LoadFault::PATH));
  EXPECT(!tiers.memory.directory.promotions().landed(key_of(2), made.generations[1]));
  EXPECT(tiers.fail(2, made, LoadFault::SOURCE).dropped_in_source == 0);
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now) && tiers.is_sound());
}

TEST(extents_that_are_not_those_expected_are_a_bad_source) {
  Stored tiers;
  const std::vector<uint32_t> right = {11, 12, 13};
  const std::vector<uint32_t> wrong = {11, 12, 14};
  const Reservation made = tiers.promote({{Tier::SSD, 0, right}, {Tier::SSD, 0, right}});
  LandingBoard board(tiers.memory.index);
  board.land(SlotAddress::unpacked(made.slots[0]), 0, right.data(), EXTENTS);
  board.land(SlotAddress::unpacked(made.slots[1]), 0, wrong.data(), EXTENTS);
  EXPECT(tiers.memory.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(!tiers.memory.directory.promotions().landed(key_of(2), made.generations[1]));
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.found(key_of(1)) == (tier_bit(Tier::DRAM) | tier_bit(Tier::SSD) | tier_bit(Tier::PEER)));
  EXPECT(tiers.found(key_of(2)) == tier_bit(Tier::PEER) && tiers.is_sound());
}

TEST(a_chunk_of_an_external_source_needs_no_directory_of_that_tier) {
  Stored tiers;
  const std::vector<PromotionSource> outside(4, PromotionSource{.tier = OUTSIDE, .is_external = true});
  const Reservation made = tiers.promote(outside);
  EXPECT(made.states == std::vector<uint8_t>({RESERVED, RESERVED, RESERVED, RESERVED}));
  EXPECT(tiers.memory.directory.columns({made.id})->levels == std::vector<uint8_t>({5, 5, 5, 5}));
  EXPECT(tiers.set.tiers_of(key_of(4)) == tier_bit(OUTSIDE) && tiers.is_sound());
  for (const uint64_t id : {uint64_t{1}, uint64_t{2}}) {
    EXPECT(tiers.memory.directory.promotions().landed(key_of(id), made.generations[id - 1]));
  }
  // A bad chunk of theirs takes what follows it out of memory, and nothing out of the tiers here that have the same key.
  const FailedLanding failed = tiers.fail(3, made, LoadFault::SOURCE);
  EXPECT(failed.dropped_in_source == 0 && failed.next == Tier::PEER);
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.memory.directory.place_of(key_of(2)) && !tiers.memory.directory.place_of(key_of(3)));
  EXPECT(tiers.store.place_of(key_of(3)) && !tiers.memory.directory.place_of(key_of(4)));
  EXPECT(!tiers.memory.directory.promotions().landed(key_of(4), made.generations[3]) && tiers.is_sound());
}

TEST(a_directory_without_lower_tiers_takes_chunks_of_an_external_source) {
  Pool pool(4 * CHUNK);
  const auto keys = pack(range(1, 2));
  const std::vector<PromotionSource> outside(2, PromotionSource{.tier = OUTSIDE, .is_external = true});
  const Reservation made = pool.directory.promotions().promote(pool.owner, pool.small, std::nullopt, keys.data(), 2, ++pool.now, outside);
  EXPECT(made.states == std::vector<uint8_t>({RESERVED, RESERVED}));
  EXPECT(pool.lookup({1, 2}) == 2 && pool.acquire({1, 2}).chunks == 2);
  EXPECT(pool.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(pool.directory.promotions().fail_landing(key_of(2), made.generations[1], LoadFault::SOURCE).dropped_in_source == 0);
  EXPECT(pool.directory.release(made.id, ++pool.now));
  EXPECT(pool.directory.place_of(key_of(1)) && !pool.directory.place_of(key_of(2)) && pool.directory.verify().empty());
}
