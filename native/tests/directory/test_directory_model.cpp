// Random requests to the directory against a simple model, with verify() after each step.
#include <algorithm>
#include <map>
#include <set>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// The model: a tree of ids (the parent of id is id / 4, roots are 1..3), and who holds what.
struct Model {
  std::set<uint64_t> stored;
  std::map<HoldId, std::vector<uint64_t>> holds;
  std::map<HoldId, std::vector<uint64_t>> reservations;  // chain from the root
  std::map<HoldId, size_t> first_reserved;
  std::set<HoldId> expired;
};

std::vector<uint64_t> chain_to(uint64_t leaf) {
  std::vector<uint64_t> ids;
  for (; leaf > 0; leaf /= 4) {
    ids.insert(ids.begin(), leaf);
  }
  return ids;
}

class RandomRun {
 public:
  explicit RandomRun(uint64_t seed) : random_(seed), pool_(48 * CHUNK, 60, true, 4 * CHUNK) {
    large_ = *pool_.directory.add_class(5 * CHUNK, 7);
  }

  void step() {
    const uint64_t before = pool_.directory.stats().evicted_chunks;
    const uint64_t choice = random_() % 12;
    if (choice < 4) {
      reserve();
    } else if (choice < 6) {
      commit();
    } else if (choice == 6) {
      end();
    } else if (choice < 9) {
      acquire();
    } else if (choice < 11) {
      release();
    } else {
      remove();
    }
    reconcile(pool_.directory.stats().evicted_chunks - before);
    EXPECT(pool_.is_sound());
  }

 private:
  // Trees of roots 1 and 2 are small chunks, of root 3 large ones.
  ClassId class_of(uint64_t id) { return chain_to(id).front() == 3 ? large_ : pool_.small; }

  void reserve() {
    const auto ids = chain_to(1 + random_() % 255);
    const size_t skip = random_() % 2 == 0 ? 0 : random_() % ids.size();
    std::optional<ChunkKey> parent;
    if (skip > 0) {
      parent = key_of(ids[skip - 1]);
    }
    const std::vector<uint64_t> asked(ids.begin() + static_cast<std::ptrdiff_t>(skip), ids.end());
    const auto made = pool_.directory.reserve(pool_.owner, class_of(ids[0]), parent, pack(asked).data(), asked.size(),
                                              ++pool_.now);
    size_t present = 0;
    std::vector<uint64_t> placed(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(skip));
    uint8_t before = 0;
    for (size_t index = 0; index < asked.size(); ++index) {
      EXPECT(made.states[index] >= before);
      before = std::min<uint8_t>(made.states[index], 2);
      present += made.states[index] == 0 ? 1U : 0U;
      EXPECT(made.states[index] != 0 || model_.stored.count(asked[index]) != 0);
      EXPECT(made.states[index] != 1 || model_.stored.count(asked[index]) == 0);
      if (made.states[index] <= 1) {
        placed.push_back(asked[index]);
      }
    }
    EXPECT((made.id != 0) == (placed.size() > skip + present));
    if (made.id != 0) {
      model_.reservations[made.id] = placed;
      model_.first_reserved[made.id] = skip + present;
    }
  }

  void commit() {
    const auto found = pick(model_.reservations);
    if (found == model_.reservations.end()) {
      return;
    }
    const auto& ids = found->second;
    const size_t before = model_.first_reserved[found->first];
    const size_t first = random_() % (ids.size() - before);
    const size_t count = ids.size() - before - first;
    const std::vector<uint32_t> sums((count + 1) * 7, 5);
    const auto answers = pool_.directory.commit(found->first, first, count + 1, sums.data());
    EXPECT(answers[count] == static_cast<uint8_t>(SaveState::EXPIRED));  // one more than reserved
    for (size_t index = 0; index < count; ++index) {
      const auto answer = static_cast<SaveState>(answers[index]);
      EXPECT(model_.expired.count(found->first) == 0 || answer == SaveState::EXPIRED);
      if (answer == SaveState::STORED) {
        model_.stored.insert(ids[before + first + index]);
      }
    }
  }

  void end() {
    const auto found = pick(model_.reservations);
    if (found == model_.reservations.end()) {
      return;
    }
    if (random_() % 3 == 0) {
      EXPECT(pool_.directory.expire_reservation(found->first, ++pool_.now) !=
             (model_.expired.count(found->first) != 0));
      model_.expired.insert(found->first);
    } else {
      EXPECT(pool_.directory.end_reservation(found->first, ++pool_.now));
      model_.expired.erase(found->first);
      model_.reservations.erase(found);
    }
  }

  void acquire() {
    if (random_() % 4 == 0) {
      const auto held = pick(model_.holds);
      if (held != model_.holds.end()) {
        const HoldId copy = pool_.directory.duplicate(held->first)->id;
        model_.holds[copy] = held->second;
        dropped_[copy] = dropped_[held->first];
      }
      return;
    }
    auto ids = chain_to(1 + random_() % 255);
    const Hold hold = pool_.acquire(ids);
    size_t stored = 0;
    while (stored < ids.size() && model_.stored.count(ids[stored]) != 0) {
      ++stored;
    }
    EXPECT(hold.chunks == stored);  // what is stored is found
    EXPECT(pool_.lookup(ids) == stored);
    if (hold.id != 0) {
      ids.resize(stored);
      model_.holds[hold.id] = ids;
    }
  }

  void release() {
    const auto found = pick(model_.holds);
    if (found != model_.holds.end()) {
      EXPECT(pool_.directory.release(found->first, ++pool_.now));
      model_.holds.erase(found);
    }
  }

  // Drops a subtree, or flushes everything that is not held.
  void remove() {
    if (random_() % 4 == 0) {
      const auto result = flush(pool_.directory, std::nullopt, UINT64_MAX);
      EXPECT(std::erase_if(model_.stored, [this](uint64_t id) { return !is_held(id); }) == result.chunks);
      EXPECT(model_.stored.size() == result.skipped);
      return;
    }
    const uint64_t top = 1 + random_() % 255;
    const bool was_stored = model_.stored.count(top) != 0;
    const uint64_t dropped = drop(pool_.directory, key_of(top));
    uint64_t expected = 0;
    if (was_stored) {
      expected = std::erase_if(model_.stored, [top](uint64_t id) {
        const auto chain = chain_to(id);
        return std::find(chain.begin(), chain.end(), top) != chain.end();
      });
      for (auto* kept : {&model_.holds, &model_.reservations}) {
        for (auto& [id, ids] : *kept) {
          dropped_[id].insert(top);
        }
      }
    }
    EXPECT(dropped == expected);
  }

  // Chunks that vanished must be as many as were evicted, and nobody may hold them.
  void reconcile(uint64_t evicted) {
    uint64_t vanished = 0;
    for (auto id = model_.stored.begin(); id != model_.stored.end();) {
      if (pool_.view->find(key_of(*id))) {
        ++id;
      } else {
        EXPECT(!is_held(*id));
        ++vanished;
        id = model_.stored.erase(id);
      }
    }
    EXPECT(vanished == evicted);
    EXPECT(pool_.directory.stats().chunks == model_.stored.size());
  }

  bool is_held(uint64_t id) {
    for (const auto* kept : {&model_.holds, &model_.reservations}) {
      for (const auto& [hold, ids] : *kept) {
        if (model_.expired.count(hold) != 0) {
          continue;
        }
        for (const uint64_t held : ids) {
          if (dropped_[hold].count(held) != 0) {
            break;  // this one and what follows were dropped while held: they are other chunks now
          }
          if (held == id) {
            return true;
          }
        }
      }
    }
    return false;
  }

  template <typename Map>
  typename Map::iterator pick(Map& map) {
    return map.empty() ? map.end() : std::next(map.begin(), static_cast<std::ptrdiff_t>(random_() % map.size()));
  }

  std::mt19937_64 random_;
  Pool pool_;
  ClassId large_;
  Model model_;
  std::map<HoldId, std::set<uint64_t>> dropped_;
};

}  // namespace

TEST(random_requests_agree_with_a_model) {
  const uint64_t seed = kvpool::testing::seed();
  for (uint64_t run = 0; run < 10; ++run) {
    RandomRun requests(seed + run);
    for (int step = 0; step < 1500 && kvpool::testing::failures() == 0; ++step) {
      requests.step();
    }
  }
}
