// A life of random requests to a directory: small and large chunks, of which some are being written when it ends.
#pragma once

#include <random>

#include "directory/flush_walk.h"
#include "tests/directory/former_pool.h"

namespace kvpool::testing {

inline constexpr uint32_t LARGE_EXTENTS = 7;

class RandomLife {
 public:
  RandomLife(Pool& pool, uint64_t seed) : pool_(pool), random_(seed), large_(*pool.directory.add_class(5 * CHUNK, LARGE_EXTENTS)) {}

  void step() {
    switch (random_() % 16) {
      case 0: case 1: case 2: case 3: return reserve();
      case 4: case 5: case 6: return commit();
      case 7: return end();
      case 8: case 9: return acquire();
      case 10: case 11: return release();
      case 12: return retain();
      case 13: return go_on();
      case 14: static_cast<void>(drop(pool_.directory, key_of(1 + random_() % 255))); return;
      default: pool_.directory.retention().expire_due(pool_.now += random_() % 100'000'000);
    }
  }
  // Checksums of a chunk, by its key: those that it is committed with.
  [[nodiscard]] static std::vector<uint32_t> sums_of(uint64_t id, uint32_t extents) {
    std::vector<uint32_t> sums(extents);
    for (uint32_t extent = 0; extent < extents; ++extent) {
      sums[extent] = static_cast<uint32_t>(id * 1000 + extent);
    }
    return sums;
  }
  // The same of its token ids.
  [[nodiscard]] static std::vector<int32_t> tokens_of(uint64_t id) { return {static_cast<int32_t>(id), 7, -1, static_cast<int32_t>(id) * 3, 5}; }
  [[nodiscard]] static uint32_t extents_of(uint64_t id) { return root_of(id) == 3 ? LARGE_EXTENTS : EXTENTS; }

 private:
  struct Open {
    HoldId id;
    std::vector<uint64_t> reserved;
  };

  // The parent of id is id / 4, roots are 1..3; those of root 3 are large.
  [[nodiscard]] static uint64_t root_of(uint64_t id) {
    while (id > 3) {
      id /= 4;
    }
    return id;
  }
  [[nodiscard]] std::vector<uint64_t> chain() {
    std::vector<uint64_t> ids;
    for (uint64_t id = 1 + random_() % 255; id > 0; id /= 4) {
      ids.insert(ids.begin(), id);
    }
    return ids;
  }
  void note(Open& open, const Reservation& made, const std::vector<uint64_t>& ids) {
    for (size_t index = 0; index < ids.size(); ++index) {
      if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
        open.reserved.push_back(ids[index]);
      }
    }
  }
  void reserve() {
    const auto ids = chain();
    const auto holder = HolderId(static_cast<uint32_t>(1 + random_() % 3));
    const Reservation made = pool_.directory.reserve(pool_.owner, root_of(ids[0]) == 3 ? large_ : pool_.small, std::nullopt,
                                                     pack(ids).data(), ids.size(), ++pool_.now, holder);
    if (made.id != 0) {
      open_.push_back({made.id, {}});
      note(open_.back(), made, ids);
    }
  }
  void go_on() {
    if (!open_.empty() && !open_.back().reserved.empty() && open_.back().reserved.back() < 64) {
      const std::vector<uint64_t> ids{open_.back().reserved.back() * 4 + random_() % 4};
      note(open_.back(), pool_.directory.reserve_more(open_.back().id, pack(ids).data(), 1, ++pool_.now), ids);
    }
  }
  void commit() {
    if (open_.empty()) {
      return;
    }
    const Open& open = open_[random_() % open_.size()];
    const size_t first = open.reserved.empty() ? 0 : random_() % open.reserved.size();
    std::vector<uint32_t> sums;
    for (size_t index = first; index < open.reserved.size(); ++index) {
      const auto own = sums_of(open.reserved[index], extents_of(open.reserved[index]));
      sums.insert(sums.end(), own.begin(), own.end());
    }
    std::vector<int32_t> tokens;
    for (size_t index = first; index < open.reserved.size(); ++index) {
      const auto own = tokens_of(open.reserved[index]);
      tokens.insert(tokens.end(), own.begin(), own.end());
    }
    static_cast<void>(pool_.directory.commit(open.id, first, open.reserved.size() - first, sums.data(), ++pool_.now,
                                             {packed_words(tokens), {}}));
  }
  void end() {
    if (open_.empty()) {
      return;
    }
    const auto at = open_.begin() + static_cast<std::ptrdiff_t>(random_() % open_.size());
    if (random_() % 3 == 0) {
      static_cast<void>(pool_.directory.expire_part(at->id, SIZE_MAX, ++pool_.now));
    } else {
      pool_.directory.end_reservation(at->id, ++pool_.now);
      open_.erase(at);
    }
  }
  void acquire() {
    if (const Hold hold = pool_.acquire(chain()); hold.id != 0) {
      holds_.push_back(hold.id);
    }
  }
  void release() {
    if (!holds_.empty()) {
      pool_.directory.release(holds_.back(), ++pool_.now);
      holds_.pop_back();
    }
  }
  void retain() {
    const auto ids = chain();
    const Retention retention{static_cast<uint8_t>(random_() % 101), random_() % 2 == 0 ? 0 : 100U};
    static_cast<void>(pool_.directory.retention().retain(pool_.owner, pack(ids).data(), std::vector(ids.size(), retention), ++pool_.now));
  }

  Pool& pool_;
  std::mt19937_64 random_;
  ClassId large_;
  std::vector<Open> open_;
  std::vector<HoldId> holds_;
};

}  // namespace kvpool::testing
