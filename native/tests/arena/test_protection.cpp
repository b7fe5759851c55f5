// What only DRAM has stays while it is protected, wherever its memory lies and whatever it follows.
#include <random>

#include "tests/directory/directory_tiers.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t LARGE = 4;  // chunks in one of the other size: two segments

// A full tier: a chain of saved chunks has the coldest segments, what follows it has memory elsewhere and is in DRAM alone.
struct Straddling {
  Straddling() : tiers(16, 64) {
    EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
    EXPECT(tiers.demote() == 4);
    EXPECT(tiers.memory.store({5}, 4) == 1);
    EXPECT(tiers.memory.store({11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21}) == 11);
    large = *tiers.memory.directory.add_class(LARGE * CHUNK, EXTENTS);
  }

  Reservation reserve_large() {
    return tiers.memory.directory.reserve(tiers.memory.owner, large, std::nullopt, pack({99}).data(), 1, ++tiers.memory.now);
  }

  Tiers tiers;
  ClassId large;
};

}  // namespace

TEST(descendants_in_other_tiers_are_found_before_the_chunks_record_is_cleared) {
  Straddling straddling;
  Tiers& tiers = straddling.tiers;
  tiers.memory.directory.room().protect_unsaved(true);
  const Reservation made = straddling.reserve_large();
  EXPECT(tiers.memory.lookup({1, 2, 3, 4, 5}) == 5);
  EXPECT(all_are(made.states, SaveState::NOT_READY));
  EXPECT(tiers.memory.directory.stats().evicted_chunks == 0);
  EXPECT(tiers.memory.directory.stats().shed_chunks == 0);
  EXPECT(tiers.is_sound());
}

TEST(once_nothing_is_protected_a_windows_chunks_go_with_what_follows_them) {
  Straddling straddling;
  Tiers& tiers = straddling.tiers;
  const Reservation made = straddling.reserve_large();
  EXPECT(all_are(made.states, SaveState::RESERVED));
  EXPECT(tiers.memory.directory.stats().evicted_chunks == 1);
  EXPECT(tiers.memory.directory.end_reservation(made.id, ++tiers.memory.now));
  EXPECT(tiers.is_sound());
}

namespace {

// A full tier of single chunks, of which the `saved` coldest are below too, and a free segment: a chunk of twice the size has a
// slot, but needs the bytes of two.
struct TwoForOne {
  explicit TwoForOne(size_t saved) : tiers(16, 64), large(*tiers.memory.directory.add_class(2 * CHUNK, EXTENTS)) {
    for (uint64_t id = 1; id <= 16; ++id) {
      EXPECT(tiers.memory.store({id}) == 1);
      while (saved > 0 && tiers.demote() > 0) {
        --saved;
      }
    }
    tiers.memory.directory.room().protect_unsaved(true);
  }

  Reservation reserve(const std::vector<uint64_t>& ids) {
    return tiers.memory.directory.reserve(tiers.memory.owner, large, std::nullopt, pack(ids).data(), ids.size(), ++tiers.memory.now);
  }

  Tiers tiers;
  ClassId large;
};

}  // namespace

TEST(a_chunk_that_needs_two_victims_takes_none_where_the_second_is_protected) {
  TwoForOne setting(1);
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT(all_are(setting.reserve({99}).states, SaveState::NOT_READY));
    EXPECT(setting.tiers.memory.directory.stats().chunks == 16);
    EXPECT(setting.tiers.memory.directory.stats().shed_chunks == 0);
    EXPECT(setting.tiers.is_sound());
  }
}

TEST(a_chunk_that_needs_two_victims_takes_the_two_coldest_that_may_go) {
  TwoForOne setting(2);
  const Reservation made = setting.reserve({99, 98});
  EXPECT(made.states[0] == static_cast<uint8_t>(SaveState::RESERVED));
  EXPECT(made.states[1] == static_cast<uint8_t>(SaveState::NOT_READY));
  EXPECT(setting.tiers.memory.directory.stats().chunks == 14);
  EXPECT(setting.tiers.memory.directory.stats().shed_chunks == 2);
  EXPECT(setting.tiers.memory.acquire({1}).id == 0 && setting.tiers.memory.acquire({2}).id == 0);
  EXPECT(setting.tiers.memory.directory.end_reservation(made.id, ++setting.tiers.memory.now));
  EXPECT(setting.tiers.is_sound());
}

// A chain is evicted leaf first, also where all of its chunks have to go: a parent becomes a victim once its child has gone.
TEST(a_reservation_evicts_a_whole_chain_leaf_first_or_nothing_of_it) {
  for (const bool is_pinned : {true, false}) {
    Pool pool(16 * CHUNK);
    const ClassId large = *pool.directory.add_class(2 * CHUNK, EXTENTS);
    EXPECT(pool.store({1, 2}) == 2);
    EXPECT(pool.store({11, 12}) == 2);
    EXPECT(pool.store(range(20, 12)) == 12);
    const Hold top = pool.acquire({11});
    const Hold rest = pool.acquire(range(20, 12));
    const auto pin = is_pinned ? pool.directory.pin_chunk(top.id, 0) : std::nullopt;
    EXPECT(pool.directory.release(top.id, ++pool.now));
    const auto reserve = [&](const std::vector<uint64_t>& ids) {
      return pool.directory.reserve(pool.owner, large, std::nullopt, pack(ids).data(), ids.size(), ++pool.now);
    };
    const Reservation made = reserve({99, 98});  // 1 and 2, then 12 and 11, which has a pin or not
    EXPECT(made.states[0] == static_cast<uint8_t>(SaveState::RESERVED));
    EXPECT(pool.lookup({1}) == 0);
    EXPECT(made.states[1] == static_cast<uint8_t>(is_pinned ? SaveState::NOT_READY : SaveState::RESERVED));
    EXPECT(pool.lookup({11, 12}) == (is_pinned ? 2U : 0U));
    EXPECT(pool.is_sound());
    EXPECT(!pin || pool.directory.unpin(*pin));
    EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
    EXPECT(pool.directory.release(rest.id, ++pool.now));
    EXPECT(pool.is_sound());
  }
}

TEST(a_chunk_that_finds_no_room_evicts_nothing) {
  std::mt19937_64 random(seed());
  size_t refused = 0;
  for (int round = 0; round < 12; ++round) {
    Tiers tiers(24, 64, round % 2 == 0 ? PolicyKind::LRU : PolicyKind::CLASS_QUEUES);
    Pool& memory = tiers.memory;
    std::vector<ClassId> classes{memory.small};
    for (const uint64_t chunks : {2U, 3U, 5U}) {
      classes.push_back(*memory.directory.add_class(chunks * CHUNK, EXTENTS));
    }
    std::vector<HoldId> holds;
    std::vector<HoldId> pins;
    for (int step = 0; step < 400; ++step) {
      memory.directory.room().protect_unsaved(random() % 3 != 0);
      const uint64_t number = random() % classes.size();
      const std::vector<uint64_t> ids = range(1 + number * 1000 + random() % 12 * 4, 1 + random() % 4);
      const uint64_t pick = random() % 10;
      if (pick < 5) {
        const uint64_t before = memory.directory.stats().chunks;
        const Reservation made =
            memory.directory.reserve(memory.owner, classes[number], std::nullopt, pack(ids).data(), 1, ++memory.now);
        const bool is_refused = made.states[0] > static_cast<uint8_t>(SaveState::RESERVED);
        EXPECT(!is_refused || memory.directory.stats().chunks == before);
        refused += is_refused ? 1U : 0U;
        if (made.id != 0) {
          static_cast<void>(memory.commit(made, 0, 1));
          EXPECT(memory.directory.end_reservation(made.id, ++memory.now));
        }
      } else if (pick < 7) {
        static_cast<void>(number == 0 ? memory.store(ids) : 0);
      } else if (pick < 8) {
        static_cast<void>(tiers.demote());
      } else if (const Hold hold = memory.acquire(ids); hold.id != 0) {
        const auto pin = memory.directory.pin_chunk(hold.id, random() % hold.chunks);
        pins.push_back(pin.value_or(0));
        holds.push_back(hold.id);
      }
      while (holds.size() > random() % 4) {
        EXPECT(memory.directory.release(holds.back(), ++memory.now));
        holds.pop_back();
      }
      while (pins.size() > random() % 6) {
        EXPECT(pins.back() == 0 || memory.directory.unpin(pins.back()));
        pins.pop_back();
      }
      EXPECT(tiers.is_sound());
    }
  }
  EXPECT(refused > 0);
}
