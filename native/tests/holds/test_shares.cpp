// What one holder may keep from being evicted: half of what the others leave here, whatever kind it is of.
#include <chrono>
#include <cstdio>
#include <random>

#include "tests/directory_pool.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t CHUNKS = 64;
const HolderId ONE(1);
const HolderId OTHER(2);

struct Shared : Pool {
  Shared() : Pool(CHUNKS * CHUNK) { directory.shares().limit(0.5); }

  Reservation reserve_for(HolderId holder, const std::vector<uint64_t>& ids) {
    return directory.reserve(owner, small, std::nullopt, pack(ids).data(), ids.size(), ++now, holder);
  }
  // A lease of as much as the holder may have; its chunks, and the hold.
  Hold lease_for(HolderId holder, const std::vector<uint64_t>& ids) {
    const Hold found = acquire(ids);
    const size_t chunks = directory.shares().affordable(holder, {found.id}, {small}, found.chunks);
    Hold lease = found;
    if (chunks < found.chunks) {
      lease = chunks == 0 ? Hold{} : acquire(std::vector<uint64_t>(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(chunks)));
      EXPECT(directory.release(found.id, ++now));
    }
    EXPECT(lease.id == 0 || directory.shares().charge({lease.id}, holder));
    return lease;
  }
  static size_t count(const Reservation& made, SaveState state) {
    return static_cast<size_t>(std::count(made.states.begin(), made.states.end(), static_cast<uint8_t>(state)));
  }
};

}  // namespace

TEST(one_reservation_leaves_half_of_the_tier_to_others) {
  Shared pool;
  EXPECT(pool.store(range(1000, CHUNKS)) == CHUNKS);
  const Reservation greedy = pool.reserve_for(ONE, range(0, 4 * CHUNKS));
  EXPECT(Shared::count(greedy, SaveState::RESERVED) == CHUNKS / 2);
  EXPECT(greedy.states[CHUNKS / 2] == static_cast<uint8_t>(SaveState::QUOTA));
  EXPECT(Shared::count(greedy, SaveState::NO_PARENT) == 4 * CHUNKS - CHUNKS / 2 - 1);
  EXPECT(all_are(pool.reserve_for(ONE, {501}).states, SaveState::QUOTA));
  const Reservation other = pool.reserve_for(OTHER, range(600, CHUNKS));
  EXPECT(Shared::count(other, SaveState::RESERVED) == CHUNKS / 4);
  // Nobody's reservation, as the daemon's own are, has no share.
  EXPECT(pool.store(range(700, CHUNKS / 4)) == CHUNKS / 4);
  EXPECT(pool.is_sound());
}

TEST(slots_that_may_still_be_written_count_until_the_connection_of_their_writer_ends) {
  Shared pool;
  const Reservation greedy = pool.reserve_for(ONE, range(0, CHUNKS));
  EXPECT(pool.directory.expire_part(greedy.id, SIZE_MAX, ++pool.now));
  EXPECT(pool.directory.shares().accounts().find(ONE)->bytes.zombies == CHUNKS / 2 * CHUNK);
  EXPECT(pool.directory.shares().accounts().find(ONE)->bytes.reserved == 0);
  EXPECT(pool.is_sound());
  EXPECT(all_are(pool.reserve_for(ONE, {501}).states, SaveState::QUOTA));
  for (uint64_t round = 0; round < 8; ++round) {
    EXPECT(pool.store(range(600 + 100 * round, CHUNKS / 2)) == CHUNKS / 2);
  }
  EXPECT(pool.directory.end_reservation(greedy.id, ++pool.now));
  EXPECT(pool.directory.shares().accounts().all().empty());
  EXPECT(all_are(pool.reserve_for(ONE, {501}).states, SaveState::RESERVED));
  EXPECT(pool.is_sound());
}

TEST(stored_chunks_count_as_leased_until_their_reservation_ends) {
  Shared pool;
  const Reservation made = pool.reserve_for(ONE, range(0, 10));
  EXPECT(all_are(pool.commit(made, 0, 4), SaveState::STORED));
  const HolderBytes bytes = pool.directory.shares().accounts().find(ONE)->bytes;
  EXPECT(bytes.reserved == 6 * CHUNK && bytes.leased == 4 * CHUNK && bytes.zombies == 0);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.shares().accounts().all().empty());
  EXPECT(pool.is_sound());
}

TEST(a_lease_on_chunks_without_a_slot_counts_their_records) {
  struct Few : Pool {
    Few() : Pool(CHUNKS * CHUNK, CHUNKS) { directory.shares().limit(0.5); }
  } pool;
  EXPECT(pool.store(range(1, CHUNKS / 2)) == CHUNKS / 2);
  const Hold lease = pool.acquire(range(1, CHUNKS / 2));
  EXPECT(pool.directory.shares().charge({lease.id}, ONE));
  EXPECT(drop(pool.directory, key_of(1)) == CHUNKS / 2);
  EXPECT(pool.directory.stats().used_bytes == 0 && pool.directory.shares().protected_bytes() == CHUNKS / 2 * CHUNK);
  EXPECT(pool.store(range(100, CHUNKS / 2)) == CHUNKS / 2);
  const Hold other = pool.acquire(range(100, CHUNKS / 2));
  EXPECT(pool.directory.shares().affordable(OTHER, {other.id}, {pool.small}, other.chunks) == CHUNKS / 4);
  EXPECT(pool.is_sound() && pool.directory.release(other.id, ++pool.now));
  EXPECT(pool.directory.release(lease.id, ++pool.now) && pool.is_sound());
  EXPECT(pool.directory.shares().protected_bytes() == 0);
}

TEST(a_chain_is_leased_whole_by_its_last_key_or_not_at_all) {
  Shared pool;
  EXPECT(pool.store(range(0, CHUNKS)) == CHUNKS);
  const auto lease = [&](uint64_t leaf, size_t chunks, HolderId holder) {
    const auto holds = pool.hold_chain(leaf, chunks, holder);
    return holds.empty() ? Hold{} : holds.front();
  };
  EXPECT(lease(CHUNKS / 2, CHUNKS / 2 + 1, ONE).id == 0);  // more than it may
  EXPECT(lease(7, 7, ONE).id == 0);                        // not as deep
  EXPECT(lease(CHUNKS, CHUNKS + 1, ONE).id == 0);          // not stored
  const auto foreign = pack({7});
  EXPECT(pool.directory.hold_hit(std::vector{HitRun{pool.directory.add_namespace(), foreign, 8, true}}, ONE).empty());
  EXPECT(pool.directory.stats().holds == 0);
  const Hold whole = lease(CHUNKS / 2 - 1, CHUNKS / 2, ONE);
  EXPECT(whole.chunks == CHUNKS / 2);
  EXPECT(pool.directory.shares().is_charged(whole.id));
  EXPECT(lease(9, 10, ONE).chunks == 10);  // these count once
  EXPECT(lease(CHUNKS - 1, CHUNKS, ONE).id == 0);
  const auto columns = pool.directory.columns({whole.id});
  std::vector<uint64_t> offsets(whole.chunks), generations(whole.chunks), slots(whole.chunks);
  std::vector<uint8_t> levels(whole.chunks);
  EXPECT(pool.directory.has_words());
  pool.directory.locate(whole.id, {offsets.data(), generations.data(), levels.data(), slots.data()});
  EXPECT(columns->offsets == offsets && columns->generations == generations);
  EXPECT(columns->levels == levels && columns->slots == slots);
  EXPECT(pool.directory.release(whole.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(chunks_without_a_parent_that_two_runs_share_count_rightly) {
  Shared pool;
  for (uint64_t alone = 0; alone < CHUNKS; ++alone) {
    EXPECT(pool.store({1000 + alone}) == 1);
  }
  const auto hold = [&](uint64_t first, uint64_t count) {
    const auto keys = pack(range(first, count));
    const auto holds = pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, count, false}}, ONE, ++pool.now);
    return holds.empty() ? Hold{} : holds.front();
  };
  const uint64_t window = CHUNKS / 4;
  EXPECT(hold(1000 + window / 2, window).chunks == window);
  EXPECT(hold(1000, window).chunks == window);  // ends in the first one's first half: that does not stand for what precedes it
  EXPECT(hold(1000 + window / 2, window).chunks == window);
  EXPECT(pool.directory.shares().protected_bytes() == (window + window / 2) * CHUNK);
  EXPECT(hold(1000 + 2 * window, window / 2).chunks == window / 2);      // all that is left of half
  EXPECT(hold(1000 + 3 * window, 1).id == 0);
  EXPECT(pool.is_sound());
}

TEST(runs_without_parents_that_are_leased_many_times_are_recounted_now_and_then) {
  Shared pool;
  const uint64_t window = CHUNKS / 2;
  for (uint64_t alone = 0; alone < window; ++alone) {
    EXPECT(pool.store({1000 + alone}) == 1);
  }
  const auto keys = pack(range(1000, window));
  constexpr uint64_t LEASES = 400;
  for (uint64_t number = 0; number < LEASES; ++number) {
    EXPECT(pool.directory.hold_hit(std::vector{HitRun{pool.owner, keys, window, false}}, ONE, ++pool.now).size() == 1);
  }
  EXPECT(pool.directory.shares().accounts().counts(ONE) < LEASES / 8);  // each looks at the rows of all leases
  EXPECT(pool.is_sound());
}

TEST(a_lease_beyond_the_share_is_shortened) {
  Shared pool;
  EXPECT(pool.store(range(0, CHUNKS)) == CHUNKS);
  const Hold lease = pool.lease_for(ONE, range(0, CHUNKS));
  EXPECT(lease.chunks == CHUNKS / 2);
  EXPECT(pool.is_sound());
  EXPECT(pool.store(range(500, CHUNKS / 2)) == CHUNKS / 2);
  EXPECT(pool.lease_for(ONE, range(500, CHUNKS / 2)).id == 0);
  EXPECT(pool.lease_for(OTHER, range(500, CHUNKS / 2)).chunks == CHUNKS / 4);
  EXPECT(pool.directory.release(lease.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(a_chunk_leased_many_times_costs_its_holder_once) {
  Shared pool;
  EXPECT(pool.store(range(0, CHUNKS / 2)) == CHUNKS / 2);
  std::vector<HoldId> leases;
  for (int round = 0; round < 40; ++round) {
    const Hold lease = pool.lease_for(ONE, range(0, CHUNKS / 2));
    EXPECT(lease.chunks == CHUNKS / 2);
    leases.push_back(lease.id);
  }
  EXPECT(pool.directory.shares().accounts().bound(ONE) == CHUNKS / 2 * CHUNK);
  EXPECT(pool.is_sound());
  for (const HoldId lease : leases) {
    EXPECT(pool.directory.release(lease, ++pool.now));
  }
  EXPECT(pool.directory.shares().accounts().all().empty());
  EXPECT(pool.is_sound());
}

// What an engine has leased it may hang its next chunks on, though both keep the same chunks.
TEST(a_save_behind_a_lease_pays_for_what_is_new) {
  Shared pool;
  EXPECT(pool.store(range(0, CHUNKS / 2 - 4)) == CHUNKS / 2 - 4);
  const Hold lease = pool.lease_for(ONE, range(0, CHUNKS / 2 - 4));
  const auto parent = key_of(CHUNKS / 2 - 5);
  const Reservation made =
      pool.directory.reserve(pool.owner, pool.small, parent, pack(range(500, 8)).data(), 8, ++pool.now, ONE);
  EXPECT(Shared::count(made, SaveState::RESERVED) == 4);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.release(lease.id, ++pool.now));
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(pool.directory.shares().accounts().all().empty());
}

// What a save and a lease have in common was counted once when all of the holder's chunks were: not once more when the save goes on.
TEST(a_save_that_goes_on_after_a_count_has_no_more_than_its_share) {
  Shared pool;
  EXPECT(pool.store(range(0, 10)) == 10);
  EXPECT(pool.lease_for(ONE, range(0, 10)).chunks == 10);
  const Reservation save = pool.directory.reserve(pool.owner, pool.small, key_of(9), pack({100, 101}).data(), 2, ++pool.now, ONE);
  EXPECT(Shared::count(pool.reserve_for(ONE, range(200, 40)), SaveState::RESERVED) == CHUNKS / 2 - 12);
  EXPECT(all_are(pool.reserve_for(ONE, {300}).states, SaveState::QUOTA));
  EXPECT(pool.directory.reserve_more(save.id, pack({102}).data(), 1, ++pool.now).states ==
         std::vector<uint8_t>{static_cast<uint8_t>(SaveState::QUOTA)});
  EXPECT(pool.is_sound());
}

TEST(holders_are_counted_rightly_under_random_use) {
  std::mt19937_64 random(seed());
  Shared pool;
  std::vector<HoldId> held;
  for (int step = 0; step < 3000; ++step) {
    const HolderId holder(static_cast<uint32_t>(random() % 3));
    const std::vector<uint64_t> ids = range(random() % 4 * 100, 1 + random() % 24);
    if (random() % 3 == 0) {
      const Reservation made = pool.reserve_for(holder, ids);
      static_cast<void>(pool.commit(made, 0, random() % (ids.size() + 1)));
      held.push_back(made.id);
    } else if (random() % 2 == 0) {
      held.push_back(pool.lease_for(holder, ids).id);
    } else if (random() % 4 == 0 && !held.empty()) {  // of a lease nothing goes on
      const auto further = pack(range(1000 + 10 * static_cast<uint64_t>(step), 1 + random() % 8));
      static_cast<void>(pool.directory.reserve_more(held[random() % held.size()], further.data(), further.size() / KEY_BYTES, ++pool.now));
    } else if (!held.empty()) {
      const size_t chosen = random() % held.size();
      const HoldId id = held[chosen];
      if (random() % 4 == 0 && pool.directory.expire_part(id, SIZE_MAX, ++pool.now)) {
        continue;
      }
      static_cast<void>(pool.directory.release(id, ++pool.now) || pool.directory.end_reservation(id, ++pool.now));
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
    if (random() % 5 == 0) {
      static_cast<void>(drop(pool.directory, key_of(random() % 4 * 100 + random() % 24)));
    }
    if (step % 10 == 0) {
      EXPECT(pool.is_sound());
    }
  }
  for (const HoldId id : held) {
    static_cast<void>(pool.directory.release(id, ++pool.now) || pool.directory.end_reservation(id, ++pool.now));
  }
  EXPECT(pool.directory.shares().accounts().all().empty());
  EXPECT(pool.is_sound());
}

// A user's connections together: three holders of halves would have seven eighths.
TEST(a_user_has_a_share_over_all_of_its_connections) {
  Shared pool;
  pool.directory.shares().limit(0.5, 0.75);
  constexpr uint32_t MALLORY = 1000;
  constexpr uint32_t ALICE = 1001;
  std::vector<Reservation> made;
  size_t reserved = 0;
  for (uint32_t number = 10; number < 16; ++number) {
    pool.directory.shares().accounts().join(HolderId(number), MALLORY);
    made.push_back(pool.reserve_for(HolderId(number), range(1000 * number, CHUNKS)));
    reserved += Shared::count(made.back(), SaveState::RESERVED);
    EXPECT(pool.is_sound());
  }
  EXPECT(reserved == CHUNKS * 3 / 4);
  pool.directory.shares().accounts().join(OTHER, ALICE);
  EXPECT(Shared::count(pool.reserve_for(OTHER, range(600, CHUNKS)), SaveState::RESERVED) == CHUNKS / 8);
  pool.directory.shares().accounts().leave(HolderId(10));  // it is gone, its slots are not free yet
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.expire_part(made[0].id, SIZE_MAX, ++pool.now));
  EXPECT(all_are(pool.reserve_for(HolderId(15), {501}).states, SaveState::QUOTA));
  for (const Reservation& each : made) {
    EXPECT(each.id == 0 || pool.directory.end_reservation(each.id, ++pool.now));
    EXPECT(pool.is_sound());
  }
  EXPECT(pool.directory.shares().accounts().users().size() == 1);
}

// Engines of one user lease the same system prompt: it is there once.
TEST(chunks_leased_by_many_connections_of_a_user_count_once) {
  Shared pool;
  pool.directory.shares().limit(0.5, 0.75);
  const auto prompt = range(0, CHUNKS / 4);
  EXPECT(pool.store(prompt) == CHUNKS / 4);
  for (uint32_t number = 10; number < 40; ++number) {
    pool.directory.shares().accounts().join(HolderId(number), 7);
    EXPECT(pool.lease_for(HolderId(number), prompt).chunks == CHUNKS / 4);
  }
  EXPECT(pool.is_sound());
  size_t reserved = 0;
  for (uint32_t number = 40; number < 46; ++number) {
    pool.directory.shares().accounts().join(HolderId(number), 7);
    reserved += Shared::count(pool.reserve_for(HolderId(number), range(1000 * number, CHUNKS)), SaveState::RESERVED);
  }
  EXPECT(reserved == CHUNKS * 3 / 4 - CHUNKS / 4);
  EXPECT(pool.is_sound());
}

TEST(users_are_counted_rightly_whatever_their_connections_do) {
  std::mt19937_64 random(seed());
  for (int round = 0; round < 40; ++round) {
    Shared pool;
    pool.directory.shares().limit(0.5, 0.75);
    std::vector<HoldId> leases;
    std::vector<HoldId> saves;
    for (uint32_t number = 1; number < 9; ++number) {
      pool.directory.shares().accounts().join(HolderId(number), number % 3);
    }
    for (int step = 0; step < 120; ++step) {
      const HolderId holder(1 + static_cast<uint32_t>(random() % 10));  // two have no user
      const auto ids = range(100 * (random() % 4), 1 + random() % 24);
      if (random() % 3 == 0 && !leases.empty()) {
        std::swap(leases[random() % leases.size()], leases.back());
        EXPECT(pool.directory.release(leases.back(), ++pool.now));
        leases.pop_back();
      } else if (random() % 3 == 0 && !saves.empty()) {
        std::swap(saves[random() % saves.size()], saves.back());
        EXPECT(pool.directory.end_reservation(saves.back(), ++pool.now));
        saves.pop_back();
      } else if (random() % 2 == 0) {
        const Reservation made = pool.reserve_for(holder, ids);
        const size_t reserved = Shared::count(made, SaveState::RESERVED);
        if (made.id != 0) {
          static_cast<void>(pool.commit(made, 0, reserved == 0 ? 0 : random() % (reserved + 1)));
          saves.push_back(made.id);
        }
      } else if (const Hold lease = pool.lease_for(holder, ids); lease.id != 0) {
        leases.push_back(lease.id);
      }
      EXPECT(pool.is_sound());
    }
  }
}

// A slot is a page at least, and there are only so many records: whoever has chunks of a few bytes takes as much from others.
TEST(small_chunks_count_by_what_they_take) {
  for (const uint32_t records : {1000U, 32U}) {
    Pool pool(CHUNKS * PAGE_BYTES, records);
    pool.directory.shares().limit(0.5);
    const ClassId tiny = *pool.directory.add_class(8, 1);
    const auto ids = range(0, 4 * CHUNKS);
    const Reservation greedy =
        pool.directory.reserve(pool.owner, tiny, std::nullopt, pack(ids).data(), ids.size(), ++pool.now, ONE);
    EXPECT(Shared::count(greedy, SaveState::RESERVED) == std::min<uint64_t>(CHUNKS, records) / 2);
    EXPECT(pool.is_sound());
  }
}

TIMED_TEST(a_lease_on_many_ranks_costs_no_look_at_every_other) {
  constexpr size_t RANKS = 64;
  constexpr size_t LEASES = 1000;
  Pool pool(4 * RANKS * CHUNK);
  pool.directory.shares().limit(0.5);
  const auto lease = [&pool] {
    std::vector<HoldId> holds;
    for (uint64_t rank = 0; rank < RANKS; ++rank) {
      holds.push_back(pool.acquire({1000 * rank}).id);
    }
    const std::vector<ClassId> of(RANKS, pool.small);
    const size_t chunks = pool.directory.shares().affordable(ONE, holds, of, 1);
    EXPECT(pool.directory.shares().charge(holds, ONE));
    return chunks;
  };
  for (uint64_t rank = 0; rank < RANKS; ++rank) {
    EXPECT(pool.store({1000 * rank}) == 1);
  }
  const auto took_ns = [&lease](size_t count) {
    const auto begun = std::chrono::steady_clock::now();
    for (size_t round = 0; round < count; ++round) {
      EXPECT(lease() == 1);
    }
    return (std::chrono::steady_clock::now() - begun).count() / static_cast<int64_t>(count);
  };
  const auto first = took_ns(20);
  took_ns(LEASES);
  const auto last = took_ns(20);
  std::printf("a lease on %zu ranks: %lld us, behind %zu others %lld us\n", RANKS, static_cast<long long>(first / 1000),
              LEASES, static_cast<long long>(last / 1000));
  EXPECT_TIME(last < 10 * first);
  EXPECT(pool.is_sound());
}
