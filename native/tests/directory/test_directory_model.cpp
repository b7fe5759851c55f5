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

// What a reservation names: all its chunks from the root on, and those of them that it writes. `is_uncertain`: one was not stored.
struct Written {
  std::vector<uint64_t> ids;
  std::vector<uint64_t> reserved;
  bool is_uncertain = false;
};

// The model: a tree of ids (the parent of id is id / 4, roots are 1..3), and who holds what. `writing`: by which reservation;
// `waiting`: committed behind one that another reservation writes.
struct Model {
  std::set<uint64_t> stored;
  std::map<uint64_t, HoldId> writing;
  std::set<uint64_t> waiting;
  std::map<HoldId, std::vector<uint64_t>> holds;
  std::map<HoldId, Written> reservations;
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
    const uint64_t choice = random_() % 13;
    if (choice == 12) {
      reserve_more();
    } else if (choice < 4) {
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
    Written placed{{ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(skip)}, {}, false};
    placed.is_uncertain = !std::all_of(placed.ids.begin(), placed.ids.end(), [this](uint64_t id) { return model_.stored.contains(id); });
    place(made, asked, skip == 0 || is_known(ids[skip - 1]), placed);
    EXPECT((made.id != 0) == !placed.reserved.empty());
    if (made.id != 0) {
      model_.reservations[made.id] = placed;
    }
  }

  // Others may have gone on behind the reservation's chunks meanwhile.
  void reserve_more() {
    const auto found = pick(model_.reservations);
    if (found == model_.reservations.end() || model_.expired.contains(found->first)) {
      return;
    }
    const uint64_t last = found->second.ids.back();
    std::vector<uint64_t> asked;
    for (uint64_t id = last; id < 64 && asked.size() < 3; asked.push_back(id)) {
      id = id * 4 + random_() % 4;
    }
    if (!asked.empty()) {
      const auto made = pool_.directory.reserve_more(found->first, pack(asked).data(), asked.size(), ++pool_.now);
      place(made, asked, !is_dropped(found->first, last), found->second);
    }
  }

  // Checks the states of what was asked for, and adds what has a slot to the reservation.
  void place(const Reservation& made, const std::vector<uint64_t>& asked, bool is_open, Written& placed) {
    for (size_t index = 0; index < asked.size(); ++index) {
      const auto state = static_cast<SaveState>(made.states[index]);
      const uint64_t id = asked[index];
      EXPECT(is_open || state == SaveState::NO_PARENT);
      const bool is_sure = model_.stored.contains(id) && !placed.is_uncertain;
      EXPECT((state == SaveState::PRESENT) == (is_open && is_sure));
      EXPECT((state == SaveState::PENDING) == (is_open && is_known(id) && !is_sure));
      placed.is_uncertain = placed.is_uncertain || state == SaveState::PENDING;
      if (state == SaveState::RESERVED) {
        EXPECT(!is_known(id));
        placed.reserved.push_back(id);
        model_.writing[id] = made.id;
      }
      is_open = state == SaveState::PRESENT || state == SaveState::PENDING || state == SaveState::RESERVED;
      if (is_open) {
        placed.ids.push_back(id);
      }
    }
  }

  void commit() {
    const auto found = pick(model_.reservations);
    if (found == model_.reservations.end()) {
      return;
    }
    const auto& [reservation, placed] = *found;
    const size_t first = random_() % placed.reserved.size();
    const size_t count = placed.reserved.size() - first;
    const std::vector<uint32_t> sums((count + 1) * 7, 5);
    const auto answers = pool_.directory.commit(reservation, first, count + 1, sums.data(), ++pool_.now);
    EXPECT(answers[count] == static_cast<uint8_t>(SaveState::EXPIRED));  // one more than reserved
    for (size_t index = first; index < first + count; ++index) {
      EXPECT(answers[index - first] == static_cast<uint8_t>(committed(reservation, placed.reserved, index)));
    }
  }

  // Commits a chunk in the model.
  SaveState committed(HoldId reservation, const std::vector<uint64_t>& reserved, size_t index) {
    const uint64_t id = reserved[index];
    if (model_.expired.contains(reservation)) {
      return SaveState::EXPIRED;
    }
    if (is_dropped(reservation, id)) {
      return SaveState::NO_PARENT;
    }
    if (model_.stored.contains(id) || model_.waiting.contains(id)) {
      return model_.stored.contains(id) ? SaveState::STORED : SaveState::PART;
    }
    const uint64_t parent = id / 4;
    if (parent == 0 || model_.stored.contains(parent)) {
      model_.writing.erase(id);
      publish(id);
      return SaveState::STORED;
    }
    if (index > 0 && reserved[index - 1] == parent && model_.writing.contains(parent)) {
      return SaveState::NO_PARENT;
    }
    model_.writing.erase(id);
    model_.waiting.insert(id);
    return SaveState::PART;
  }

  void publish(uint64_t id) {
    model_.stored.insert(id);
    for (uint64_t child = id * 4; child < id * 4 + 4; ++child) {
      if (model_.waiting.erase(child) != 0) {
        publish(child);
      }
    }
  }

  // Stored, waiting or being written.
  bool is_known(uint64_t id) const { return model_.stored.contains(id) || model_.waiting.contains(id) || model_.writing.contains(id); }

  // Takes a chunk and all behind it out of the model; how many were stored.
  uint64_t lose(uint64_t top) {
    const auto is_behind = [top](uint64_t id) {
      const auto chain = chain_to(id);
      return std::find(chain.begin(), chain.end(), top) != chain.end();
    };
    std::erase_if(model_.writing, [&](const auto& entry) { return is_behind(entry.first); });
    std::erase_if(model_.waiting, is_behind);
    const auto note = [&](HoldId hold, const std::vector<uint64_t>& ids) {
      if (std::any_of(ids.begin(), ids.end(), is_behind)) {
        dropped_[hold].insert(top);
      }
    };
    for (const auto& [id, ids] : model_.holds) {
      note(id, ids);
    }
    for (const auto& [id, placed] : model_.reservations) {
      note(id, placed.ids);
    }
    return std::erase_if(model_.stored, is_behind);
  }

  bool is_dropped(HoldId hold, uint64_t id) {
    const auto chain = chain_to(id);
    return std::any_of(chain.begin(), chain.end(), [&](uint64_t each) { return dropped_[hold].contains(each); });
  }

  void end() {
    const auto found = pick(model_.reservations);
    if (found == model_.reservations.end()) {
      return;
    }
    const HoldId reservation = found->first;
    const bool is_expiry = random_() % 3 == 0;
    if (is_expiry) {
      EXPECT(pool_.directory.expire_part(reservation, SIZE_MAX, ++pool_.now));
    } else {
      EXPECT(pool_.directory.end_reservation(reservation, ++pool_.now));
    }
    for (const uint64_t id : found->second.reserved) {
      const auto writer = model_.writing.find(id);
      if (writer != model_.writing.end() && writer->second == reservation) {
        EXPECT(lose(id) == 0);
      }
    }
    if (is_expiry) {
      model_.expired.insert(reservation);
    } else {
      model_.expired.erase(reservation);
      model_.reservations.erase(found);
    }
  }

  void acquire() {
    if (random_() % 4 == 0) {
      const auto held = pick(model_.holds);
      if (held != model_.holds.end()) {
        const HoldId copy = pool_.directory.duplicate({held->first})->front();
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
    EXPECT(dropped == (was_stored ? lose(top) : 0));
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
    EXPECT(pool_.directory.stats().writing == model_.writing.size() + model_.waiting.size());
  }

  bool is_held(uint64_t id) {
    const auto names = [&](HoldId hold, const std::vector<uint64_t>& ids) {
      return !is_dropped(hold, id) && std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    return std::any_of(model_.holds.begin(), model_.holds.end(), [&](const auto& entry) { return names(entry.first, entry.second); }) ||
           std::any_of(model_.reservations.begin(), model_.reservations.end(), [&](const auto& entry) {
             return !model_.expired.contains(entry.first) && names(entry.first, entry.second.ids);
           });
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
