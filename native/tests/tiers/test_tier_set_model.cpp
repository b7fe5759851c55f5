// Three tiers against a model of them: which tiers have which chunk, and with what priority, after any sequence of moves.
#include "tests/harness.h"

#include <map>

#include "directory/flush_walk.h"
#include "tests/tiers/three_tiers.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t CHAINS = 3;
constexpr uint64_t CHAIN = 6;
constexpr int STEPS = 400;
constexpr int RUNS = 8;

// What is stored with which priority, by tier and chunk.
using Stored = std::array<std::map<uint64_t, uint8_t>, ThreeTiers::TIERS>;

class RandomRun {
 public:
  explicit RandomRun(uint64_t seed) : random_(seed), tiers_(7, 9, 11) {
    for (Directory* tier : tiers_.all) {
      tier->retention().ledger().cap(1.0);
    }
  }

  void step() {
    const Stored before = model_;
    evicts_ = true;
    move();
    follow(before);
    compare();
    EXPECT(tiers_.is_sound());
  }

 private:
  size_t up_to(size_t last) { return random_() % (last + 1); }
  std::vector<uint64_t> chain() {
    return range(1 + CHAIN * up_to(CHAINS - 1), 1 + up_to(CHAIN - 1));
  }
  static std::vector<uint64_t> everything() { return range(1, CHAINS * CHAIN); }

  void move() {
    switch (up_to(6)) {
      case 0:
      case 1:
        return save(chain());
      case 2:
        return copy(0, 1 + up_to(1), chain());
      case 3:
        return copy(1, 2, chain());
      case 4:
        return up_to(1) == 0 ? promote(chain()) : retain(chain());
      case 5:
        evicts_ = false;
        static_cast<void>(drop(*tiers_.all[up_to(2)], key_of(chain().back())));
        return;
      default:
        evicts_ = false;
        if (up_to(3) == 0) {
          static_cast<void>(flush(*tiers_.all[up_to(2)], std::nullopt, UINT64_MAX));
        }
    }
  }

  // What comes is noted at once; what has gone is found out by `follow`.
  void arrive(size_t tier, uint64_t id, uint8_t priority) { model_[tier].emplace(id, priority); }

  void save(const std::vector<uint64_t>& ids) {
    for (size_t index = 0, placed = tiers_.memory.store(ids); index < placed; ++index) {
      arrive(0, ids[index], DEFAULT_PRIORITY);
    }
  }

  void copy(size_t from, size_t to, const std::vector<uint64_t>& ids) {
    static_cast<void>(tiers_.copy(from, to, ids));
    for (const uint64_t id : ids) {
      if (tiers_.all[to]->place_of(key_of(id))) {
        arrive(to, id, DEFAULT_PRIORITY);
      }
    }
  }

  void retain(const std::vector<uint64_t>& ids) {
    const auto priority = static_cast<uint8_t>(DEFAULT_PRIORITY + up_to(3) * 10);
    const auto states = tiers_.memory.directory.retention().retain(tiers_.memory.owner, pack(ids).data(),
                                                       std::vector<Retention>(ids.size(), {priority, 0}), ++tiers_.memory.now);
    for (auto& of_tier : model_) {
      for (const uint64_t id : ids) {
        if (of_tier.contains(id)) {
          of_tier[id] = priority;
        }
      }
    }
    EXPECT(states.size() == ids.size());
  }

  void promote(const std::vector<uint64_t>& ids) {
    Directory& memory = tiers_.memory.directory;
    const Reservation made =
        memory.promotions().promote(tiers_.memory.owner, tiers_.memory.small, std::nullopt, pack(ids).data(), ids.size(), ++tiers_.memory.now);
    if (made.id == 0) {
      return;
    }
    const std::vector<uint8_t> levels = memory.columns({made.id})->levels;
    for (size_t index = 0; index < levels.size(); ++index) {
      if (made.states[index] != static_cast<uint8_t>(SaveState::RESERVED)) {
        continue;
      }
      const size_t source = model_[1].contains(ids[index]) ? 1 : 2;
      EXPECT(levels[index] == static_cast<uint8_t>(ThreeTiers::level(source)));
      EXPECT(memory.promotions().landed(key_of(ids[index]), made.generations[index]));
      arrive(0, ids[index], model_[source][ids[index]]);
    }
    EXPECT(memory.release(made.id, ++tiers_.memory.now));
  }

  // Takes out of the model what a step has evicted or removed. What was evicted hands its priority down.
  void follow(const Stored& before) {
    for (size_t tier = 0; tier < ThreeTiers::TIERS; ++tier) {
      for (const uint64_t id : everything()) {
        if (tiers_.all[tier]->place_of(key_of(id)) || !model_[tier].contains(id)) {
          continue;
        }
        const uint8_t priority = model_[tier][id];
        model_[tier].erase(id);
        for (size_t lower = tier + 1; evicts_ && before[tier].contains(id) && lower < ThreeTiers::TIERS; ++lower) {
          if (model_[lower].contains(id) && priority > DEFAULT_PRIORITY) {
            model_[lower][id] = priority;
          }
        }
      }
    }
  }

  void compare() {
    for (const uint64_t id : everything()) {
      uint8_t expected = 0;
      for (size_t tier = 0; tier < ThreeTiers::TIERS; ++tier) {
        const bool is_stored = model_[tier].contains(id);
        expected = static_cast<uint8_t>(expected | (is_stored ? tier_bit(ThreeTiers::level(tier)) : 0));
        EXPECT(!is_stored || (id - 1) % CHAIN == 0 || model_[tier].contains(id - 1));  // whole prefixes
        EXPECT(!is_stored || tiers_.all[tier]->retention().of(key_of(id)) == Retention(model_[tier][id], 0));
      }
      EXPECT(tiers_.found(key_of(id)) == expected && tiers_.shown(key_of(id)) == expected);
      EXPECT(tiers_.set.tiers_of(key_of(id)) == expected);
    }
    for (size_t tier = 0; tier < ThreeTiers::TIERS; ++tier) {
      const auto is_last = [&](const auto& stored) {
        return std::none_of(model_.begin() + static_cast<std::ptrdiff_t>(tier) + 1, model_.end(),
                            [&](const auto& lower) { return lower.contains(stored.first); });
      };
      const auto unsaved = std::count_if(model_[tier].begin(), model_[tier].end(), is_last);
      EXPECT(tiers_.all[tier]->count_unsaved() == static_cast<uint64_t>(unsaved));
    }
  }

  std::mt19937_64 random_;
  ThreeTiers tiers_;
  Stored model_;
  bool evicts_ = true;
};

}  // namespace

TEST(three_tiers_have_what_the_model_says) {
  const uint64_t seed = kvpool::testing::seed();
  for (uint64_t run = 0; run < RUNS && failures() == 0; ++run) {
    RandomRun random_run(seed + run);
    for (int step = 0; step < STEPS && failures() == 0; ++step) {
      random_run.step();
    }
  }
}
