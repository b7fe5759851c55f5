// Memory with a device beside it and files below, against a model: which of them have which chunk, after any sequence of moves.
#include "tests/tiers/device_pool.h"

#include <deque>
#include <map>
#include <random>
#include <set>

#include "directory/flush_walk.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t CHAINS = 3;
constexpr uint64_t CHAIN = 6;
constexpr uint32_t MEMORY_CHUNKS = 9;
constexpr uint32_t DEVICE_CHUNKS = 5;
constexpr int STEPS = 600;
constexpr int RUNS = 8;

// What one tier has, and the generations there.
using Stored = std::map<uint64_t, uint64_t>;

// A copy under way, with the generations that it was begun with.
struct Copying {
  HoldId reservation;
  std::vector<uint64_t> ids;
  std::vector<uint64_t> sources;
  uint64_t last = UINT64_MAX;  // what follows this one went with a copy that was found bad
};

class RandomRun {
 public:
  explicit RandomRun(uint64_t seed)
      : random_(seed), pool_(MEMORY_CHUNKS, DEVICE_CHUNKS, 11, seed % 2 == 0 ? PolicyKind::LRU : PolicyKind::CLASS_QUEUES) {
    pool_.memory.directory.retention().ledger().cap(1.0);
    pool_.device.retention().ledger().cap(1.0);
  }

  void step() {
    const Stored memory = stored(pool_.memory.directory);
    const Stored copies = stored(pool_.device);
    copied_.clear();
    is_device_alone_ = false;
    may_lose_copies_ = false;
    move();
    compare(memory, copies);
    EXPECT(pool_.is_sound());
  }

  // Nothing is held in the end, and nothing is left.
  void finish() {
    while (!copying_.empty()) {
      end_copy(false);
    }
    for (const HoldId hold : holds_) {
      static_cast<void>(pool_.memory.directory.release(hold, now()));
    }
    for (const HoldId pin : pins_) {
      EXPECT(pool_.device.unpin(pin));
    }
    static_cast<void>(flush(pool_.memory.directory, std::nullopt, UINT64_MAX));
    const DirectoryStats stats = pool_.device.stats();
    EXPECT(stats.chunks == 0 && stats.zombies == 0 && stats.used_bytes == 0 && stats.writing == 0);
    EXPECT(pool_.is_sound());
  }

 private:
  uint64_t now() { return pool_.memory.now += 1 + random_() % 3'000'000; }
  size_t up_to(size_t last) { return random_() % (last + 1); }
  std::vector<uint64_t> chain() { return range(1 + CHAIN * up_to(CHAINS - 1), 1 + up_to(CHAIN - 1)); }
  static std::vector<uint64_t> everything() { return range(1, CHAINS * CHAIN); }

  static Stored stored(const Directory& tier) {
    Stored found;
    for (const uint64_t id : everything()) {
      if (const auto place = tier.place_of(key_of(id))) {
        found.emplace(id, place->generation);
      }
    }
    return found;
  }

  void move() {
    Directory& memory = pool_.memory.directory;
    switch (up_to(13)) {
      case 0:
      case 1:
        static_cast<void>(pool_.memory.store(chain()));
        return;
      case 2:
      case 3:
        return begin_copy(chain());
      case 4:
      case 5:
        return end_copy(up_to(4) != 0);
      case 6:
        return lease(chain());
      case 7:
        return release();
      case 8:
        return retain(chain());
      case 9:
        static_cast<void>(drop(up_to(1) == 0 ? memory : pool_.files, key_of(chain().back())));
        return;
      case 10:
        return drop_copy(chain().back());
      case 11:
        return pin();
      case 12:
        static_cast<void>(pool_.copy(pool_.files, chain()));
        return;
      default:
        return flush_one();
    }
  }

  void begin_copy(const std::vector<uint64_t>& ids) {
    is_device_alone_ = may_lose_copies_ = true;
    const Reservation made = pool_.reserve(pool_.device, ids);
    if (made.id == 0) {
      return;
    }
    std::vector<uint64_t> reserved;
    for (size_t index = 0; index < ids.size(); ++index) {
      if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
        reserved.push_back(ids[index]);
      }
    }
    copying_.push_back({made.id, reserved, pool_.sources(made, ids)});
  }

  void drop_copy(uint64_t id) {
    is_device_alone_ = may_lose_copies_ = true;
    if (drop(pool_.device, key_of(id)) == 0) {
      return;
    }
    for (Copying& copy : copying_) {
      if (!copy.ids.empty() && (copy.ids.front() - 1) / CHAIN == (id - 1) / CHAIN) {
        copy.last = std::min(copy.last, id);
      }
    }
  }

  // Published is exactly what memory has had all the time, up to the first chunk that it has not.
  void end_copy(bool succeeds) {
    is_device_alone_ = true;
    if (copying_.empty()) {
      return;
    }
    const Copying copy = copying_.front();
    copying_.pop_front();
    if (succeeds) {
      const auto states = pool_.device.commit(copy.reservation, 0, copy.ids.size(), DevicePool::sums(copy.ids.size()).data(), now(),
                                              {}, {Tier::DRAM, copy.sources});
      bool is_whole = true;
      for (size_t index = 0; index < states.size(); ++index) {
        const auto place = pool_.memory.directory.place_of(key_of(copy.ids[index]));
        is_whole = is_whole && place && place->generation == copy.sources[index] && copy.ids[index] <= copy.last;
        EXPECT((states[index] == static_cast<uint8_t>(SaveState::STORED)) == is_whole);
        if (is_whole) {
          copied_.insert(copy.ids[index]);
        }
      }
    }
    EXPECT(pool_.device.end_reservation(copy.reservation, now()));
  }

  void lease(const std::vector<uint64_t>& ids) {
    const Hold hold = pool_.memory.directory.acquire(pool_.memory.owner, pack(ids).data(), ids.size(), now());
    if (hold.id == 0) {
      return;
    }
    const Columns copies = *pool_.memory.directory.copies({hold.id});
    const Columns columns = *pool_.memory.directory.columns({hold.id});
    for (size_t index = 0; index < hold.chunks; ++index) {
      const auto place = pool_.device.place_of(key_of(ids[index]));
      EXPECT(copies.generations[index] == (place ? place->generation : 0));
      EXPECT(!place || copies.offsets[index] == place->offset);
      EXPECT(!place || pool_.memory.view->generation_at(SlotAddress::unpacked(copies.slots[index])) == place->generation);
      EXPECT(columns.levels[index] == static_cast<uint8_t>(place ? Tier::HBM : Tier::DRAM));
    }
    if (up_to(3) == 0) {
      EXPECT(pool_.memory.directory.release(hold.id, now()));
    } else {
      holds_.push_back(hold.id);
    }
  }

  void release() {
    if (holds_.empty()) {
      return;
    }
    const HoldId hold = holds_.front();
    if (up_to(2) == 0 && pool_.memory.directory.release_part(hold, 2, now()) == 2) {
      return;
    }
    holds_.pop_front();
    static_cast<void>(pool_.memory.directory.release(hold, now()));
  }

  void retain(const std::vector<uint64_t>& ids) {
    const Retention request{static_cast<uint8_t>(5 + up_to(6) * 10), static_cast<uint32_t>(up_to(1) * 100)};
    static_cast<void>(pool_.memory.directory.retention().retain(pool_.memory.owner, pack(ids).data(), std::vector<Retention>(ids.size(), request), now()));
  }

  void pin() {
    is_device_alone_ = true;
    if (!pins_.empty() && up_to(1) == 0) {
      EXPECT(pool_.device.unpin(pins_.front()));
      pins_.pop_front();
    } else if (const auto made = pool_.device.pin_key(pool_.memory.owner, key_of(chain().back()))) {
      pins_.push_back(*made);
    }
  }

  void flush_one() {
    Directory* const tiers[] = {&pool_.memory.directory, &pool_.device, &pool_.files};
    Directory& chosen = *tiers[up_to(2)];
    is_device_alone_ = may_lose_copies_ = &chosen == &pool_.device;
    static_cast<void>(flush(chosen, std::nullopt, up_to(1) == 0 ? UINT64_MAX : pool_.memory.now / 2));
  }

  void compare(const Stored& memory_before, const Stored& copies_before) {
    const Stored memory = stored(pool_.memory.directory);
    const Stored files = stored(pool_.files);
    const Stored copies = stored(pool_.device);
    EXPECT(copies.size() <= DEVICE_CHUNKS);
    EXPECT(!is_device_alone_ || memory == memory_before);
    for (const uint64_t id : everything()) {
      const bool is_copy = copies.contains(id);
      EXPECT(!is_copy || memory.contains(id));
      EXPECT(!is_copy || (id - 1) % CHAIN == 0 || copies.contains(id - 1));  // whole prefixes
      // A copy stays while its very original does, unless it was evicted, flushed or found bad itself.
      const bool has_stayed = copies_before.contains(id) && memory.contains(id) && memory_before.at(id) == memory.at(id);
      EXPECT(!has_stayed || may_lose_copies_ || is_copy);
      EXPECT(is_copy || !copied_.contains(id));
      EXPECT(!is_copy || copied_.contains(id) || (has_stayed && copies.at(id) == copies_before.at(id)));
      const int expected = (is_copy ? tier_bit(Tier::HBM) : 0) | (memory.contains(id) ? tier_bit(Tier::DRAM) : 0) |
                           (files.contains(id) ? tier_bit(Tier::SSD) : 0);
      EXPECT(pool_.shown(id) == expected && pool_.set.tiers_of(key_of(id)) == expected);
      EXPECT(!is_copy || pool_.device.retention().of(key_of(id)) == pool_.memory.directory.retention().of(key_of(id)));
      const auto residency = pool_.memory.view->residency(key_of(id), Tier::HBM);
      EXPECT(residency.has_value() == is_copy);
      EXPECT(!is_copy || pool_.memory.view->generation_at(residency->slot) == copies.at(id));
    }
  }

  std::mt19937_64 random_;
  DevicePool pool_;
  std::deque<Copying> copying_;
  std::deque<HoldId> holds_;
  std::deque<HoldId> pins_;
  std::set<uint64_t> copied_;  // in this step
  bool is_device_alone_ = false;
  bool may_lose_copies_ = false;
};

}  // namespace

TEST(copies_are_what_the_model_says) {
  const uint64_t seed = kvpool::testing::seed();
  for (uint64_t run = 0; run < RUNS && failures() == 0; ++run) {
    RandomRun random_run(seed + run);
    for (int step = 0; step < STEPS && failures() == 0; ++step) {
      random_run.step();
    }
    random_run.finish();
  }
}
