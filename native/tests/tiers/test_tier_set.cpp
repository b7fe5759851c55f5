// Three directories as one pool: a chunk is found while any tier has it, and what one tier learns of it reaches the others.
#include "tests/harness.h"

#include "directory/flush_walk.h"
#include "tests/tiers/three_tiers.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint8_t IN_MEMORY = tier_bit(Tier::DRAM);
constexpr uint8_t IN_FILES = tier_bit(Tier::SSD);
constexpr uint8_t IN_STORE = tier_bit(Tier::PEER);
constexpr uint64_t SECOND_NS = 1'000'000'000;

void retain(ThreeTiers& tiers, const std::vector<uint64_t>& ids, Retention request) {
  const auto states = tiers.memory.directory.retention().retain(tiers.memory.owner, pack(ids).data(),
                                                    std::vector<Retention>(ids.size(), request), tiers.memory.now);
  EXPECT(std::all_of(states.begin(), states.end(), [](uint8_t state) { return state == static_cast<uint8_t>(RetainState::ACCEPTED); }));
}

}  // namespace

TEST(a_chunk_is_found_until_the_last_tier_has_lost_it) {
  ThreeTiers tiers(4, 4, 4);
  EXPECT(tiers.memory.store({1, 2}) == 2);
  EXPECT(tiers.copy(0, 1, {1, 2}) == 2);
  EXPECT(tiers.copy(1, 2, {1, 2}) == 2);
  EXPECT(tiers.set.tiers_of(key_of(2)) == (IN_MEMORY | IN_FILES | IN_STORE));
  EXPECT(drop(tiers.files, key_of(1)) == 2);
  EXPECT(tiers.shown(key_of(2)) == (IN_MEMORY | IN_STORE) && tiers.is_sound());
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 2);
  EXPECT(tiers.memory.lookup({1, 2}) == 2 && tiers.shown(key_of(2)) == IN_STORE && tiers.is_sound());
  EXPECT(drop(tiers.store, key_of(1)) == 2);
  EXPECT(tiers.memory.lookup({1, 2}) == 0 && !tiers.memory.view->find(key_of(1)) && tiers.is_sound());
}

TEST(a_chunk_counts_as_saved_while_one_lower_tier_still_has_it) {
  ThreeTiers tiers(4, 4, 4);
  EXPECT(tiers.memory.store({1}) == 1);
  EXPECT(tiers.copy(0, 1, {1}) == 1 && tiers.copy(0, 2, {1}) == 1);
  EXPECT(tiers.memory.directory.count_unsaved() == 0 && tiers.files.count_unsaved() == 0);
  EXPECT(drop(tiers.files, key_of(1)) == 1);
  EXPECT(tiers.memory.directory.count_unsaved() == 0 && tiers.is_sound());
  EXPECT(drop(tiers.store, key_of(1)) == 1);
  EXPECT(tiers.memory.directory.count_unsaved() == 1 && tiers.is_sound());
}

// What a middle tier loses is lost for good only where no other tier has it.
TEST(each_tier_counts_what_other_tiers_have_as_shed) {
  ThreeTiers tiers(8, 2, 8);
  EXPECT(tiers.memory.store({1}) == 1 && tiers.memory.store({2}) == 1);
  EXPECT(tiers.copy(0, 1, {1}) == 1 && tiers.copy(0, 1, {2}) == 1 && tiers.copy(1, 2, {1}) == 1);
  static_cast<void>(flush(tiers.memory.directory, std::nullopt, UINT64_MAX));
  for (const uint64_t id : range(3, 2)) {
    EXPECT(tiers.memory.store({id}) == 1 && tiers.copy(0, 1, {id}) == 1);
  }
  EXPECT(tiers.files.stats().shed_chunks == 1 && tiers.files.stats().evicted_chunks == 1);
  EXPECT(tiers.shown(key_of(1)) == IN_STORE && tiers.shown(key_of(2)) == 0 && tiers.is_sound());
}

TEST(a_chunk_dropped_in_its_source_tier_is_not_published) {
  ThreeTiers tiers(4, 4, 4);
  EXPECT(tiers.memory.store({1}) == 1 && tiers.copy(0, 1, {1}) == 1);
  const Hold hold = tiers.files.acquire(tiers.memory.owner, pack({1}).data(), 1);
  const std::vector<uint64_t> generations = tiers.files.columns({hold.id})->generations;
  const Reservation made = tiers.store.reserve(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({1}).data(), 1, 9);
  EXPECT(drop(tiers.files, key_of(1)) == 1);
  const std::vector<uint32_t> sums(EXTENTS);
  EXPECT(all_are(tiers.store.commit(made.id, 0, 1, sums.data(), 9, {}, {Tier::SSD, generations}), SaveState::EXPIRED));
  EXPECT(tiers.store.end_reservation(made.id, 9) && tiers.files.release(hold.id, 9));
  EXPECT(tiers.shown(key_of(1)) == IN_MEMORY && tiers.is_sound());
}

// A tier that is full, has lost a chunk's parent or knows it for somebody else refuses it; the others keep it.
TEST(a_key_has_one_namespace_in_all_tiers) {
  ThreeTiers tiers(4, 4, 4);
  for (Directory* tier : tiers.all) {
    EXPECT(tier->add_namespace() == NamespaceId(1));
  }
  EXPECT(tiers.memory.store({1}) == 1 && tiers.copy(0, 2, {1}) == 1);
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 1);
  const auto ask = [&](Directory& tier) {
    return tier.reserve(NamespaceId(1), tiers.memory.small, std::nullopt, pack({1}).data(), 1, 9).states;
  };
  EXPECT(all_are(ask(tiers.memory.directory), SaveState::FOREIGN));
  EXPECT(all_are(ask(tiers.files), SaveState::FOREIGN));
  EXPECT(!tiers.files.restore(NamespaceId(1), tiers.memory.small, std::nullopt, key_of(1), PageIndex(0), 7));
  EXPECT(tiers.files.restore(NamespaceId(0), tiers.memory.small, std::nullopt, key_of(1), PageIndex(0), 7));
  EXPECT(tiers.shown(key_of(1)) == (IN_FILES | IN_STORE) && tiers.is_sound());
}

TEST(a_promoted_chunk_names_the_level_that_it_comes_from) {
  ThreeTiers tiers(4, 4, 4);
  EXPECT(tiers.memory.store({1, 2}) == 2 && tiers.copy(0, 1, {1}) == 1 && tiers.copy(0, 2, {1, 2}) == 2);
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 2);
  Directory& memory = tiers.memory.directory;
  const Reservation made = memory.promotions().promote(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({1, 2, 3}).data(), 3, 9);
  EXPECT(made.states == std::vector<uint8_t>({1, 1, static_cast<uint8_t>(SaveState::NO_PARENT)}));
  EXPECT(memory.columns({made.id})->levels == std::vector<uint8_t>({2, 3}));
  EXPECT(memory.promotions().landed(key_of(1), made.generations[0]) && memory.promotions().landed(key_of(2), made.generations[1]));
  EXPECT(memory.columns({made.id})->levels == std::vector<uint8_t>({1, 1}));
  EXPECT(memory.release(made.id, 10) && tiers.is_sound());
}

TEST(retention_reaches_all_tiers_and_is_handed_down_to_all) {
  ThreeTiers tiers(1, 4, 4);
  for (Directory* tier : tiers.all) {
    tier->retention().ledger().cap(1.0);
  }
  EXPECT(tiers.memory.store({1}) == 1);
  retain(tiers, {1}, {80, 0});
  EXPECT(tiers.copy(0, 1, {1}) == 1 && tiers.copy(0, 2, {1}) == 1);
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{} && tiers.store.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.memory.store({2}) == 1);  // which evicts the other
  EXPECT(tiers.shown(key_of(1)) == (IN_FILES | IN_STORE));
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention(80, 0) && tiers.store.retention().of(key_of(1)) == Retention(80, 0));
  retain(tiers, {1}, {90, 0});
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention(90, 0) && tiers.store.retention().of(key_of(1)) == Retention(90, 0));
  EXPECT(tiers.is_sound());
}

// Alike in three tiers: the uppermost decides, and then the next that has it.
TEST(the_uppermost_tier_decides_when_a_priority_expires_in_all) {
  ThreeTiers tiers(4, 4, 4);
  for (Directory* tier : tiers.all) {
    tier->retention().ledger().cap(1.0);
  }
  tiers.memory.now = SECOND_NS;
  EXPECT(tiers.memory.store({1}) == 1 && tiers.copy(0, 1, {1}) == 1 && tiers.copy(0, 2, {1}) == 1);
  retain(tiers, {1}, {80, 10'000});
  const Hold hold = tiers.memory.directory.acquire(tiers.memory.owner, pack({1}).data(), 1, 8 * SECOND_NS);
  EXPECT(tiers.memory.directory.release(hold.id, 8 * SECOND_NS));
  for (Directory* tier : {&tiers.store, &tiers.files, &tiers.memory.directory}) {
    tier->retention().expire_due(13 * SECOND_NS);  // 12 s since the request, 5 since the use
    EXPECT(tier->retention().of(key_of(1)) == Retention(80, 10'000));
  }
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 1);
  tiers.store.retention().expire_due(14 * SECOND_NS);
  EXPECT(tiers.store.retention().ledger().take_expired().empty());
  tiers.files.retention().expire_due(14 * SECOND_NS);
  tiers.store.retention().expire_due(30 * SECOND_NS);
  tiers.files.retention().expire_due(30 * SECOND_NS);
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{} && tiers.store.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.files.retention().ledger().take_expired().size() == 1 && tiers.store.retention().ledger().take_expired().size() == 1 && tiers.is_sound());
}

TEST(departures_are_reported_by_each_lower_tier) {
  ThreeTiers tiers(4, 4, 4);
  EXPECT(tiers.memory.store({1}) == 1 && tiers.copy(0, 1, {1}) == 1 && tiers.copy(1, 2, {1}) == 1);
  EXPECT(drop(tiers.files, key_of(1)) == 1 && drop(tiers.memory.directory, key_of(1)) == 1);
  EXPECT(tiers.files.take_departed() == std::vector<ChunkKey>({key_of(1)}));
  EXPECT(tiers.store.take_departed().empty() && tiers.memory.directory.take_departed().empty());
}

TEST(tiers_that_do_not_fit_together_are_refused_by_name) {
  Pool one(4 * CHUNK);
  Pool two(4 * CHUNK);
  const auto refusal = [](const std::vector<Directory*>& tiers) {
    const char* why = TierSet::why_refused(tiers);
    return std::string_view(why == nullptr ? "" : why);
  };
  EXPECT(refusal({}).find("one tier") != std::string_view::npos);
  EXPECT(refusal({&one.directory, &two.directory}).find("rise") != std::string_view::npos);
  EXPECT(refusal({&one.directory}).empty());
  {
    const TierSet set({&one.directory});
    EXPECT(refusal({&one.directory}).find("another set") != std::string_view::npos);
  }
  EXPECT(one.store({1}) == 1);
  EXPECT(refusal({&one.directory}).find("chunks already") != std::string_view::npos);
}

TEST(a_chunk_that_is_being_written_is_below_no_more_when_the_only_copy_of_it_goes) {
  ThreeTiers tiers(8, 8, 8);
  EXPECT(tiers.memory.store({1}) == 1);
  EXPECT(tiers.copy(0, 2, {1}) == 1);
  const Reservation made = tiers.files.reserve(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({1}).data(), 1, ++tiers.memory.now);
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 1);
  EXPECT(drop(tiers.store, key_of(1)) == 1);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
  EXPECT(tiers.is_sound());
}

// A chunk of the files that a search has set aside for its child gets a copy in the store, and is used again after memory has
// evicted it: it comes back to the list of those that need no copy.
TEST(a_chunk_that_was_set_aside_and_is_renewed_stands_among_those_that_have_a_copy_below) {
  ThreeTiers tiers(2, 2, 4);
  EXPECT(tiers.memory.store({1, 2}) == 2 && tiers.copy(0, 1, {1, 2}) == 2 && drop(tiers.memory.directory, key_of(2)) == 1);
  const Hold use = tiers.memory.acquire({1});
  EXPECT(tiers.memory.directory.release(use.id, ++tiers.memory.now));
  const auto pin = tiers.files.pin_key(tiers.memory.owner, key_of(2));
  EXPECT(all_are(tiers.files.reserve(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({3}).data(), 1, ++tiers.memory.now).states,
                 SaveState::NOT_READY));  // 1 has been set aside by this search
  EXPECT(tiers.copy(0, 2, {1}) == 1 && tiers.is_sound());
  EXPECT(tiers.memory.store({4, 5}) == 2 && tiers.shown(key_of(1)) == (IN_FILES | IN_STORE));  // which evicts it from memory
  EXPECT(tiers.is_sound());
  EXPECT(pin && tiers.files.unpin(*pin) && tiers.is_sound());
}
