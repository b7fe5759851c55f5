// Eviction against a slow, obvious model. Under LRU with priorities every victim is the model's; with class queues the
// victims are the policy's own business, but there are exactly as many as needed, none of them held, and no holes.
#include <algorithm>
#include <map>
#include <set>

#include "tests/directory_pool.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND = 1'000'000'000;
constexpr size_t CAPACITY = 24;

// Ids form a tree: the parent of id is id / 3, roots are 1 and 2.
std::vector<uint64_t> chain_to(uint64_t leaf) {
  std::vector<uint64_t> ids;
  for (; leaf > 0; leaf /= 3) {
    ids.insert(ids.begin(), leaf);
  }
  return ids;
}

struct Chunk {
  uint64_t used_ns = 0;
  uint64_t retained_ns = 0;
  uint8_t priority = DEFAULT_PRIORITY;
  uint32_t duration_ms = 0;
  int holds = 0;
};

class Model {
 public:
  std::map<uint64_t, Chunk> chunks;

  // Of the chunks that nobody holds and nothing follows, the least recently used of the lowest priority.
  [[nodiscard]] uint64_t victim() const {
    uint64_t best = 0;
    for (const auto& [id, chunk] : chunks) {
      const uint64_t parent = id;
      const bool is_leaf =
          std::none_of(chunks.begin(), chunks.end(), [parent](const auto& other) { return other.first / 3 == parent; });
      if (chunk.holds == 0 && is_leaf &&
          (best == 0 || std::pair(chunk.priority, chunk.used_ns) <
                            std::pair(chunks.at(best).priority, chunks.at(best).used_ns))) {
        best = id;
      }
    }
    return best;
  }

  // Durations end at half seconds and the clock stands at whole ones, so that ticks of 67 ms make no difference.
  void expire(uint64_t now_ns) {
    for (auto& [id, chunk] : chunks) {
      const uint64_t since = std::max(chunk.used_ns, chunk.retained_ns);
      if (chunk.duration_ms != 0 && chunk.holds == 0 && since + chunk.duration_ms * uint64_t{1'000'000} <= now_ns) {
        chunk.priority = DEFAULT_PRIORITY;
        chunk.duration_ms = 0;
      }
    }
  }
};

class RandomRun {
 public:
  RandomRun(uint64_t seed, PolicyKind policy) : random_(seed), policy_(policy), pool_(CAPACITY * CHUNK, 100, true, 64 << 20, policy) {
    pool_.directory.retention().ledger().cap(policy == PolicyKind::LRU ? 1.0 : 0.4);
  }

  void step() {
    pool_.now += (1 + random_() % 3) * SECOND;
    const uint64_t choice = random_() % 10;
    if (choice < 5) {
      store();
    } else if (choice < 7) {
      acquire();
    } else if (choice < 8) {
      release();
    } else {
      retain();
    }
    EXPECT(pool_.is_sound());
    for (uint64_t id = 1; id < 250; ++id) {
      EXPECT(pool_.view->find(key_of(id)).has_value() == (model_.chunks.count(id) != 0));
    }
  }

  void finish() {
    while (!holds_.empty()) {
      release();
    }
    EXPECT(flush(pool_.directory, std::nullopt, UINT64_MAX).chunks == model_.chunks.size());
    EXPECT(pool_.directory.stats().retention.bytes == 0);
    EXPECT(pool_.is_sound());
  }

 private:
  uint64_t some_leaf() { return 1 + random_() % 249; }

  void store() {
    const std::vector<uint64_t> ids = chain_to(some_leaf());
    const std::set<uint64_t> before = present();
    const uint64_t now = pool_.now;
    const auto made =
        pool_.directory.reserve(pool_.owner, pool_.small, std::nullopt, pack(ids).data(), ids.size(), now);
    model_.expire(now);
    std::vector<uint64_t> placed;
    size_t fresh = 0;
    for (size_t index = 0; index < ids.size(); ++index) {
      if (model_.chunks.count(ids[index]) == 0) {
        if (model_.chunks.size() == CAPACITY) {
          const uint64_t victim = next_victim();
          if (victim == 0) {
            EXPECT(made.states[index] == static_cast<uint8_t>(SaveState::FULL));
            break;
          }
          model_.chunks.erase(victim);
        }
        ++fresh;
      }
      EXPECT(made.states[index] <= 1);
      ++model_.chunks[ids[index]].holds;
      placed.push_back(ids[index]);
    }
    if (made.id != 0) {
      const std::vector<uint32_t> sums(fresh * EXTENTS);
      EXPECT(all_are(pool_.directory.commit(made.id, 0, fresh, sums.data(), now), SaveState::STORED));
      EXPECT(pool_.directory.end_reservation(made.id, now));
    }
    let_go(placed);
    EXPECT(present().size() == std::min(CAPACITY, before.size() + fresh));  // exactly as many as needed
  }

  // The model's, or (class queues) whoever of those that may go has gone.
  uint64_t next_victim() {
    if (policy_ == PolicyKind::LRU) {
      return model_.victim();
    }
    for (const auto& [id, chunk] : model_.chunks) {
      if (chunk.holds == 0 && !pool_.view->find(key_of(id)) && !is_reserved(id)) {
        return id;
      }
    }
    return 0;
  }
  // A chunk that was evicted and reserved anew within one request is found neither before nor after.
  [[nodiscard]] bool is_reserved(uint64_t id) const { return model_.chunks.at(id).holds > 0; }

  void acquire() {
    const std::vector<uint64_t> ids = chain_to(some_leaf());
    const Hold hold = pool_.directory.acquire(pool_.owner, pack(ids).data(), ids.size(), pool_.now);
    size_t length = 0;
    while (length < ids.size() && model_.chunks.count(ids[length]) != 0) {
      ++model_.chunks[ids[length++]].holds;
    }
    EXPECT(hold.chunks == length);
    if (hold.id != 0) {
      holds_[hold.id] = std::vector<uint64_t>(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length));
    }
    if (holds_.size() > 3) {
      release();
    }
  }

  void release() {
    if (!holds_.empty()) {
      const auto found = std::next(holds_.begin(), static_cast<std::ptrdiff_t>(random_() % holds_.size()));
      EXPECT(pool_.directory.release(found->first, pool_.now));
      let_go(found->second);
      holds_.erase(found);
    }
  }

  void let_go(const std::vector<uint64_t>& ids) {
    for (const uint64_t id : ids) {
      --model_.chunks[id].holds;
      model_.chunks[id].used_ns = pool_.now;
    }
  }

  void retain() {
    const std::vector<uint64_t> ids = chain_to(some_leaf());
    const uint8_t priority = std::array<uint8_t, 5>{0, 20, 35, 60, 100}[random_() % 5];
    const auto duration_ms = static_cast<uint32_t>(random_() % 2 == 0 ? 0 : 1000 * (random_() % 40) + 500);
    const size_t first = random_() % ids.size();
    const std::vector<uint64_t> some(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
    const auto states = pool_.directory.retention().retain(pool_.owner, pack(some).data(),
                                               std::vector<Retention>(some.size(), {priority, duration_ms}), pool_.now);
    model_.expire(pool_.now);
    for (size_t index = 0; index < some.size(); ++index) {
      const auto found = model_.chunks.find(some[index]);
      EXPECT((states[index] == static_cast<uint8_t>(RetainState::ABSENT)) == (found == model_.chunks.end()));
      if (found != model_.chunks.end()) {
        found->second.priority = priority;
        found->second.duration_ms = priority == DEFAULT_PRIORITY ? 0 : duration_ms;
        found->second.retained_ns = pool_.now;
        EXPECT(policy_ != PolicyKind::LRU || pool_.directory.retention().of(key_of(some[index])) ==
                                                 (Retention{priority, found->second.duration_ms}));
      }
    }
  }

  std::set<uint64_t> present() {
    std::set<uint64_t> ids;
    for (uint64_t id = 1; id < 250; ++id) {
      if (pool_.view->find(key_of(id))) {
        ids.insert(id);
      }
    }
    return ids;
  }

  std::mt19937_64 random_;
  PolicyKind policy_;
  Pool pool_;
  Model model_;
  std::map<HoldId, std::vector<uint64_t>> holds_;
};

void run(PolicyKind policy) {
  const uint64_t seed = kvpool::testing::seed();
  for (uint64_t number = 0; number < 20; ++number) {
    RandomRun requests(seed + number, policy);
    for (int step = 0; step < 600 && kvpool::testing::failures() == 0; ++step) {
      requests.step();
    }
    requests.finish();
  }
}

}  // namespace

TEST(victims_under_lru_with_priorities_are_the_models) { run(PolicyKind::LRU); }

TEST(class_queues_evict_exactly_what_is_needed_and_leave_no_holes) { run(PolicyKind::CLASS_QUEUES); }
