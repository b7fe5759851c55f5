// Long chains: what is asked about their end does not cost their length, they have a bound, and who writes at the end of one
// keeps all of it from eviction without holding all of it.
#include <ctime>
#include <random>

#include "tests/directory/directory_tiers.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t LONG = 30'000;

// A pool with one chain of ids 1, 2, ….
struct Chain : Pool {
  explicit Chain(uint64_t chunks, uint64_t room = 16)
      : Pool((chunks + room) * CHUNK, static_cast<uint32_t>(chunks + 2 * room)), length(chunks) {
    for (uint64_t first = 1; first <= chunks; first += 1000) {
      const uint64_t count = std::min<uint64_t>(1000, chunks - first + 1);
      EXPECT(store(range(first, count), first > 1 ? std::optional(first - 1) : std::nullopt) == count);
    }
  }
  uint64_t length;
};

double cpu_micros() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) * 1e6 + static_cast<double>(used.tv_nsec) * 1e-3;
}

// The quickest of some rounds, in microseconds of the processor for one call: others that run meanwhile do not count.
template <typename Call>
double micros_of(Call call) {
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const double start = cpu_micros();
    for (int number = 0; number < 200; ++number) {
      call();
    }
    best = std::min(best, (cpu_micros() - start) / 200);
  }
  return best;
}

}  // namespace

TEST(a_wrong_length_is_refused_without_a_walk) {
  Chain chain(LONG);
  for (const size_t wrong : {size_t{0}, size_t{1}, size_t{LONG - 1}, size_t{LONG + 1}, SIZE_MAX}) {
    EXPECT(chain.hold_chain(LONG, wrong).empty());
  }
  const double micros = micros_of([&] {
    EXPECT(chain.hold_chain(LONG, LONG - 1).empty());
  });
  std::printf("  a wrong length at depth %llu: %.2f us\n", static_cast<unsigned long long>(LONG), micros);
  EXPECT_TIME(micros < 20);
  const Hold hold = chain.hold_chain(LONG, LONG).front();
  EXPECT(hold.chunks == LONG);
  EXPECT(chain.directory.release(hold.id, ++chain.now));
  EXPECT(chain.is_sound());
}

TIMED_TEST(a_chunk_behind_a_long_chain_costs_what_it_costs_behind_a_short_one) {
  const auto micros_at = [](Chain& chain, uint64_t parent) {
    return micros_of([&] {
      const Reservation made = chain.reserve({parent + 1'000'000}, parent);
      EXPECT(all_are(made.states, SaveState::RESERVED));
      EXPECT(chain.directory.end_reservation(made.id, ++chain.now));
    });
  };
  Chain near(1000);
  Chain deep(LONG);
  const double at_1000 = micros_at(near, 1000);
  const double at_end = micros_at(deep, LONG);
  std::printf("  reserve and end of one chunk: %.1f us at depth 1000, %.1f us at depth %llu\n", at_1000, at_end,
              static_cast<unsigned long long>(LONG));
  EXPECT_TIME(at_end < 4 * at_1000 + 20);
  EXPECT(deep.is_sound());
}

TEST(a_chain_ends_where_it_has_as_many_chunks_as_one_may_have) {
  Chain chain(10);
  chain.directory.bound_chains(12);
  const Reservation made = chain.reserve(range(11, 4), 10);
  const std::vector<uint8_t> expected = {1, 1, static_cast<uint8_t>(SaveState::TOO_LONG),
                                         static_cast<uint8_t>(SaveState::TOO_LONG)};
  EXPECT(made.states == expected);
  EXPECT(all_are(chain.commit(made, 0, 2), SaveState::STORED));
  EXPECT(chain.directory.end_reservation(made.id, ++chain.now));
  EXPECT(chain.reserve({13}, 12).states[0] == static_cast<uint8_t>(SaveState::TOO_LONG));
  EXPECT(chain.directory.stats().answers[static_cast<size_t>(SaveState::TOO_LONG)] == 3);
  chain.directory.bound_chains(1);
  EXPECT(all_are(chain.reserve({21}).states, SaveState::RESERVED));
  EXPECT(chain.is_sound());
}

// More than a writer holds of what precedes its chunks.
TEST(nothing_before_a_writer_goes_however_long_its_chain_is) {
  Chain chain(3000, 100);
  EXPECT(chain.store(range(5001, 50)) == 50);
  const Reservation writing = chain.reserve({4001}, 3000);
  EXPECT(chain.store(range(6001, 99)) == 99);  // the others go, newer as they are
  EXPECT(chain.lookup(range(1, 3000)) == 3000);
  EXPECT(chain.is_sound());
  EXPECT(flush(chain.directory, std::nullopt, UINT64_MAX).chunks == 99);
  EXPECT(chain.lookup(range(1, 3000)) == 3000);
  EXPECT(chain.store(range(7001, 150)) == 99);
  EXPECT(chain.reserve({8001}).states[0] == static_cast<uint8_t>(SaveState::RESERVED));
  EXPECT(chain.lookup(range(1, 3000)) == 3000);
  EXPECT(chain.directory.end_reservation(writing.id, ++chain.now));
  EXPECT(chain.is_sound());
  EXPECT(chain.store(range(9001, 1000)) == 1000);
  EXPECT(chain.lookup(range(1, 3000)) < 3000);
  EXPECT(chain.is_sound());
}

TEST(a_tier_full_of_ancestors_of_a_writer_is_full) {
  Chain chain(3000, 1);
  const Reservation writing = chain.reserve({4001}, 3000);
  EXPECT(all_are(writing.states, SaveState::RESERVED));
  EXPECT(all_are(chain.reserve({4501}).states, SaveState::FULL));
  EXPECT(chain.is_sound());
  EXPECT(chain.directory.end_reservation(writing.id, ++chain.now));
  EXPECT(chain.store({4501}) == 1);
  EXPECT(chain.store({4502}) == 1);
  EXPECT(chain.lookup(range(1, 3000)) == 2999);
  EXPECT(chain.is_sound());
}

// The chain is used at its end alone, which counts for all of it once its turn comes.
TEST(a_chain_that_grows_is_used_as_a_whole) {
  Chain chain(3000, 500);
  EXPECT(chain.store(range(5001, 300)) == 300);
  for (uint64_t id = 4001; id < 4011; ++id) {
    EXPECT(chain.store({id}, id == 4001 ? 3000 : id - 1) == 1);
  }
  EXPECT(chain.store(range(6001, 490)) == 490);
  EXPECT(chain.lookup(range(1, 3000)) == 3000);
  EXPECT(chain.lookup(range(5001, 300)) == 0);
  EXPECT(chain.is_sound());
}

TEST(random_requests_behind_long_chains_keep_both_tiers_sound) {
  const uint64_t seed = kvpool::testing::seed();
  std::mt19937_64 random(seed);
  Tiers tiers(6000, 12'000);
  std::vector<HoldId> writing;
  uint64_t next = 100'000;
  std::vector<uint64_t> ends = {0, 0, 0};
  for (int step = 0; step < 600; ++step) {
    uint64_t& end = ends[random() % ends.size()];
    const bool is_here = end != 0 && tiers.memory.directory.place_of(key_of(end)).has_value();
    const uint64_t choice = random() % 10;
    if (choice < 5) {
      const auto ids = range(next, 1 + random() % 1500);
      const size_t stored = tiers.memory.store(ids, is_here ? std::optional(end) : std::nullopt);
      end = stored > 0 ? ids[stored - 1] : end;
      next += 2000;
    } else if (choice == 5 && is_here) {
      writing.push_back(tiers.memory.reserve({next++}, end).id);
    } else if (choice == 6 && !writing.empty()) {
      tiers.memory.directory.end_reservation(writing.back(), ++tiers.memory.now);
      writing.pop_back();
    } else if (choice == 7) {
      static_cast<void>(tiers.demote(random() % 4 != 0));
    } else if (choice == 8) {
      tiers.memory.directory.room().protect_unsaved(random() % 2 == 0);
    } else if (random() % 8 == 0) {
      static_cast<void>(flush(tiers.memory.directory, std::nullopt, tiers.memory.now - std::min(tiers.memory.now, random() % 20)));
    }
    if (step % 10 == 0) {
      EXPECT(tiers.is_sound());
    }
  }
  for (const HoldId id : writing) {
    tiers.memory.directory.end_reservation(id, ++tiers.memory.now);
  }
  EXPECT(tiers.is_sound());
  static_cast<void>(flush(tiers.memory.directory, std::nullopt, UINT64_MAX));
  EXPECT(tiers.memory.directory.stats().used_bytes == 0);
}
