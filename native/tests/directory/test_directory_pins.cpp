// Chunks that hardware reads keep their place in the order: a tier that is written down as it fills evicts the coldest, as if
// nothing were written, and waits for nothing as long as anything has a copy below.
#include <map>
#include <random>
#include <set>

#include "tests/directory/directory_tiers.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t CHUNKS = 20'000;

// A tier full of single chunks 1, 2, …, the coldest first, and the coldest half of them on disk.
struct HalfSaved : Tiers {
  HalfSaved() : Tiers(CHUNKS, 2 * CHUNKS) {
    for (uint64_t id = 1; id <= CHUNKS; ++id) {
      EXPECT(memory.store({id}) == 1);
    }
    for (uint64_t id = 1; id <= CHUNKS / 2; ++id) {
      EXPECT(demote() == 1);
    }
    EXPECT(memory.directory.stats().evicted_chunks + memory.directory.stats().shed_chunks == 0);
  }
  [[nodiscard]] bool is_in_memory(uint64_t id) const {
    const auto found = memory.directory.place_of(key_of(id));
    return found.has_value();
  }
  // How many of the coldest chunks have left memory, if these and no others have; else nothing.
  [[nodiscard]] std::optional<uint64_t> coldest_gone() const {
    uint64_t gone = 0;
    while (gone < CHUNKS && !is_in_memory(gone + 1)) {
      ++gone;
    }
    for (uint64_t id = gone + 1; id <= CHUNKS; ++id) {
      if (!is_in_memory(id)) {
        return std::nullopt;
      }
    }
    return gone;
  }
};

}  // namespace

TEST(saves_into_a_half_saved_tier_evict_exactly_the_coldest) {
  for (const bool is_protected : {true, false}) {
    HalfSaved tiers;
    tiers.memory.directory.room().protect_unsaved(is_protected);
    for (uint64_t id = 1; id <= 2000; ++id) {
      EXPECT(tiers.memory.store({CHUNKS + id}) == 1);
    }
    EXPECT(tiers.coldest_gone() == 2000);
    EXPECT(tiers.is_sound());
  }
}

TEST(a_burst_as_long_as_what_is_saved_waits_for_nothing) {
  HalfSaved tiers;
  tiers.memory.directory.room().protect_unsaved(true);
  for (uint64_t id = 1; id <= CHUNKS / 2; ++id) {
    EXPECT(tiers.memory.store({CHUNKS + id}) == 1);
  }
  EXPECT(all_are(tiers.memory.reserve({3 * CHUNKS}).states, SaveState::NOT_READY));
  EXPECT(tiers.coldest_gone() == CHUNKS / 2);
  EXPECT(tiers.is_sound());
}

TEST(the_coldest_saved_chunk_goes_though_colder_ones_are_being_written) {
  HalfSaved tiers;
  std::vector<Hold> pins;
  for (uint64_t count = 0; count < CHUNKS / 8; ++count) {
    pins.push_back(tiers.memory.directory.pin_unsaved(512, WriteOrder::COLDEST));
    EXPECT(pins.back().chunks == 1);
  }
  EXPECT(tiers.memory.directory.stats().pinned == CHUNKS / 8);
  for (auto pin = pins.rbegin(); pin != pins.rend(); ++pin) {  // the warmest first: each finds its place
    EXPECT(tiers.demote(*pin) == 1);
  }
  tiers.memory.directory.room().protect_unsaved(true);
  for (uint64_t id = 1; id <= CHUNKS / 2 + CHUNKS / 8; ++id) {
    EXPECT(tiers.memory.store({CHUNKS + id}) == 1);
  }
  EXPECT(tiers.coldest_gone() == CHUNKS / 2 + CHUNKS / 8);
  EXPECT(tiers.is_sound());
}

// One in the middle of the order, far from both ends.
TEST(a_check_changes_nothing_about_who_goes_next) {
  HalfSaved tiers;
  for (const uint32_t place : {0U, 3000U, 9000U, 15000U}) {
    const RecordPage page = tiers.memory.directory.records(place, 16);
    EXPECT(page.records.size() == 16);
    EXPECT(tiers.memory.directory.unpin(page.pin));
  }
  const RecordPage checked = tiers.memory.directory.records(0, 4);
  for (uint64_t id = 1; id <= 100; ++id) {
    EXPECT(tiers.memory.store({CHUNKS + id}) == 1);
  }
  for (uint64_t id = 1; id <= 104; ++id) {
    EXPECT(tiers.is_in_memory(id) == (id <= 4));  // what is being read goes after all
  }
  EXPECT(tiers.memory.directory.unpin(checked.pin));
  EXPECT(tiers.memory.store(range(2 * CHUNKS, 4)) == 4);
  EXPECT(tiers.coldest_gone() == 104);
  EXPECT(tiers.is_sound());
}

TEST(a_flush_takes_what_is_read_for_a_copy_below_and_the_copy_is_not_kept) {
  Tiers tiers(4, 16);
  EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
  const Hold pin = tiers.memory.directory.pin_unsaved(64, WriteOrder::COLDEST);
  EXPECT(pin.chunks == 4);
  EXPECT(flush(tiers.memory.directory, std::nullopt, UINT64_MAX).chunks == 4);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.directory.stats().zombies == 4);
  for (uint64_t id = 1; id <= 4; ++id) {
    EXPECT(!tiers.memory.directory.place_of(key_of(id)));
  }
  EXPECT(tiers.memory.directory.unpin(pin.id));
  EXPECT(tiers.memory.directory.stats().zombies == 0);
  EXPECT(tiers.memory.store({11, 12, 13, 14}) == 4);
  EXPECT(tiers.is_sound());
}

TEST(a_chunk_that_is_dropped_while_it_is_read_keeps_its_slot_until_that_has_ended) {
  Tiers tiers(4, 16);
  EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
  const Hold pin = tiers.memory.directory.pin_unsaved(64, WriteOrder::COLDEST);
  EXPECT(pin.chunks == 4);
  const Hold lease = tiers.memory.acquire({1, 2});
  EXPECT(drop(tiers.memory.directory, key_of(2)) == 3);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.directory.stats().zombies == 3);
  EXPECT(flush(tiers.memory.directory, std::nullopt, UINT64_MAX).chunks == 0);
  EXPECT(all_are(tiers.memory.reserve({11}).states, SaveState::NOT_READY));
  EXPECT(tiers.memory.directory.release(lease.id, ++tiers.memory.now));
  EXPECT(tiers.is_sound());
  EXPECT(tiers.memory.directory.unpin(pin.id));
  EXPECT(!tiers.memory.directory.unpin(pin.id));
  EXPECT(tiers.memory.directory.stats().zombies == 0);
  EXPECT(tiers.memory.store({11, 12, 13}) == 3);
  EXPECT(tiers.is_sound());
}

TEST(one_pin_on_several_keeps_what_is_here_of_them_and_ends_for_all) {
  Tiers tiers(4, 4);
  for (uint64_t id = 1; id <= 4; ++id) {
    EXPECT(tiers.memory.store({id}) == 1);
  }
  std::vector<uint8_t> keys;
  for (const uint64_t id : {1ULL, 9ULL, 2ULL}) {
    const ChunkKey key = key_of(id);
    const auto* const first = reinterpret_cast<const uint8_t*>(&key);
    keys.insert(keys.end(), first, first + KEY_BYTES);
  }
  EXPECT(!tiers.memory.directory.pin_keys(NamespaceId(tiers.memory.owner.value() + 1), keys));
  EXPECT(!tiers.memory.directory.pin_keys(tiers.memory.owner, std::span(keys).subspan(KEY_BYTES, KEY_BYTES)));
  const auto pin = tiers.memory.directory.pin_keys(tiers.memory.owner, keys);
  EXPECT(pin.has_value());
  EXPECT(tiers.memory.directory.stats().pinned == 2);
  EXPECT(tiers.memory.store({5}) == 1);
  EXPECT(tiers.memory.store({6}) == 1);
  EXPECT(tiers.memory.store({7}) == 1);
  EXPECT(tiers.memory.directory.place_of(key_of(1)).has_value());
  EXPECT(tiers.memory.directory.place_of(key_of(2)).has_value());
  EXPECT(!tiers.memory.directory.place_of(key_of(3)).has_value());
  EXPECT(tiers.memory.directory.unpin(*pin));
  EXPECT(!tiers.memory.directory.unpin(*pin));
  EXPECT(tiers.memory.store({8}) == 1);
  EXPECT(!tiers.memory.directory.place_of(key_of(1)).has_value());
  EXPECT(tiers.memory.directory.verify().empty());
}

TEST(retained_chunks_are_not_evicted_for_others) {
  Tiers tiers(4, 16);
  tiers.memory.directory.retention().ledger().cap(1.0);
  EXPECT(tiers.memory.store({1}) == 1);
  EXPECT(tiers.memory.store({2}) == 1);
  static_cast<void>(tiers.memory.directory.retention().retain(tiers.memory.owner, pack({1}).data(), {{80, 0}}, ++tiers.memory.now));
  EXPECT(tiers.demote() == 1);
  EXPECT(tiers.demote() == 1);
  EXPECT(tiers.memory.store({3}) == 1);
  EXPECT(tiers.memory.store({4}) == 1);
  tiers.memory.directory.room().protect_unsaved(true);
  EXPECT(tiers.memory.store({5}) == 1);
  EXPECT(tiers.memory.directory.place_of(key_of(1)) && !tiers.memory.directory.place_of(key_of(2)));
  EXPECT(all_are(tiers.memory.reserve({6}).states, SaveState::NOT_READY));
  EXPECT(tiers.is_sound());
}

namespace {

constexpr size_t SMALL = 20;

// Ids form a tree: the parent of id is id / 3, roots are 1 and 2.
std::vector<uint64_t> chain_to(uint64_t leaf) {
  std::vector<uint64_t> ids;
  for (; leaf > 0; leaf /= 3) {
    ids.insert(ids.begin(), leaf);
  }
  return ids;
}

// Two tiers of which the lower one has room for everything, against a slow and obvious model of the upper one under LRU.
class RandomRun {
 public:
  explicit RandomRun(uint64_t seed) : random_(seed), tiers_(SMALL, 400) {}

  void step() {
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        store();
        break;
      case 3:
        use();
        break;
      case 4:
        start_writing();
        break;
      case 5:
        end_writing();
        break;
      default:
        check();
    }
    EXPECT(tiers_.is_sound());
    for (uint64_t id = 1; id < 250; ++id) {
      EXPECT(tiers_.memory.directory.place_of(key_of(id)).has_value() == (chunks_.count(id) != 0));
    }
  }

 private:
  struct Chunk {
    uint64_t used_ns = 0;
    int holds = 0;
    int pins = 0;
  };

  // Of the leaves that nobody holds or pins the oldest; where that one is protected, the oldest that has a copy below.
  uint64_t victim(bool is_protected) {
    const auto oldest = [&](bool is_saved_only) {
      uint64_t best = 0;
      for (const auto& [id, chunk] : chunks_) {
        const uint64_t parent = id;
        const bool is_leaf =
            std::none_of(chunks_.begin(), chunks_.end(), [parent](const auto& other) { return other.first / 3 == parent; });
        if (is_leaf && chunk.holds == 0 && chunk.pins == 0 && (!is_saved_only || below_.count(id) != 0) &&
            (best == 0 || chunk.used_ns < chunks_.at(best).used_ns)) {
          best = id;
        }
      }
      return best;
    };
    const uint64_t first = oldest(false);
    return first == 0 || !is_protected || below_.count(first) != 0 ? first : oldest(true);
  }

  void store() {
    const bool is_protected = random_() % 2 == 0;
    tiers_.memory.directory.room().protect_unsaved(is_protected);
    const std::vector<uint64_t> ids = chain_to(1 + random_() % 249);
    const Reservation made = tiers_.memory.reserve(ids);
    std::vector<uint64_t> placed;
    for (size_t index = 0; index < ids.size() && (chunks_.count(ids[index]) != 0 || make_room(is_protected)); ++index) {
      ++chunks_[ids[index]].holds;
      placed.push_back(ids[index]);
      EXPECT(made.states[index] <= static_cast<uint8_t>(SaveState::RESERVED));
    }
    EXPECT(placed.size() == ids.size() || made.states[placed.size()] > static_cast<uint8_t>(SaveState::RESERVED));
    if (made.id != 0) {
      static_cast<void>(tiers_.memory.commit(made, 0, ids.size()));
      EXPECT(tiers_.memory.directory.end_reservation(made.id, ++tiers_.memory.now));
    }
    let_go(placed);
  }

  bool make_room(bool is_protected) {
    const uint64_t id = chunks_.size() < SMALL ? 0 : victim(is_protected);
    chunks_.erase(id);
    return chunks_.size() < SMALL;
  }

  void use() {
    std::vector<uint64_t> ids = chain_to(1 + random_() % 249);
    const Hold hold = tiers_.memory.acquire(ids);
    size_t length = 0;
    while (length < ids.size() && chunks_.count(ids[length]) != 0) {
      ++length;
    }
    EXPECT(hold.chunks == length);
    if (hold.id != 0) {
      EXPECT(tiers_.memory.directory.release(hold.id, ++tiers_.memory.now));
      ids.resize(length);
      for (const uint64_t id : ids) {
        ++chunks_[id].holds;
      }
      let_go(ids);
    }
  }

  void let_go(const std::vector<uint64_t>& ids) {
    for (const uint64_t id : ids) {
      --chunks_[id].holds;
      chunks_[id].used_ns = tiers_.memory.now;
    }
  }

  std::vector<uint64_t> ids_of(HoldId pin) {
    std::vector<uint64_t> ids;
    while (const auto key = tiers_.memory.directory.holds().key_of(pin, ids.size())) {
      uint64_t id = 1;
      while (key_of(id) != *key) {
        ++id;
      }
      ids.push_back(id);
    }
    return ids;
  }

  void start_writing() {
    const Hold pin = tiers_.memory.directory.pin_unsaved(64, static_cast<WriteOrder>(random_() % 3));
    if (pin.id != 0) {
      writing_[pin.id] = ids_of(pin.id);
      for (const uint64_t id : writing_[pin.id]) {
        EXPECT(below_.count(id) == 0);
        ++chunks_.at(id).pins;
      }
    }
  }

  void end_writing() {
    if (writing_.empty()) {
      return;
    }
    const auto found = std::next(writing_.begin(), static_cast<std::ptrdiff_t>(random_() % writing_.size()));
    const bool succeeds = random_() % 4 != 0;
    const std::vector<uint64_t> ids = found->second;
    static_cast<void>(tiers_.demote({found->first, ids.size()}, succeeds));
    for (const uint64_t id : ids) {
      --chunks_.at(id).pins;
      if (tiers_.files.place_of(key_of(id))) {
        below_.insert(id);
      }
    }
    writing_.erase(found);
  }

  void check() {
    if (random_() % 2 == 0 && !checks_.empty()) {
      const auto found = std::next(checks_.begin(), static_cast<std::ptrdiff_t>(random_() % checks_.size()));
      for (const uint64_t id : found->second) {
        --chunks_.at(id).pins;
      }
      EXPECT(tiers_.memory.directory.unpin(found->first));
      checks_.erase(found);
      return;
    }
    const auto first = static_cast<uint32_t>(random_() % SMALL);
    const RecordPage page = tiers_.memory.directory.records(first, 1, first + 1);
    if (page.pin != 0) {
      checks_[page.pin] = ids_of(page.pin);
      for (const uint64_t id : checks_[page.pin]) {
        ++chunks_.at(id).pins;
      }
    }
  }

  std::mt19937_64 random_;
  Tiers tiers_;
  std::map<uint64_t, Chunk> chunks_;
  std::set<uint64_t> below_;
  std::map<HoldId, std::vector<uint64_t>> writing_;
  std::map<HoldId, std::vector<uint64_t>> checks_;
};

}  // namespace

TEST(victims_while_chunks_are_written_and_checked_are_the_models) {
  const uint64_t seed = kvpool::testing::seed();
  for (uint64_t number = 0; number < 40; ++number) {
    RandomRun requests(seed + number);
    for (int step = 0; step < 400 && kvpool::testing::failures() == 0; ++step) {
      requests.step();
    }
  }
}

TEST(each_held_chunk_without_a_parent_is_found_for_a_copy_once) {
  Tiers tiers(16, 16);
  Pool& memory = tiers.memory;
  std::vector<uint64_t> ids = range(11, 5);
  for (const uint64_t id : ids) {
    EXPECT(memory.store({id}) == 1);
  }
  const auto keys = pack(ids);
  const HoldId hold = memory.directory.hold_hit(std::vector{HitRun{memory.owner, keys, 5, false}}, {}, ++memory.now).front().id;
  EXPECT(memory.directory.unsaved_holders() == std::vector<HoldId>({hold}));
  EXPECT(tiers.demote(memory.directory.pin_unsaved_hold(hold, 2)) == 1);
  std::vector<size_t> found;
  for (auto at = memory.directory.last_unsaved(hold); at; at = memory.directory.last_unsaved(hold, *at)) {
    found.push_back(*at);
    EXPECT(tiers.demote(memory.directory.pin_unsaved_hold(hold, *at)) == 1);
  }
  EXPECT(found == std::vector<size_t>({4, 3, 1, 0}));
  EXPECT(memory.directory.unsaved_holders().empty() && memory.directory.count_unsaved() == 0);
  EXPECT(memory.directory.release(hold, ++memory.now) && tiers.is_sound());
}

TEST(what_is_held_by_readers_and_writers_is_found_for_a_copy_until_it_has_one) {
  Tiers tiers(16, 16);
  Pool& memory = tiers.memory;
  EXPECT(memory.store({1, 2, 3}) == 3);
  const Reservation begun = memory.reserve({1, 2, 3, 4});
  EXPECT(memory.store({11, 12}) == 2);
  const Hold lease = memory.acquire({11, 12});
  EXPECT(memory.reserve({21}).id != 0);
  EXPECT(memory.directory.pin_unsaved(64, WriteOrder::WORTHIEST).id == 0);
  const std::vector<HoldId> holders = memory.directory.unsaved_holders();
  EXPECT(std::set<HoldId>(holders.begin(), holders.end()) == std::set<HoldId>({begun.id, lease.id}));
  const Hold pin = memory.directory.pin_unsaved_hold(begun.id, *memory.directory.last_unsaved(begun.id));
  EXPECT(pin.chunks == 3);
  EXPECT(memory.directory.unsaved_holders() == std::vector<HoldId>({lease.id}));
  EXPECT(tiers.demote(pin) == 3);
  EXPECT(tiers.demote(memory.directory.pin_unsaved_hold(lease.id, *memory.directory.last_unsaved(lease.id))) == 2);
  EXPECT(memory.directory.unsaved_holders().empty() && memory.directory.count_unsaved() == 0);
  EXPECT(!memory.directory.last_unsaved(begun.id) && memory.directory.pin_unsaved_hold(begun.id, 99).id == 0);
  EXPECT(tiers.is_sound());
}
