// Two directories as one pool: what leaves the upper tier stays found, comes back, and is lost only when both let go.
#include <algorithm>
#include <random>

#include "tests/directory/directory_tiers.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(a_demoted_chunk_outlives_its_slot_and_comes_back) {
  Tiers tiers(4, 16);
  EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
  EXPECT(tiers.demote() == 4);
  EXPECT(tiers.demote() == 0);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.store({11, 12, 13}) == 3);
  EXPECT(tiers.is_sound());
  uint8_t levels[4] = {};
  EXPECT(tiers.memory.view->lookup(pack({1, 2, 3, 4}).data(), 4, levels) == 4);
  EXPECT(levels[0] == 1 && levels[1] == 2 && levels[3] == 2);
  EXPECT(tiers.memory.directory.stats().shed_chunks == 3);
  EXPECT(tiers.memory.directory.stats().evicted_chunks == 0);
  EXPECT(tiers.load({1, 2, 3, 4}) == 4);
  EXPECT(tiers.memory.directory.stats().evicted_chunks == 3);
  EXPECT(tiers.memory.lookup({1, 2, 3, 4}) == 4);
  EXPECT(tiers.memory.lookup({11, 12, 13}) == 0);
  EXPECT(tiers.is_sound());
}

TEST(a_demotion_changes_nothing_about_who_goes_next) {
  Tiers tiers(6, 16);
  EXPECT(tiers.memory.store({1, 2}) == 2);
  EXPECT(tiers.memory.store({11, 12}) == 2);
  EXPECT(tiers.memory.store({21, 22}) == 2);
  EXPECT(tiers.demote() == 2);
  EXPECT(tiers.memory.store({31, 32}) == 2);
  EXPECT(tiers.memory.lookup({11, 12}) == 2);
  EXPECT(tiers.memory.acquire({1, 2}).id == 0);
  EXPECT(tiers.is_sound());
}

// A use of another branch ends while a demotion or a check holds what the two have in common.
TEST(a_branch_used_meanwhile_stays_before_the_prefix_that_it_hangs_on) {
  Pool pool(8 * CHUNK);
  EXPECT(pool.store({1, 2}) == 2);
  EXPECT(pool.store({3}, 1) == 1);
  const RecordPage first = pool.directory.records(1, 1, 2);
  const RecordPage second = pool.directory.records(0, 1, 1);
  EXPECT(first.pin != 0 && second.pin != 0 && second.next == 0);
  const Hold use = pool.acquire({1, 3});
  EXPECT(use.chunks == 2);
  EXPECT(pool.directory.release(use.id, pool.now += 10));
  EXPECT(pool.directory.unpin(first.pin));
  EXPECT(pool.directory.unpin(second.pin));
  EXPECT(pool.is_sound());
  for (uint64_t id = 11; id < 19; ++id) {
    EXPECT(pool.store({id}) == 1);
    EXPECT(pool.is_sound());
  }
  EXPECT(pool.lookup({1}) == 0);
}

TEST(a_page_of_records_ends_at_its_limit) {
  Pool pool(8 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(pool.directory.places() == 3);
  EXPECT(drop(pool.directory, key_of(3)) == 1);
  const RecordPage none = pool.directory.records(2, 1, 3);
  EXPECT(none.pin == 0 && none.records.empty() && none.next == 0);
  const RecordPage all = pool.directory.records(0, 8, 3);
  EXPECT(all.records.size() == 2);
  EXPECT(pool.directory.unpin(all.pin));
  EXPECT(pool.directory.records(3, 1, UINT32_MAX).pin == 0);
  EXPECT(pool.is_sound());
}

TEST(a_failed_landing_takes_what_follows_along) {
  Tiers tiers(4, 16);
  EXPECT(tiers.memory.store({1, 2, 3}) == 3);
  EXPECT(tiers.demote() == 3);
  EXPECT(tiers.memory.store({11, 12, 13, 14}) == 4);
  const Hold below = tiers.files.acquire(tiers.memory.owner, pack({1, 2, 3}).data(), 3);
  const Reservation made = tiers.memory.directory.promotions().promote(tiers.memory.owner, tiers.memory.small, std::nullopt,
                                                          pack({1, 2, 3}).data(), 3, ++tiers.memory.now);
  const Hold lease = tiers.memory.acquire({1, 2, 3});
  EXPECT(lease.chunks == 3);
  EXPECT(tiers.memory.directory.columns({lease.id})->levels == std::vector<uint8_t>({2, 2, 2}));
  EXPECT(tiers.memory.directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(tiers.memory.directory.promotions().landed(key_of(3), made.generations[2]));
  EXPECT(tiers.is_sound());
  EXPECT(drop(tiers.files, key_of(2)) == 2);
  EXPECT(tiers.memory.directory.promotions().fail_landing(key_of(2), made.generations[1], LoadFault::PATH).removed == 1);
  EXPECT(tiers.view_generation(made.slots[1]) == 0);
  EXPECT(tiers.view_generation(made.slots[2]) == 0);
  EXPECT(tiers.memory.lookup({1, 2, 3}) == 1);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.directory.release(lease.id, ++tiers.memory.now));
  EXPECT(tiers.memory.directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.files.release(below.id, tiers.memory.now));
  EXPECT(tiers.is_sound());
}

TEST(of_chunks_alone_each_is_promoted_for_itself_and_takes_no_other_along) {
  Tiers tiers(4, 16);
  Directory& memory = tiers.memory.directory;
  const NamespaceId owner = tiers.memory.owner;
  for (const uint64_t id : range(1, 3)) {
    EXPECT(tiers.memory.store({id}) == 1);
    EXPECT(tiers.demote() == 1);
  }
  EXPECT(tiers.memory.store({11}) == 1 && tiers.memory.store({12}) == 1 && tiers.memory.store({13}) == 1 && tiers.memory.store({2}) == 1);
  const std::vector<uint32_t> named{0, 1, 2, 3};
  const std::vector<uint8_t> keys = pack({1, 9, 2, 3});
  const std::vector<HeldSet> below = tiers.files.hold_each(std::vector{SetPart{owner, keys, named}}, {});
  EXPECT(below.size() == 1 && below[0].places == std::vector<uint32_t>({0, 2, 3}));
  const Reservation made = memory.promotions().promote(owner, tiers.memory.small, std::nullopt, keys.data(), 4, ++tiers.memory.now, {}, true);
  const auto is = [&made](size_t index, SaveState state) { return made.states[index] == static_cast<uint8_t>(state); };
  EXPECT(is(0, SaveState::RESERVED) && is(1, SaveState::NO_PARENT) && is(2, SaveState::PRESENT) && is(3, SaveState::RESERVED));
  EXPECT(made.generations[1] == 0 && made.generations[2] != 0 && made.offsets[0] != made.offsets[3]);
  EXPECT(memory.columns({made.id})->levels == std::vector<uint8_t>({2, 1, 2}));
  EXPECT(tiers.is_sound());
  EXPECT(memory.promotions().fail_landing(key_of(1), made.generations[0], LoadFault::PATH).removed == 0);
  EXPECT(memory.promotions().landed(key_of(3), made.generations[3]));
  EXPECT(tiers.memory.lookup({3}) == 1 && tiers.memory.lookup({2}) == 1);
  EXPECT(memory.release(made.id, ++tiers.memory.now) && tiers.files.release(below[0].hold, tiers.memory.now));
  EXPECT(memory.stats().holds == 0 && memory.stats().held == 0 && memory.stats().promoting == 0 && tiers.is_sound());
}

TEST(what_finds_no_room_of_chunks_alone_is_declined_and_the_others_are_promoted) {
  Tiers tiers(2, 16);
  Directory& memory = tiers.memory.directory;
  for (const uint64_t id : range(1, 3)) {
    EXPECT(tiers.memory.store({id}) == 1);
    EXPECT(tiers.demote() == 1);
  }
  const Hold held = tiers.memory.acquire({3});
  const std::vector<uint8_t> keys = pack({1, 2, 3});
  const Reservation made =
      memory.promotions().promote(tiers.memory.owner, tiers.memory.small, std::nullopt, keys.data(), 3, ++tiers.memory.now, {}, true);
  EXPECT(made.states[0] == static_cast<uint8_t>(SaveState::RESERVED) && made.states[1] == static_cast<uint8_t>(SaveState::FULL) &&
         made.states[2] == static_cast<uint8_t>(SaveState::PRESENT));
  EXPECT(memory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(memory.release(made.id, ++tiers.memory.now) && memory.release(held.id, tiers.memory.now) && tiers.is_sound());
}

TEST(chunks_that_came_without_token_ids_are_named_in_the_order_of_their_chain) {
  Tiers tiers(4, 16);
  Directory& directory = tiers.memory.directory;
  const NamespaceId owner = tiers.memory.owner;
  const std::vector<uint8_t> keys = pack({1, 2, 3});
  const std::vector<int32_t> tokens = {10, 11, 20, 21, 30, 31};
  const std::vector<PromotionSource> outside(3, PromotionSource{.tier = Tier::PEER, .is_external = true});
  const uint64_t now = ++tiers.memory.now;
  const Reservation made = directory.promotions().promote(owner, tiers.memory.small, std::nullopt, keys.data(), 3, now, outside);
  EXPECT(directory.promotions().landed(key_of(1), made.generations[0]));
  EXPECT(directory.promotions().landed(key_of(3), made.generations[2]));
  const auto feed = ChangeFeed::create(32);
  directory.reports().report_to(feed);
  const auto is = [](const NamedTokens& named, size_t done, bool is_waiting) {
    return named.done == done && named.is_waiting == is_waiting;
  };
  EXPECT(is(directory.promotions().name_tokens(NamespaceId{7}, keys.data(), 3, tokens), 0, false));
  EXPECT(is(directory.promotions().name_tokens(owner, pack({9}).data(), 1, {tokens.data(), 2}), 0, false));
  EXPECT(is(directory.promotions().name_tokens(owner, pack({3}).data(), 1, {tokens.data() + 4, 2}), 0, true));
  EXPECT(is(directory.promotions().name_tokens(owner, keys.data(), 3, tokens), 1, true));
  EXPECT(feed->waiting() == 1);
  EXPECT(directory.promotions().landed(key_of(2), made.generations[1]));
  EXPECT(is(directory.promotions().name_tokens(owner, keys.data(), 3, tokens), 3, false));
  EXPECT(feed->waiting() == 4);  // the landing, and a name for each
  const std::span<const int32_t> last = directory.tokens_of(key_of(3));
  EXPECT(std::vector<int32_t>(last.begin(), last.end()) == std::vector<int32_t>({30, 31}));
  const std::vector<int32_t> others = {40, 41};
  EXPECT(is(directory.promotions().name_tokens(owner, pack({3}).data(), 1, others), 1, false));
  const std::span<const int32_t> kept = directory.tokens_of(key_of(3));
  EXPECT(std::vector<int32_t>(kept.begin(), kept.end()) == std::vector<int32_t>({30, 31}));
  EXPECT(feed->waiting() == 4);
  EXPECT(directory.release(made.id, ++tiers.memory.now));
  EXPECT(tiers.is_sound());
}

TEST(a_chunk_that_no_other_tier_has_can_be_protected) {
  Tiers tiers(4, 16);
  EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
  tiers.memory.directory.room().protect_unsaved(true);
  const Reservation refused = tiers.memory.reserve({11});
  EXPECT(all_are(refused.states, SaveState::NOT_READY));
  EXPECT(tiers.demote() == 4);
  EXPECT(tiers.memory.store({11}) == 1);
  tiers.memory.directory.room().protect_unsaved(false);
  EXPECT(tiers.memory.store({12, 13, 14, 15}) == 4);
  EXPECT(tiers.is_sound());
}

TEST(only_chunks_used_twice_are_admitted_to_the_lower_tier) {
  Tiers tiers(6, 16);
  tiers.memory.directory.demotion().remember_evicted(64);
  tiers.memory.directory.demotion().admit(Admitted::USED_AGAIN);
  EXPECT(tiers.memory.store({1, 2, 3}) == 3);
  EXPECT(tiers.memory.store({11, 12}) == 2);
  EXPECT(tiers.demote() == 0);
  const Hold used = tiers.memory.acquire({1, 2});
  EXPECT(tiers.memory.directory.release(used.id, ++tiers.memory.now));
  EXPECT(tiers.demote() == 2);
  EXPECT(tiers.demote() == 0);
  // What is not worth a place may go though it is protected.
  tiers.memory.directory.room().protect_unsaved(true);
  EXPECT(tiers.memory.store({21, 22, 23, 24}) == 4);
  tiers.memory.directory.room().protect_unsaved(false);
  EXPECT(tiers.memory.lookup({11}) == 0);
  // What comes again after it was evicted has been touched before.
  EXPECT(tiers.memory.store({11, 12}) == 2);
  EXPECT(tiers.demote() == 2);
  tiers.memory.directory.demotion().admit(Admitted::ALL);
  while (tiers.demote() > 0) {
  }
  EXPECT(tiers.memory.directory.count_unsaved() == 0);
  EXPECT(tiers.is_sound());
}

TEST(ghosts_are_remembered_for_their_whole_time_and_false_ghosts_are_few) {
  GhostFilter ghosts(1000);
  std::mt19937_64 random(seed());
  const auto draw = [&] { return ChunkKey{{random(), random(), random(), random()}}; };
  std::vector<ChunkKey> keys;
  for (size_t number = 0; number < 5000; ++number) {
    keys.push_back(draw());
    ghosts.add(keys.back());
    const size_t first = keys.size() > 1000 ? keys.size() - 1000 : 0;
    EXPECT(ghosts.contains(keys[first]));
  }
  size_t strangers = 0;
  for (size_t number = 0; number < 10000; ++number) {
    strangers += ghosts.contains(draw()) ? 1U : 0U;
  }
  EXPECT(strangers < 100);
  // What was added before the last 2000 is a stranger again: taken for an acquaintance as often as these, not never.
  const auto forgotten = [&](const ChunkKey& key) { return !ghosts.contains(key); };
  EXPECT(std::count_if(keys.begin(), keys.begin() + 3000, forgotten) > 3000 - 60);
}

TEST(files_are_restored_into_their_former_slots) {
  std::vector<std::pair<uint64_t, uint64_t>> places;
  Tiers before(8, 32);
  EXPECT(before.memory.store({1, 2, 3}) == 3);
  EXPECT(before.demote() == 3);
  EXPECT(before.memory.store({2, 31}, std::nullopt) == 0);
  EXPECT(before.memory.store({41, 42}) == 2);
  while (before.demote() > 0) {
  }
  const Hold chain = before.files.acquire(before.memory.owner, pack({1, 2, 3}).data(), 3);
  const Columns columns = *before.files.columns({chain.id});
  Tiers after(8, 32);
  const auto restore = [&](uint64_t id, std::optional<uint64_t> parent, size_t position) {
    std::optional<ChunkKey> above;
    if (parent) {
      above = key_of(*parent);
    }
    return after.files.restore(after.memory.owner, after.in_files, above, key_of(id),
                               PageIndex(static_cast<uint32_t>(columns.offsets[position] / PAGE_BYTES)),
                               columns.generations[position]);
  };
  EXPECT(!restore(2, 1, 1));  // its parent is not there
  EXPECT(restore(1, std::nullopt, 0));
  EXPECT(!restore(1, std::nullopt, 0));
  EXPECT(!restore(7, 1, 0));  // the place is taken
  EXPECT(restore(3, 1, 2));
  EXPECT(!after.files.restore(after.memory.owner, after.in_files, std::nullopt, key_of(9), PageIndex(1), 5));
  EXPECT(!after.files.restore(after.memory.owner, after.in_files, std::nullopt, key_of(9), PageIndex(1 << 20), 5));
  after.files.finish_restore();
  EXPECT(after.is_sound());
  EXPECT(after.memory.lookup({1, 3}) == 2);
  EXPECT(after.load({1, 3}) == 2);
  EXPECT(after.memory.store({51, 52, 53, 54, 55, 56, 57, 58}) == 8);
  while (after.demote() > 0) {
    EXPECT(after.is_sound());
  }
  EXPECT(after.is_sound());
}

TEST(random_operations_keep_both_tiers_sound) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    Tiers tiers(10, 24, seed % 2 == 0 ? PolicyKind::LRU : PolicyKind::CLASS_QUEUES);
    const auto chain = [&] {
      std::vector<uint64_t> ids;
      uint64_t id = 1 + random() % 3;
      for (size_t length = 1 + random() % 7; length > 0; --length) {
        ids.push_back(id);
        id = id * 3 + random() % 2;
      }
      return ids;
    };
    for (int step = 0; step < 400; ++step) {
      const std::vector<uint64_t> ids = chain();
      const uint64_t pick = random() % 100;
      tiers.memory.directory.room().protect_unsaved(random() % 4 == 0);
      tiers.memory.directory.demotion().admit(static_cast<Admitted>(random() % 4), 0.2);
      if (random() % 16 == 0) {
        EXPECT(tiers.memory.directory.demotion().forget_written(0, UINT32_MAX) == 0);
        tiers.files.retention().expire_due(tiers.memory.now);
      }
      if (pick < 34) {
        static_cast<void>(tiers.memory.store(ids));
      } else if (pick < 40) {
        const Retention retention{static_cast<uint8_t>(random() % 101), static_cast<uint32_t>(random() % 3 * 40)};
        tiers.memory.now += random() % 100'000'000;
        static_cast<void>(tiers.memory.directory.retention().retain(tiers.memory.owner, pack(ids).data(),
                                                        std::vector<Retention>(ids.size(), retention), tiers.memory.now));
      } else if (pick < 60) {
        static_cast<void>(tiers.demote(random() % 5 != 0, random() % 3 == 0));
      } else if (pick < 90) {
        const bool lands = random() % 8 != 0;
        const size_t found = tiers.memory.lookup(ids);
        EXPECT(tiers.load(ids, lands) <= found);
      } else if (pick < 93) {
        static_cast<void>(drop(tiers.memory.directory, key_of(ids.back())));
      } else if (pick < 96) {
        static_cast<void>(drop(tiers.files, key_of(ids.back())));
      } else {
        Directory& flushed = random() % 2 == 0 ? tiers.memory.directory : tiers.files;
        static_cast<void>(flush(flushed, std::nullopt, random() % (tiers.memory.now + 1)));
      }
      if (!tiers.is_sound()) {
        std::printf("  seed %llu step %d pick %llu\n", static_cast<unsigned long long>(seed), step,
                    static_cast<unsigned long long>(pick));
        EXPECT(false);
        return;
      }
    }
  }
}

// Else the one who waits for room waits for ever: the next victim must be among the first that are written down.
TEST(the_next_victim_is_among_the_first_to_be_demoted) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    Tiers tiers(40, 400, PolicyKind::CLASS_QUEUES);
    tiers.memory.directory.room().protect_unsaved(true);
    for (uint64_t request = 0; request < 200; ++request) {
      tiers.memory.now += random() % 3'000'000'000;
      std::vector<uint64_t> ids = range(1 + random() % 40 * 100, 1 + random() % 12);
      if (random() % 4 == 0) {
        static_cast<void>(tiers.memory.directory.retention().retain(tiers.memory.owner, pack(ids).data(),
                                                        std::vector<Retention>(ids.size(), {50, 100}), tiers.memory.now));
      }
      int rounds = 0;
      while (tiers.memory.store(ids) < ids.size() && ++rounds < 40) {
        EXPECT(tiers.demote() > 0);
      }
      EXPECT(rounds < 40);
    }
    EXPECT(tiers.is_sound());
  }
}

TEST(a_parent_that_was_demoted_meanwhile_stays_before_a_child_that_was_used) {
  Tiers tiers(8, 16);
  EXPECT(tiers.memory.store({1, 2}) == 2);
  EXPECT(tiers.memory.store({1, 3}) == 2);
  EXPECT(tiers.memory.store({4}) == 1);
  const Hold demoted = tiers.memory.directory.pin_unsaved(64, WriteOrder::COLDEST);  // 1 and 2
  EXPECT(demoted.chunks == 2);
  const Hold used = tiers.memory.acquire({1, 3});
  EXPECT(tiers.memory.directory.release(used.id, ++tiers.memory.now));
  EXPECT(tiers.memory.directory.unpin(demoted.id));
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.store(range(10, 8)) == 8);  // evicts all of them, leaves first
  EXPECT(tiers.is_sound());
}

TEST(chains_longer_than_the_lower_tier_are_not_written_in_turns_without_end) {
  Tiers tiers(256, 16);
  for (const uint64_t first : {1000U, 2000U, 3000U}) {
    EXPECT(tiers.memory.store(range(first, 80)) == 80);
  }
  size_t written = 0;
  for (uint32_t turn = 0; turn < 20; ++turn) {
    written += tiers.demote_all();
  }
  EXPECT(written >= 16);
  EXPECT(written <= 48);  // as much of each chain as there is room for, once
  EXPECT(tiers.is_sound());
  const Hold lease = tiers.memory.acquire(range(1000, 80));
  EXPECT(tiers.memory.directory.release(lease.id, ++tiers.memory.now));
  size_t again = 0;
  for (uint32_t turn = 0; turn < 20; ++turn) {
    again += tiers.demote_all();
  }
  EXPECT(again <= 16);  // what was used again, once more
  EXPECT(tiers.is_sound());
}
