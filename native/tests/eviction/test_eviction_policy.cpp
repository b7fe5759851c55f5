// What class queues are made of: what is learned, what is remembered, and who wins the duel.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "eviction/class_queue_policy.h"
#include "eviction/eviction_queues.h"
#include "eviction/ghost_table.h"
#include "eviction/policy_duel.h"
#include "eviction/survival.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND = 1'000'000'000;

ChunkKey some_key(uint64_t id) {
  std::mt19937_64 random(id);
  return ChunkKey{{random(), random(), random(), random()}};
}

std::vector<SampledUse> chain_of(uint64_t first, uint64_t count, uint8_t queue = 0) {
  std::vector<SampledUse> chain;
  for (uint64_t id = first; id < first + count; ++id) {
    chain.push_back({some_key(id), queue, true});
  }
  return chain;
}

// Judges by the queue alone: queue 1 before queue 0.
class ByQueue : public EvictionPolicy {
 public:
  [[nodiscard]] double worth(uint8_t queue, uint64_t, uint64_t) const noexcept override { return queue == 0 ? 1 : 0; }
};

// One-off prompts, and a few that come again all the time at long distances. Hits of the latter.
uint64_t hits_of(PolicyKind policy) {
  Pool pool(128 * CHUNK, 128, true, 64 << 20, policy);
  uint64_t hits = 0;
  for (uint64_t request = 0; request < 6000; ++request) {
    pool.now += SECOND;
    const bool is_regular = request % 4 == 0;
    const std::vector<uint64_t> ids = range(is_regular ? 1 + request / 4 % 8 * 8 : 1000 + request * 8, 8);
    const Hold hold = pool.directory.acquire(pool.owner, pack(ids).data(), ids.size(), pool.now);
    hits += hold.chunks;
    if (hold.chunks < ids.size()) {
      const std::vector<uint64_t> rest(ids.begin() + static_cast<std::ptrdiff_t>(hold.chunks), ids.end());
      EXPECT(pool.store(rest, hold.chunks > 0 ? std::optional(ids[hold.chunks - 1]) : std::nullopt) == rest.size());
    }
    if (hold.id != 0) {
      EXPECT(pool.directory.release(hold.id, pool.now));
    }
  }
  EXPECT(pool.is_sound());
  return hits;
}

}  // namespace

TEST(ages_fall_into_bins_of_a_quarter_octave) {
  EXPECT(SurvivalModel::bin_of(0) == 0);
  EXPECT(SurvivalModel::bin_of(UINT64_MAX) == SurvivalModel::BINS - 1);
  for (uint32_t bin = 0; bin < SurvivalModel::BINS; ++bin) {
    const uint64_t first = SurvivalModel::first_tick(bin);
    EXPECT(SurvivalModel::bin_of(first << TICK_SHIFT) == bin);
    EXPECT(first == 0 || SurvivalModel::bin_of((first << TICK_SHIFT) - 1) == bin - 1);
  }
}

TEST(a_class_whose_chunks_are_reused_has_a_higher_value_until_their_time_is_over) {
  SurvivalModel model;
  EXPECT(model.worth(0, SECOND) > model.worth(0, 100 * SECOND));  // unlearned: the older is worth less
  uint64_t now = 1000 * SECOND;
  for (int round = 0; round < 40; ++round) {
    for (int chunk = 0; chunk < 50; ++chunk) {
      model.note_start(1);
      model.note_start(2);
      if (round > 2 && chunk % 10 != 0) {
        model.note_end(1, 60 * SECOND);  // nine tenths come back after a minute
      }
      if (round > 2 && chunk % 10 == 0) {
        model.note_end(2, 60 * SECOND);
      }
    }
    now += 30 * SECOND;
    model.learn(now);
  }
  EXPECT(model.worth(1, 30 * SECOND) > 4 * model.worth(2, 30 * SECOND));
  EXPECT(model.worth(1, 50 * SECOND) > model.worth(1, 5 * SECOND));  // the time comes nearer
  EXPECT(model.worth(1, 300 * SECOND) < model.worth(2, 5 * SECOND));
  EXPECT(model.worth(3, 30 * SECOND) > model.worth(2, 30 * SECOND));  // never seen: as all together
}

TEST(ghosts_remember_the_latest_and_are_taken_once) {
  GhostTable ghosts(4096);
  EXPECT(ghosts.take(some_key(1)).touches == 0);
  for (uint32_t number = 0; number < 3000; ++number) {
    ghosts.make_room(number);
    Ghost ghost;
    ghost.used_tick = number;
    ghost.touches = static_cast<uint8_t>(1 + number % 200);
    ghosts.add(some_key(number), ghost);
  }
  int found = 0;
  for (uint32_t number = 0; number < 3000; ++number) {
    const Ghost ghost = ghosts.take(some_key(number));
    EXPECT(ghost.touches == 0 || (ghost.touches == 1 + number % 200 && ghost.used_tick == number));
    found += ghost.touches != 0 ? 1 : 0;
    EXPECT(ghosts.take(some_key(number)).touches == 0);
  }
  EXPECT(found > 2500);
}

// Requests use chunks again at ages of their class.
void use(SurvivalModel& model, uint64_t& now, int requests) {
  for (int request = 0; request < requests; ++request) {
    now += SECOND;
    for (uint8_t of_class = 0; of_class < SurvivalModel::CLASSES; ++of_class) {
      model.note_start(of_class, 2);
      model.note_end(of_class, (1 + of_class) * SECOND, 1);
    }
    if (model.count_request() >= SurvivalModel::LEARN_EVERY) {
      model.learn(now);
    }
  }
}

bool are_alike(const SurvivalModel& one, const SurvivalModel& other) {
  bool is_same = one.has_learned() == other.has_learned();
  for (uint8_t of_class = 0; of_class < SurvivalModel::CLASSES; ++of_class) {
    for (uint32_t bin = 0; bin < SurvivalModel::BINS; ++bin) {
      const uint64_t age = SurvivalModel::first_tick(bin) << TICK_SHIFT;
      is_same = is_same && one.worth(of_class, age) == other.worth(of_class, age) && one.chance(of_class, age) == other.chance(of_class, age);
    }
  }
  return is_same;
}

TEST(a_model_goes_on_where_another_was_killed) {
  const auto memory = std::make_unique<SurvivalModel::Memory>();
  SurvivalModel former(memory.get());
  uint64_t now = 0;
  for (const int requests : {7, 343, 25'000}) {  // before anything is learned, and until the oldest epochs are joined
    use(former, now, requests);
    SurvivalModel model;
    model.restore(*memory);
    EXPECT(are_alike(model, former));
    uint64_t later = now;
    use(model, later, 250);
    use(former, now, 250);
    EXPECT(model.has_learned() && are_alike(model, former));
  }
}

// What it knew before or what it knew after, and nothing in between; with a flipped bit less, but never more.
TEST(a_model_is_whole_wherever_its_learning_was_killed) {
  std::mt19937_64 random(kvpool::testing::seed());
  const auto memory = std::make_unique<SurvivalModel::Memory>();
  SurvivalModel former(memory.get());
  uint64_t now = 0;
  use(former, now, 499);
  const auto before = std::make_unique<SurvivalModel::Memory>(*memory);
  SurvivalModel unlearned;
  SurvivalModel was;
  was.restore(*before);
  use(former, now, 1);
  EXPECT(memory->counts.number == 5 && memory->histories[1].number == 5 && !are_alike(was, former));
  const auto halfway = std::make_unique<SurvivalModel::Memory>();
  for (int trial = 0; trial < 200; ++trial) {
    *halfway = *before;
    const size_t stored = random() % (sizeof(SurvivalModel::History) + 1);  // the seal last
    auto* const to = reinterpret_cast<uint8_t*>(&halfway->histories[1]);
    const auto* const from = reinterpret_cast<const uint8_t*>(&memory->histories[1]);
    std::memcpy(to + sizeof(uint32_t), from + sizeof(uint32_t), std::min(stored, sizeof(SurvivalModel::History) - sizeof(uint32_t)));
    SurvivalModel model;
    model.restore(*halfway);
    EXPECT(are_alike(model, was));
    halfway->histories[1] = memory->histories[1];
    std::memset(&halfway->counts.ended, 0, random() % sizeof(halfway->counts.ended));
    SurvivalModel next;
    next.restore(*halfway);
    EXPECT(are_alike(next, former));
    uint64_t later = now;
    use(next, later, 99);  // what the history has taken in does not count once more
    EXPECT(are_alike(next, former));

    *halfway = *memory;
    reinterpret_cast<uint8_t*>(&halfway->histories)[random() % sizeof(halfway->histories)] ^= static_cast<uint8_t>(1U << random() % 8);
    SurvivalModel damaged;
    damaged.restore(*halfway);
    EXPECT(are_alike(damaged, former) || are_alike(damaged, was));
    halfway->histories[random() % 2].uses[3][5] = std::numeric_limits<double>::quiet_NaN();
    halfway->histories[0].crc ^= 1;
    halfway->histories[1].epoch_count = UINT32_MAX;
    SurvivalModel none;
    none.restore(*halfway);
    EXPECT(are_alike(none, unlearned));
  }
}

TEST(ghosts_of_another_table_are_remembered_as_far_as_they_may_be) {
  std::vector<Ghost> memory(4096);
  GhostTable former(4096, memory.data());
  for (uint32_t number = 0; number < 1000; ++number) {
    Ghost ghost;
    ghost.used_tick = number;
    ghost.touches = 1;
    ghost.queue = static_cast<uint8_t>(number % 25);
    former.add(some_key(number), ghost);
  }
  GhostTable ghosts(4096);
  ghosts.restore(memory, EvictionPolicy::QUEUES);
  for (uint32_t number = 0; number < 1000; ++number) {
    const Ghost was = former.take(some_key(number));
    const Ghost is = ghosts.take(some_key(number));
    EXPECT(is.touches == (was.queue < EvictionPolicy::QUEUES ? was.touches : 0));
    EXPECT(is.touches == 0 || (is.used_tick == was.used_tick && is.queue == was.queue));
  }
}

// A duel in memory of its own, as it would be found after a kill.
struct KeptDuel {
  static constexpr uint32_t CHUNKS = 64;

  explicit KeptDuel(uint64_t seed) : memory(PolicyDuel::bytes(CHUNKS) / sizeof(ChunkRecord)), duel(CHUNKS, judge, HashSeed{{seed, seed}}, at(memory)) {
    std::memset(static_cast<void*>(memory.data()), 0, memory.size() * sizeof(ChunkRecord));
  }
  static PolicyDuel::Memory* at(std::vector<ChunkRecord>& memory) { return reinterpret_cast<PolicyDuel::Memory*>(memory.data()); }
  // Requests of which some come again soon, others late.
  void use(std::mt19937_64 random, int requests) {
    for (int request = 0; request < requests; ++request) {
      const uint64_t prompt = random() % 4 == 0 ? random() % 6 : 100 + random() % 40;
      duel.note_uses(chain_of(1 + 100 * prompt, 1 + random() % 9, prompt < 6 ? 0 : 1), CHUNKS, now += SECOND);
    }
  }

  const ByQueue judge;
  std::vector<ChunkRecord> memory;
  PolicyDuel duel;
  uint64_t now = 0;
};

TEST(a_duel_goes_on_where_another_was_killed_and_from_nothing_where_its_memory_is_damaged) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int trial = 0; trial < 100; ++trial) {
    KeptDuel former(random());
    former.use(random, static_cast<int>(random() % 300));
    KeptDuel next(random());
    next.now = former.now;
    next.duel.restore(*KeptDuel::at(former.memory));
    EXPECT(next.duel.is_by_age() == former.duel.is_by_age());
    for (auto flipped = former.memory; bool turn : {false, true}) {
      auto* const bytes = reinterpret_cast<uint8_t*>(flipped.data());
      for (uint64_t flips = turn ? 2000 : 1 + random() % 16; flips > 0; --flips) {
        bytes[random() % (flipped.size() * sizeof(ChunkRecord))] ^= static_cast<uint8_t>(1U << random() % 8);
      }
      KeptDuel other(random());
      other.now = former.now;
      other.duel.restore(*KeptDuel::at(flipped));
      other.use(random, 100);
    }
    random.discard(1000);
    former.use(random, 300);
    next.use(random, 300);
    // By worth only about: what had been moved beside its child stands by its own last use again.
    EXPECT(KeptDuel::at(former.memory)->scores[0].oldest_hits == KeptDuel::at(next.memory)->scores[0].oldest_hits);
  }
}

TEST(a_shadow_holds_whole_prefixes_and_no_more_than_its_limit) {
  const LruPolicy by_age;
  PolicyShadow shadow(100, by_age);
  EXPECT(shadow.use(chain_of(1, 6), 10, 1) == 0);
  EXPECT(shadow.use(chain_of(1, 6), 10, 2) == 6);
  EXPECT(shadow.use(chain_of(11, 8), 10, 3) == 0);
  EXPECT(shadow.size() == 10);
  EXPECT(shadow.use(chain_of(1, 6), 10, 4) == 2);  // the leaves went first
  EXPECT(shadow.use(chain_of(21, 30), 10, 5) == 0);
  EXPECT(shadow.use(chain_of(21, 30), 10, 6) == 10);  // as much as there was room for
  EXPECT(shadow.use(chain_of(41, 3), 5, 7) == 0);
  EXPECT(shadow.size() == 5);
}

TEST(the_policy_duel_falls_back_to_age_and_returns) {
  const ByQueue judge;
  PolicyDuel duel(64, judge, HashSeed{});
  uint64_t now = 0;
  // What is used again is in the queue that the judge despises, behind a load of things that are not.
  const auto play = [&](uint8_t good, uint8_t bad, uint64_t first) {
    for (uint64_t round = 0; round < 400; ++round) {
      duel.note_uses(chain_of(1, 8, good), 32, ++now);
      duel.note_uses(chain_of(first + round * 4, 4, bad), 32, ++now);
      duel.note_uses(chain_of(first + 100'000 + round % 2 * 4, 4, bad), 32, ++now);
    }
  };
  EXPECT(!duel.is_by_age());
  play(1, 0, 1000);
  EXPECT(duel.is_by_age());
  EXPECT(duel.switches() == 1);
  for (uint64_t round = 0; round < 4000; ++round) {  // scans longer than the tier between two uses: age keeps nothing
    duel.note_uses(chain_of(1, 8, 0), 32, ++now);
    duel.note_uses(chain_of(500'000 + round * 40, 20, 1), 32, ++now);
    duel.note_uses(chain_of(500'020 + round * 40, 20, 1), 32, ++now);
  }
  EXPECT(!duel.is_by_age());
  EXPECT(duel.switches() == 2);
}

TEST(class_queues_keep_what_comes_again_through_a_flood_of_what_does_not) {
  const uint64_t by_age = hits_of(PolicyKind::LRU);
  const uint64_t by_class = hits_of(PolicyKind::CLASS_QUEUES);
  std::printf("  hits of %d: %llu by age, %llu by class\n", 6000 / 4 * 8, static_cast<unsigned long long>(by_age),
              static_cast<unsigned long long>(by_class));
  EXPECT(by_age == 0);
  EXPECT(by_class > 6000 / 4 * 8 / 2);
}

TEST(a_chain_is_classed_by_its_turns_and_a_long_one_by_what_was_found_of_it) {
  EXPECT(chain_kind_of(0, 0) == 0);
  EXPECT(chain_kind_of(1, 9) == 0);
  EXPECT(chain_kind_of(2, 9) == 1);
  EXPECT(chain_kind_of(4, 9) == 2);
  EXPECT(chain_kind_of(5, 1) == 3);
  EXPECT(chain_kind_of(255, 2) == CHAIN_KINDS - 1);
  Pool pool(32 * CHUNK, 100, true, 64 << 20, PolicyKind::CLASS_QUEUES);
  const auto class_of = [&](uint64_t id) {
    const auto page = pool.directory.records(0, 100);
    uint8_t queue = UINT8_MAX;
    for (const RecordId record : page.records) {
      queue = pool.directory.record(record).key == key_of(id) ? ClassQueuePolicy::queue_of(pool.directory.record(record))
                                                              : queue;
    }
    EXPECT(pool.directory.unpin(page.pin));
    return queue;
  };
  EXPECT(pool.store(range(1, 4)) == 4);
  EXPECT(pool.store(range(5, 4), 4) == 4);  // the same request goes on: the same turn
  EXPECT(class_of(1) == 0);
  EXPECT(class_of(8) == 0);
  const Hold hold = pool.acquire(range(1, 8));
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(class_of(1) == CHAIN_KINDS);  // used twice, in the first turn as far as anybody knows
  EXPECT(pool.store(range(9, 4), 8) == 4);  // after its lease has ended the request stores the second turn
  EXPECT(class_of(1) == CHAIN_KINDS + 1);
  EXPECT(class_of(12) == 1);
  const Hold beginning = pool.acquire(range(1, 4));  // another request begins alike
  EXPECT(pool.store(range(101, 4), 4) == 4);
  EXPECT(pool.directory.release(beginning.id, ++pool.now));
  EXPECT(class_of(1) == 2 * CHAIN_KINDS + 1);
  EXPECT(class_of(101) == 1);
  EXPECT(class_of(12) == 1);
  EXPECT(pool.is_sound());
}

TEST(a_chunk_that_is_evicted_and_saved_again_has_its_former_turn) {
  Pool pool(16 * CHUNK, 100, true, 64 << 20, PolicyKind::CLASS_QUEUES);
  const auto turn_of = [&](uint64_t id) {
    const auto page = pool.directory.records(0, 100);
    uint8_t turn = UINT8_MAX;
    for (const RecordId record : page.records) {
      turn = pool.directory.record(record).key == key_of(id) ? pool.directory.record(record).turn : turn;
    }
    EXPECT(pool.directory.unpin(page.pin));
    return turn;
  };
  EXPECT(pool.store(range(1, 4)) == 4);
  const Hold hold = pool.acquire(range(1, 4));
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.store(range(5, 4), 4) == 4);
  EXPECT(turn_of(4) == 1);
  EXPECT(turn_of(8) == 2);
  EXPECT(pool.store(range(1001, 16)) == 16);  // pushes all of it out
  EXPECT(pool.lookup(range(1, 8)) == 0);
  EXPECT(pool.store(range(1, 10)) == 10);  // comes again, with two more
  EXPECT(turn_of(4) == 1);
  EXPECT(turn_of(8) == 2);
  EXPECT(turn_of(10) == 3);
  EXPECT(pool.is_sound());
}

TEST(one_long_prompt_does_not_decide_the_policy_duel) {
  const ByQueue judge;
  PolicyDuel duel(64, judge, HashSeed{});
  uint64_t now = 0;
  duel.note_uses(chain_of(101, 16, 0), 32, ++now);
  duel.note_uses(chain_of(1, 16, 1), 32, ++now);   // which the judge despises
  duel.note_uses(chain_of(201, 8, 0), 32, ++now);  // age gives up the first, worth the second
  duel.note_uses(chain_of(1, 16, 1), 32, ++now);   // sixteen hits by age, eight by worth
  EXPECT(!duel.is_by_age());
  EXPECT(duel.switches() == 0);
}

TEST(a_class_seen_little_is_as_likely_on_the_whole_as_its_own_uses_say) {
  SurvivalModel model;
  uint64_t now = 1000 * SECOND;
  for (int round = 0; round < 40; ++round) {
    for (int chunk = 0; chunk < 100; ++chunk) {
      model.note_start(0);
      if (round > 2 && chunk % 2 == 0) {
        model.note_end(0, 60 * SECOND);
      }
    }
    for (int chunk = 0; chunk < 10; ++chunk) {
      model.note_start(1);  // never used again
    }
    now += 30 * SECOND;
    model.learn(now);
  }
  EXPECT(model.worth(1, 50 * SECOND) * 4 < model.worth(2, 50 * SECOND));  // of which nothing is known
}

// Chains that leave their lists and come back together, against the same chunks one by one.
TEST(chunks_that_go_together_stand_where_they_would_one_by_one) {
  constexpr uint32_t CHUNKS = 60;
  std::mt19937_64 random(7);
  const auto draw = [&random](uint64_t below) { return random() % below; };
  struct Side {
    ChunkRecords records{CHUNKS};
    LruPolicy policy;
    EvictionQueues queues{records, policy};
    std::vector<RecordId> ids;
  };
  Side together, alone;
  for (Side* side : {&together, &alone}) {
    side->queues.add_class();
    for (uint32_t number = 0; number < CHUNKS; ++number) {
      side->ids.push_back(side->records.allocate());
      side->records[side->ids.back()].size_class = ClassId(0);
      side->records[side->ids.back()].state = ChunkState::READY;
      side->queues.add(side->ids.back());
    }
  }
  uint64_t now_ns = 0;
  for (int round = 0; round < 3000; ++round) {
    // A piece of a chain, of which some stand side by side, whole or with gaps.
    const uint32_t first = static_cast<uint32_t>(draw(CHUNKS));
    const uint32_t step = static_cast<uint32_t>(1 + draw(8) / 7);
    std::vector<RecordId> chain;
    const size_t length = 1 + draw(20);
    for (uint32_t number = first; number < CHUNKS && chain.size() < length; number += step) {
      chain.push_back(together.ids[number]);
    }
    together.queues.remove_all(chain);
    for (const RecordId id : chain) {
      alone.queues.remove(id);
    }
    now_ns += draw(2);
    const auto priority = static_cast<uint8_t>(DEFAULT_PRIORITY + draw(3) / 2);
    const auto standing = static_cast<Standing>(draw(STANDINGS));
    for (const RecordId id : chain) {
      const bool is_odd = draw(10) == 0;
      for (Side* side : {&together, &alone}) {
        ChunkRecord& record = side->records[id];
        record.last_access_ns = now_ns;
        record.priority = is_odd ? uint8_t{50} : priority;
        record.standing = standing;
      }
    }
    if (draw(5) == 0) {  // puts hands into lists
      for (Side* side : {&together, &alone}) {
        std::for_each(chain.rbegin(), chain.rend(), [side](RecordId id) { side->queues.add_by_access(id, 4, false); });
      }
    } else {
      together.queues.add_all(chain);
      std::for_each(chain.rbegin(), chain.rend(), [&](RecordId id) { alone.queues.add(id); });
    }
    for (const RecordId id : together.ids) {
      EXPECT(together.records[id].older == alone.records[id].older);
      EXPECT(together.records[id].newer == alone.records[id].newer);
      EXPECT(together.records[id].level == alone.records[id].level);
    }
    EXPECT(together.queues.unsaved_changes() == alone.queues.unsaved_changes());
    EXPECT(together.queues.victim(ClassId(0), now_ns) == alone.queues.victim(ClassId(0), now_ns));
    std::vector<uint8_t> found(CHUNKS);
    EXPECT(together.queues.verify(found).empty());
    EXPECT(std::all_of(found.begin(), found.end(), [](uint8_t count) { return count == 1; }));
  }
}
