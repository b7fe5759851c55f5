// The directory: each verb alone.
#include <chrono>
#include <set>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(plan_follows_the_capacity) {
  const auto large = DirectoryGeometry::plan(uint64_t{1} << 30, 64 << 20, 1000);
  EXPECT(large->arena.segment_bytes == 64 << 20);
  EXPECT(large->arena.segments == 17);
  EXPECT(large->index.slots == 1600);
  EXPECT(large->index.max_entries() == 1000);
  const auto medium = DirectoryGeometry::plan((200 << 20) + 1, 64 << 20, 10);
  EXPECT(medium->arena.segment_bytes == 26 << 20);
  EXPECT(medium->arena.segments == 9);
  const auto tiny = DirectoryGeometry::plan(1, 64 << 20, 1);
  EXPECT(tiny->arena.segment_bytes == PAGE_BYTES);
  EXPECT(tiny->arena.segments == 2);
  EXPECT(!DirectoryGeometry::plan(0, 64 << 20, 1));
  EXPECT(!DirectoryGeometry::plan(1, 64 << 20, 0));
  EXPECT(!DirectoryGeometry::plan(UINT64_MAX, 64 << 20, 1));
  EXPECT(!DirectoryGeometry::plan(1, 64 << 20, UINT32_MAX));
}

TEST(reserved_chunks_are_invisible_until_committed_in_order) {
  Pool pool(20 * CHUNK);
  const Reservation made = pool.reserve({1, 2, 3});
  EXPECT(all_are(made.states, SaveState::RESERVED));
  EXPECT(pool.lookup({1, 2, 3}) == 0);
  EXPECT(pool.acquire({1}).id == 0);
  EXPECT(pool.view->generation_at(SlotAddress::unpacked(made.slots[0])) == 0);
  EXPECT(pool.commit(made, 1, 1)[0] == static_cast<uint8_t>(SaveState::NO_PARENT));
  EXPECT(pool.commit(made, 0, 2) == std::vector<uint8_t>({7, 7}));
  EXPECT(pool.commit(made, 0, 1) == std::vector<uint8_t>({7}));
  EXPECT(pool.commit(made, 3, 1)[0] == static_cast<uint8_t>(SaveState::EXPIRED));
  EXPECT(pool.commit(made, SIZE_MAX, 1)[0] == static_cast<uint8_t>(SaveState::EXPIRED));
  EXPECT(pool.lookup({1, 2, 3}) == 2);
  EXPECT(pool.view->generation_at(SlotAddress::unpacked(made.slots[1])) == made.generations[1]);
  EXPECT(pool.view->checksum_at(SlotAddress::unpacked(made.slots[1]), 2) == 6);
  EXPECT(all_are(pool.reserve({3}, 2).states, SaveState::PENDING));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(!pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.stats().aborted_chunks == 1);
  EXPECT(pool.directory.stats().used_bytes == 2 * CHUNK);
  const Reservation again = pool.reserve({1, 2, 3});
  EXPECT(again.states == std::vector<uint8_t>({0, 0, 1}));
  EXPECT(again.generations[2] > made.generations[2]);
  EXPECT(pool.commit(again, 1, 1)[0] == static_cast<uint8_t>(SaveState::EXPIRED));
  EXPECT(pool.commit(again, 0, 1)[0] == static_cast<uint8_t>(SaveState::STORED));
  EXPECT(pool.is_sound());
}

TEST(chunks_behind_another_writers_are_published_with_those) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store({1}) == 1);
  const Reservation front = pool.reserve({1, 2, 3});
  const Reservation tail = pool.reserve({1, 2, 3, 4, 5});
  EXPECT(tail.states == std::vector<uint8_t>({0, 2, 2, 1, 1}));
  const Reservation branch = pool.reserve({24}, 3);  // it begins behind a chunk of another's
  EXPECT(branch.states == std::vector<uint8_t>({1}));
  EXPECT(pool.commit(tail, 0, 2) == std::vector<uint8_t>({16, 16}));
  EXPECT(pool.commit(tail, 1, 1) == std::vector<uint8_t>({16}));
  EXPECT(pool.directory.end_reservation(tail.id, ++pool.now));
  EXPECT(pool.commit(branch, 0, 1) == std::vector<uint8_t>({16}));
  EXPECT(pool.directory.end_reservation(branch.id, ++pool.now));
  EXPECT(pool.is_sound());
  EXPECT(pool.reserve({1, 2, 3, 4, 5}).id == 0);  // all are on their way
  EXPECT(pool.lookup({1, 2, 3, 4}) == 1);
  EXPECT(pool.directory.stats().writing == 5);
  EXPECT(pool.commit(front, 0, 1) == std::vector<uint8_t>({7}));
  EXPECT(pool.lookup({1, 2, 3, 4}) == 2);
  EXPECT(pool.commit(front, 1, 1) == std::vector<uint8_t>({7}));
  EXPECT(pool.lookup({1, 2, 3, 4, 5}) == 5);
  EXPECT(pool.acquire({1, 2, 3, 24}).chunks == 4);
  EXPECT(pool.view->checksum_at(SlotAddress::unpacked(tail.slots[4]), 2) == 6);
  EXPECT(pool.directory.end_reservation(front.id, ++pool.now));
  EXPECT(pool.directory.stats().writing == 0);
  EXPECT(pool.is_sound());
}

TEST(chunks_behind_a_save_that_is_given_up_go_with_it) {
  for (const bool expires : {false, true}) {
    Pool pool(20 * CHUNK);
    const Reservation front = pool.reserve({1, 2});
    const Reservation tail = pool.reserve({1, 2, 3, 4});
    const Reservation late = pool.reserve({1, 2, 3, 4, 5});
    EXPECT(late.states == std::vector<uint8_t>({2, 2, 2, 2, 1}));
    EXPECT(pool.commit(tail, 0, 2) == std::vector<uint8_t>({16, 16}));
    EXPECT(pool.directory.end_reservation(tail.id, ++pool.now));
    EXPECT(pool.commit(front, 0, 1) == std::vector<uint8_t>({7}));
    if (expires) {
      EXPECT(pool.directory.expire_part(front.id, SIZE_MAX, ++pool.now));
      EXPECT(pool.directory.stats().zombies == 4);  // 2 and 5 may still be written, 3 and 4 are held by `late`
    } else {
      EXPECT(pool.directory.end_reservation(front.id, ++pool.now));
    }
    EXPECT(pool.is_sound());
    EXPECT(pool.commit(late, 0, 1) == std::vector<uint8_t>({static_cast<uint8_t>(SaveState::NO_PARENT)}));
    EXPECT(pool.directory.end_reservation(late.id, ++pool.now));
    EXPECT(pool.is_sound());
    EXPECT(pool.directory.end_reservation(front.id, ++pool.now) == expires);
    EXPECT(pool.lookup({1, 2}) == 1);
    EXPECT(pool.directory.stats().used_bytes == CHUNK);
    EXPECT(pool.directory.stats().aborted_chunks == 4);
    EXPECT(pool.directory.stats().zombies == 0);
    EXPECT(pool.store({1, 2, 3, 4}) == 4);
    EXPECT(pool.is_sound());
  }
}

TEST(chunks_wait_for_another_writers_that_lie_between_them) {
  for (const bool is_given_up : {false, true}) {
    Pool pool(20 * CHUNK);
    const Reservation front = pool.reserve({1});
    const Reservation made = pool.reserve({1, 2});
    const Reservation between = pool.reserve({3}, 2);
    const auto more = pool.directory.reserve_more(made.id, pack({3, 4}).data(), 2, ++pool.now);
    EXPECT(more.states == std::vector<uint8_t>({2, 1}));
    EXPECT(pool.commit(made, 0, 2) == std::vector<uint8_t>({16, 16}));
    EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
    EXPECT(pool.is_sound());
    if (is_given_up) {
      EXPECT(pool.directory.end_reservation(between.id, ++pool.now));
      EXPECT(pool.is_sound());
    }
    EXPECT(pool.commit(front, 0, 1) == std::vector<uint8_t>({7}));
    EXPECT(pool.is_sound());
    EXPECT(pool.lookup({1, 2, 3, 4}) == 2);
    if (!is_given_up) {
      EXPECT(pool.commit(between, 0, 1) == std::vector<uint8_t>({7}));
      EXPECT(pool.lookup({1, 2, 3, 4}) == 4);
    }
    EXPECT(pool.is_sound());
  }
}

TEST(so_many_chunks_follow_those_of_others_that_one_call_can_publish_them) {
  constexpr size_t MOST = 2048;
  Pool pool(3000 * CHUNK, 3000);
  const Reservation front = pool.reserve({1});
  const auto states = pool.reserve(range(1, 2600)).states;
  EXPECT(states[0] == static_cast<uint8_t>(SaveState::PENDING));
  EXPECT(std::count(states.begin(), states.end(), static_cast<uint8_t>(SaveState::RESERVED)) == MOST);
  EXPECT(states.back() == static_cast<uint8_t>(SaveState::NO_PARENT));
  EXPECT(pool.is_sound());
  EXPECT(pool.reserve({4000}, 2).states == std::vector<uint8_t>({static_cast<uint8_t>(SaveState::NO_PARENT)}));
  EXPECT(pool.directory.end_reservation(front.id, ++pool.now));
  EXPECT(pool.reserve({1, 2, 3}).states == std::vector<uint8_t>({1, 1, 1}));
  EXPECT(pool.is_sound());
}

TEST(what_waits_counts_for_its_writer_until_it_is_found) {
  Pool pool(20 * CHUNK);
  const HolderId holder(1);
  HolderAccounts& accounts = pool.directory.shares().accounts();
  accounts.join(holder, 7);
  const Reservation front = pool.reserve({1});
  const Reservation tail = pool.directory.reserve(pool.owner, pool.small, std::nullopt, pack({1, 2, 3}).data(), 3, ++pool.now, holder);
  EXPECT(pool.commit(tail, 0, 2) == std::vector<uint8_t>({16, 16}));
  EXPECT(pool.directory.end_reservation(tail.id, ++pool.now));
  accounts.leave(holder);
  EXPECT(accounts.find(holder) != nullptr && accounts.find(holder)->bytes.leased == 2 * pool.directory.shares().taken_bytes(pool.small));
  EXPECT(pool.is_sound());
  EXPECT(pool.commit(front, 0, 1) == std::vector<uint8_t>({7}));
  EXPECT(accounts.find(holder) == nullptr);
  EXPECT(pool.is_sound());
}

TEST(oldest_leaf_goes_first_and_held_chunks_never) {
  Pool pool(4 * CHUNK);
  EXPECT(pool.store({1, 2}) == 2);
  EXPECT(pool.store({11, 12}) == 2);
  EXPECT(pool.store({21}) == 1);
  EXPECT(pool.lookup({1, 2}) == 1);  // the leaf of the oldest chain went
  const Hold hold = pool.acquire({1});
  EXPECT(pool.store({31, 32, 33}) == 3);
  EXPECT(pool.lookup({1}) == 1);
  EXPECT(pool.lookup({11}) == 0);
  EXPECT(pool.lookup({21}) == 0);
  EXPECT(pool.directory.stats().evicted_chunks == 4);
  const Reservation full = pool.reserve({41, 42, 43, 44, 45});
  EXPECT(full.states == std::vector<uint8_t>({1, 1, 1, 4, 3}));
  EXPECT(pool.is_sound());
  EXPECT(pool.reserve({51, 52}).states == std::vector<uint8_t>({4, 3}));
  EXPECT(pool.directory.stats().evicted_chunks == 7);
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(!pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.directory.end_reservation(full.id, ++pool.now));
  EXPECT(pool.lookup({1}) == 1);
  EXPECT(pool.is_sound());
}

TEST(prefix_must_be_a_chain_of_one_namespace_from_the_root) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(pool.store({11}) == 1);
  EXPECT(pool.acquire({2, 3}).id == 0);
  EXPECT(pool.acquire({1, 3}).chunks == 1);
  EXPECT(pool.acquire({1, 1}).chunks == 1);
  EXPECT(pool.acquire({1, 2, 3, 4}).chunks == 3);
  const NamespaceId other = pool.directory.add_namespace();
  EXPECT(pool.directory.acquire(other, pack({1}).data(), 1).id == 0);
  const auto foreign = pool.directory.reserve(other, pool.small, std::nullopt, pack({1}).data(), 1, 1);
  EXPECT(all_are(foreign.states, SaveState::FOREIGN));
  EXPECT(all_are(pool.reserve({12}, 99).states, SaveState::NO_PARENT));
  EXPECT(all_are(pool.reserve({2}, 11).states, SaveState::NO_PARENT));
  const Reservation twice = pool.reserve({21, 21});
  EXPECT(twice.states == std::vector<uint8_t>({1, 3}));
  EXPECT(pool.is_sound());
}

TEST(a_leaf_is_held_with_its_whole_prefix_or_not_at_all) {
  Pool pool(20 * CHUNK);
  const NamespaceId other = pool.directory.add_namespace();
  EXPECT(pool.store({1, 2, 3}) == 3);
  const auto made = pool.directory.reserve(other, pool.small, std::nullopt, pack({11, 12, 13}).data(), 3, 1);
  const auto both = [&](uint64_t first, uint64_t second, size_t n) {
    const auto one = pack({first});
    const auto two = pack({second});
    return pool.directory.hold_hit(std::vector{HitRun{pool.owner, one, n, true}, HitRun{other, two, n, true}}, {});
  };
  EXPECT(both(3, 13, 3).empty());  // the other's are just being written
  EXPECT(pool.commit(made, 0, 3).size() == 3);
  const auto holds = both(3, 13, 3);
  EXPECT(holds[0].chunks == 3);
  EXPECT(holds[1].chunks == 3);
  EXPECT(pool.directory.columns({holds[1].id})->generations[0] == made.generations[0]);
  EXPECT(both(2, 12, 3).empty());   // not that long
  EXPECT(both(3, 13, 2).empty());   // longer
  EXPECT(both(3, 3, 3).empty());    // another namespace's
  EXPECT(both(3, 99, 3).empty());   // not stored
  EXPECT(pool.directory.stats().holds == 2);
  EXPECT(pool.is_sound());
}

TEST(chunks_without_a_parent_are_held_together_or_not_at_all) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  for (uint64_t alone = 11; alone < 15; ++alone) {
    EXPECT(pool.store({alone}) == 1);
  }
  const auto hold = [&](const std::vector<uint64_t>& ids) {
    const auto keys = pack(ids);
    return pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, ids.size(), false}}, {}, ++pool.now);
  };
  EXPECT(hold({11, 12, 99}).empty());  // not stored
  EXPECT(hold({11, 2}).empty());       // behind another one
  EXPECT(pool.directory.stats().holds == 0);
  const auto first = hold({11, 12, 13});
  const auto second = hold({14, 12, 12});
  EXPECT(first.front().chunks == 3 && second.front().chunks == 3);
  EXPECT(pool.directory.stats().held == 4 && pool.is_sound());
  EXPECT(drop(pool.directory, key_of(12)) == 1);
  EXPECT(pool.directory.holds().count_whole({first.front().id, second.front().id}) == std::vector<size_t>({1, 1}));
  EXPECT(pool.directory.columns({first.front().id})->levels[1] == NO_LEVEL);
  EXPECT(pool.directory.release_part(second.front().id, 2, ++pool.now) == 2 && pool.is_sound());
  EXPECT(pool.directory.release(second.front().id, ++pool.now) && pool.directory.release(first.front().id, ++pool.now));
  EXPECT(pool.directory.stats().held == 0 && pool.is_sound());
}

TEST(chunks_without_a_parent_are_evicted_from_the_first_one_of_their_hold_on) {
  for (const bool is_in_parts : {false, true}) {
    Pool pool(6 * CHUNK);
    for (uint64_t alone = 11; alone < 17; ++alone) {
      EXPECT(pool.store({alone}) == 1);
    }
    const auto keys = pack(range(11, 6));
    const Hold held = pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, 6, false}}, {}, ++pool.now).front();
    while (is_in_parts && pool.directory.release_part(held.id, 2, ++pool.now) == 2) {
      EXPECT(pool.is_sound());
    }
    EXPECT(pool.directory.release(held.id, ++pool.now) == !is_in_parts);
    for (uint64_t gone = 11; gone < 17; ++gone) {
      EXPECT(pool.lookup({gone}) == 1 && pool.store({gone + 100}) == 1);
      EXPECT(pool.lookup({gone}) == 0);
    }
    EXPECT(pool.is_sound());
  }
}

TEST(each_chunk_without_a_parent_is_used_with_the_hold_that_it_is_in) {
  const auto run = [](bool is_one_hold) {
    Pool pool(40 * CHUNK, 1000, true, 64 << 20, PolicyKind::CLASS_QUEUES);
    for (uint64_t alone = 11; alone < 19; ++alone) {
      EXPECT(pool.store({alone}) == 1);
    }
    const auto keys = pack(range(11, 8));
    for (int use = 0; use < 20; ++use) {
      std::vector<HoldId> holds;
      if (is_one_hold) {
        holds.push_back(pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, 8, false}}, {}, ++pool.now).front().id);
      }
      for (uint64_t alone = 11; !is_one_hold && alone < 19; ++alone) {
        holds.push_back(pool.acquire({alone}).id);
      }
      for (const HoldId hold : holds) {
        EXPECT(pool.directory.release(hold, pool.now += 1'000'000'000));
      }
    }
    EXPECT(pool.is_sound());
    std::vector<bool> uses;
    for (uint64_t alone = 11; alone < 19; ++alone) {
      const auto place = pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, 8, false}}, {}, pool.now);
      const RecordId id = pool.directory.holds().record_of(place.front().id, static_cast<size_t>(alone - 11)).value();
      EXPECT(pool.directory.release(place.front().id, pool.now));
      uses.push_back(pool.directory.record(id).is_used);
    }
    return uses;
  };
  EXPECT(run(true) == run(false));
  EXPECT(run(true) == std::vector<bool>(8, false));  // each use was learned from
}

TEST(holds_on_chunks_without_a_parent_become_one) {
  Pool pool(20 * CHUNK);
  const HolderId one(5);
  std::vector<HoldId> holds;
  for (uint64_t alone = 11; alone < 14; ++alone) {
    EXPECT(pool.store({alone}) == 1);
    holds.push_back(pool.acquire({alone}).id);
  }
  EXPECT(pool.directory.shares().charge(holds, one));
  EXPECT(pool.directory.join_holds({holds[0], 999}) == 0);
  const HoldId joined = pool.directory.join_holds(holds);
  EXPECT(pool.directory.holds().find_hold(joined)->size() == 3);
  EXPECT(pool.directory.shares().holder_of(joined) == one && !pool.directory.shares().is_charged(holds[0]));
  EXPECT(pool.directory.stats().holds == 1 && pool.is_sound());
  EXPECT(*pool.directory.holds().key_of(joined, 2) == key_of(13));
  EXPECT(pool.directory.release(joined, ++pool.now) && pool.is_sound());
}

TEST(an_expired_reservation_holds_its_slots_until_it_ends) {
  Pool pool(4 * CHUNK);
  const Reservation made = pool.reserve({1, 2, 3, 4});
  EXPECT(pool.commit(made, 0, 1)[0] == 7);
  EXPECT(pool.directory.expire_part(made.id, SIZE_MAX, ++pool.now));
  EXPECT(pool.directory.expire_part(made.id, SIZE_MAX, ++pool.now));
  EXPECT(pool.directory.stats().zombies == 3);
  EXPECT(pool.lookup({1, 2}) == 1);
  EXPECT(pool.commit(made, 1, 1)[0] == static_cast<uint8_t>(SaveState::EXPIRED));
  EXPECT(pool.is_sound());
  const Reservation after = pool.reserve({11, 12});  // takes the place of chunk 1; the zombies stay
  EXPECT(after.states == std::vector<uint8_t>({1, 4}));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.stats().zombies == 0);
  EXPECT(pool.directory.stats().used_bytes == CHUNK);
  EXPECT(pool.is_sound());
}

TEST(a_dropped_chunk_is_gone_at_once_and_its_slot_is_free_unless_somebody_writes) {
  Pool pool(8 * CHUNK);
  EXPECT(pool.store({1, 2, 3, 4}) == 4);
  EXPECT(pool.store({13}, 2) == 1);
  const Hold hold = pool.acquire({1, 2, 3});
  const auto copy = pool.directory.duplicate({hold.id});
  const auto before = pool.directory.columns({hold.id});
  const Reservation made = pool.reserve({24}, 3);
  EXPECT(drop(pool.directory, key_of(2)) == 4);  // 2, 3, 4, 13; 24 was never stored
  EXPECT(drop(pool.directory, key_of(2)) == 0);
  EXPECT(pool.lookup({1, 2}) == 1);
  EXPECT(pool.view->generation_at(SlotAddress::unpacked(before->slots[1])) == 0);
  EXPECT(pool.directory.columns({hold.id})->levels == std::vector<uint8_t>({1, NO_LEVEL, NO_LEVEL}));
  EXPECT(pool.commit(made, 0, 1)[0] == static_cast<uint8_t>(SaveState::NO_PARENT));
  EXPECT(pool.is_sound());
  EXPECT(pool.store({2, 3}, 1) == 2);  // stored anew beside the old bytes
  EXPECT(pool.directory.stats().used_bytes == 4 * CHUNK);  // 24 may still be written to
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.stats().zombies == 2);
  EXPECT(pool.directory.release(copy->front(), ++pool.now));
  EXPECT(pool.directory.stats().used_bytes == 3 * CHUNK);
  EXPECT(pool.is_sound());
}

TEST(several_holds_are_read_and_duplicated_one_after_the_other_or_not_at_all) {
  Pool pool(8 * CHUNK);
  const Reservation made = pool.reserve({1, 2, 3});
  EXPECT(pool.commit(made, 0, 3).size() == 3);
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  const HoldId shorter = pool.acquire({1}).id;
  const HoldId longer = pool.acquire({1, 2, 3}).id;
  const HoldId unknown = longer + 99;
  const std::vector<uint64_t>& all = made.generations;
  EXPECT(pool.directory.columns({longer, shorter})->generations == std::vector<uint64_t>({all[0], all[1], all[2], all[0]}));
  EXPECT(pool.directory.columns({})->levels.empty());
  EXPECT(!pool.directory.columns({longer, unknown}));
  EXPECT(pool.directory.holds().keys_of({longer, shorter}) ==
         std::vector<ChunkKey>({key_of(1), key_of(2), key_of(3), key_of(1)}));
  EXPECT(!pool.directory.duplicate({longer, unknown}) && pool.directory.stats().holds == 2);
  const auto copies = pool.directory.duplicate({longer, shorter});
  EXPECT(pool.directory.columns(*copies)->generations == std::vector<uint64_t>({all[0], all[1], all[2], all[0]}));
  for (const HoldId hold : {shorter, longer, copies->front(), copies->back()}) {
    EXPECT(pool.directory.release(hold, ++pool.now));
  }
  EXPECT(pool.directory.stats().held == 0 && pool.is_sound());
}

TEST(a_discarded_chunk_is_removed_like_a_dropped_one_and_counts_as_flushed) {
  Pool pool(8 * CHUNK);
  EXPECT(pool.store({1, 2}) == 2);
  const Hold hold = pool.acquire({1});
  EXPECT(pool.directory.discard(key_of(3)) == 0);
  EXPECT(pool.directory.discard(key_of(1)) == 2);
  EXPECT(pool.directory.discard(key_of(1)) == 0);
  EXPECT(pool.lookup({1}) == 0);
  EXPECT(pool.directory.stats().zombies == 1);
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.directory.stats().used_bytes == 0);
  EXPECT(pool.directory.stats().flushed_chunks == 2);
  EXPECT(pool.directory.stats().dropped_chunks == 0);
  EXPECT(pool.is_sound());
}

TEST(flush_takes_what_is_old_and_not_held) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  const uint64_t middle = pool.now + 1;
  pool.now += 10;
  EXPECT(pool.store({11, 12}) == 2);
  const NamespaceId other = pool.directory.add_namespace();
  EXPECT(flush(pool.directory, other, UINT64_MAX).chunks == 0);
  const Hold hold = pool.acquire({1});
  const FlushResult old = flush(pool.directory, pool.owner, middle);
  EXPECT(old.chunks == 2);
  EXPECT(old.bytes == 2 * CHUNK);
  EXPECT(old.skipped == 1);
  EXPECT(pool.lookup({11, 12}) == 2);
  EXPECT(pool.is_sound());
  EXPECT(flush(pool.directory, std::nullopt, UINT64_MAX).chunks == 2);
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(flush(pool.directory, std::nullopt, UINT64_MAX).chunks == 1);
  EXPECT(pool.directory.stats().used_bytes == 0);
  EXPECT(pool.is_sound());
}

TEST(a_flush_in_parts_takes_a_chain_from_its_leaf_and_leaves_what_comes_meanwhile) {
  Pool pool(40 * CHUNK);
  EXPECT(pool.store({1, 2, 3, 4, 5, 6, 7, 8}) == 8);
  FlushWalk walk(pool.directory, std::nullopt, ++pool.now);
  EXPECT(walk.advance(3));
  EXPECT(walk.result().chunks == 3);
  EXPECT(pool.lookup({1, 2, 3, 4, 5, 6, 7, 8}) == 5);
  EXPECT(pool.is_sound());
  EXPECT(pool.store({11, 12}) == 2);        // new
  EXPECT(pool.store({16, 17}, 5) == 2);     // behind what would have gone next
  while (walk.advance(1)) {
    EXPECT(pool.is_sound());
  }
  EXPECT(pool.lookup({1, 2, 3, 4, 5, 16, 17}) == 7);
  EXPECT(pool.lookup({11, 12}) == 2);
  EXPECT(walk.result().chunks == 3);
  EXPECT(flush(pool.directory, std::nullopt, UINT64_MAX).chunks == 9);
  EXPECT(pool.directory.stats().used_bytes == 0);
}

TEST(a_flush_of_some_namespaces_leaves_the_others) {
  Pool pool(40 * CHUNK);
  EXPECT(pool.store({1, 2, 3}) == 3);
  const NamespaceId mine = pool.owner;
  pool.owner = pool.directory.add_namespace();
  EXPECT(pool.store({11, 12}) == 2);
  FlushWalk walk(pool.directory, std::vector<NamespaceId>{mine, pool.directory.add_namespace()}, UINT64_MAX);
  while (walk.advance(2)) {
  }
  EXPECT(walk.result().chunks == 3);
  EXPECT(pool.lookup({11, 12}) == 2);
  EXPECT(pool.is_sound());
}

TEST(memory_that_clients_map_is_compared_in_parts) {
  Pool pool(40 * CHUNK);
  EXPECT(pool.store({1, 2, 3, 4, 5}) == 5);
  std::vector<std::string> broken;
  uint64_t cursor = 0;
  size_t parts = 0;
  do {
    cursor = pool.directory.verify_shared(cursor, 2, broken);
    ++parts;
  } while (cursor != 0);
  EXPECT(parts > 5);
  EXPECT(broken.empty());
  EXPECT(pool.directory.verify(false).empty());
  // A client cannot do this: it maps the index for reading.
  const auto entry = pool.view->lookup(pack({3}).data(), 1, std::vector<uint8_t>(1).data());
  EXPECT(entry == 1);
  auto* words = reinterpret_cast<uint64_t*>(pool.index->data() + PAGE_BYTES);
  for (uint64_t at = 0; at < pool.geometry.index.slots * 8; ++at) {
    if (words[at] == key_of(3).words[0]) {
      words[at] ^= 1;
    }
  }
  cursor = 0;
  do {
    cursor = pool.directory.verify_shared(cursor, 2, broken);
  } while (cursor != 0);
  EXPECT(!broken.empty());
  EXPECT(pool.directory.verify(false).empty());
}

TEST(memory_that_is_not_ready_says_so) {
  Pool pool(16 * CHUNK, 1000, false);
  EXPECT(pool.directory.arena().is_behind());
  EXPECT(all_are(pool.reserve({1}).states, SaveState::NOT_READY));
  pool.directory.mark_segment_ready(3);
  EXPECT(pool.reserve({1, 2, 3}).states == std::vector<uint8_t>({1, 1, 5}));
  EXPECT(pool.is_sound());
}

TEST(record_limit_evicts_like_bytes_do) {
  Pool pool(100 * CHUNK, 5);
  EXPECT(pool.store({1, 2, 3}) == 3);
  EXPECT(pool.store({11, 12, 13}) == 3);
  EXPECT(pool.lookup({1, 2, 3}) == 2);
  EXPECT(pool.store(range(20, 7)) == 5);
  EXPECT(pool.directory.stats().evicted_chunks == 6);
  EXPECT(pool.is_sound());
}

TEST(classes_exchange_segments_by_age) {
  Pool pool(64 * CHUNK, 1000, true, 8 * CHUNK);
  const ClassId large = *pool.directory.add_class(8 * CHUNK, EXTENTS);
  EXPECT(pool.store(range(100, 64)) == 64);
  const auto reserve_large = [&](uint64_t id) {
    return pool.directory.reserve(pool.owner, large, std::nullopt, pack({id}).data(), 1, ++pool.now);
  };
  for (uint64_t id = 1; id <= 8; ++id) {
    const auto made = reserve_large(id);
    EXPECT(all_are(made.states, SaveState::RESERVED));
    EXPECT(pool.commit(made, 0, 1)[0] == 7);
    EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
    EXPECT(pool.is_sound());
  }
  EXPECT(pool.directory.stats().evicted_chunks == 64);
  EXPECT(pool.lookup({8}) == 1);
  EXPECT(pool.store(range(300, 64)) == 64);
  EXPECT(pool.lookup({8}) == 0);
  EXPECT(pool.is_sound());
  const Hold hold = pool.acquire(range(300, 64));
  EXPECT(all_are(reserve_large(9).states, SaveState::FULL));
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(all_are(reserve_large(9).states, SaveState::RESERVED));
  EXPECT(pool.is_sound());
}

TEST(records_are_paged_and_pinned) {
  Pool pool(20 * CHUNK);
  EXPECT(pool.store(range(1, 10)) == 10);
  std::set<uint32_t> seen;
  uint32_t cursor = 0;
  do {
    const RecordPage page = pool.directory.records(cursor, 3);
    for (const RecordId id : page.records) {
      EXPECT(seen.insert(id.value()).second);
      EXPECT(pool.directory.record(id).pins > 0);
    }
    EXPECT(pool.is_sound());
    EXPECT(pool.directory.unpin(page.pin));
    EXPECT(pool.is_sound());
    cursor = page.next;
  } while (cursor != 0);
  EXPECT(seen.size() == 10);
}

TIMED_TEST(acquire_of_a_long_prefix_is_quick) {
  Pool pool(4000 * CHUNK, 4000);
  for (uint64_t chain = 0; chain < 7; ++chain) {
    EXPECT(pool.store(range(1 + chain * 512, 512)) == 512);
  }
  const auto keys = pack(range(1 + 3 * 512, 512));
  std::vector<double> micros;
  for (int round = 0; round < 300; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const Hold hold = pool.directory.acquire(pool.owner, keys.data(), 512);
    micros.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    EXPECT(hold.chunks == 512);
    EXPECT(pool.directory.release(hold.id, ++pool.now));
  }
  std::sort(micros.begin(), micros.end());
  std::printf("  acquire of 512 chunks: median %.1f us\n", micros[150]);
}
