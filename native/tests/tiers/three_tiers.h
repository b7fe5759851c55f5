// What the tests of more than two tiers share: a pool of memory over files over a store, and the copies between them.
#pragma once

#include <array>

#include "base/check.h"
#include "tests/directory_pool.h"

namespace kvpool::testing {

struct ThreeTiers {
  static constexpr size_t TIERS = 3;

  ThreeTiers(uint32_t memory_chunks, uint32_t file_chunks, uint32_t store_chunks, PolicyKind policy = PolicyKind::LRU)
      : memory(memory_chunks * CHUNK, memory_chunks + file_chunks + store_chunks, true, 64 << 20, policy, 64),
        files_geometry(*DirectoryGeometry::plan_files(CHUNK, file_chunks, file_chunks)),
        store_geometry(*DirectoryGeometry::plan_files(CHUNK, store_chunks, store_chunks)),
        files(nullptr, nullptr, files_geometry, nullptr, Tier::SSD),
        store(nullptr, nullptr, store_geometry, nullptr, Tier::PEER),
        all{&memory.directory, &files, &store},
        set({&memory.directory, &files, &store}) {
    for (Directory* lower : {&files, &store}) {
      KVPOOL_CHECK(lower->add_namespace() == memory.owner);
      KVPOOL_CHECK(lower->add_class(CHUNK, EXTENTS) == memory.small);
      for (uint32_t segment = 0; segment < lower->geometry().arena.segments; ++segment) {
        lower->mark_segment_ready(segment);
      }
    }
  }

  // Copies what a tier has of a chain into a lower one, as far as that takes it: how many chunks came.
  size_t copy(size_t from, size_t to, const std::vector<uint64_t>& ids) {
    const auto keys = pack(ids);
    std::vector<HoldId> pins;
    while (pins.size() < ids.size()) {
      const auto pin = all[from]->pin_key(memory.owner, key_of(ids[pins.size()]));
      if (!pin) {
        break;
      }
      pins.push_back(*pin);
    }
    const std::vector<uint64_t> generations = all[from]->columns(pins)->generations;
    const Reservation made =
        all[to]->reserve(memory.owner, memory.small, std::nullopt, keys.data(), pins.size(), ++memory.now);
    std::vector<uint64_t> sources;
    for (size_t index = 0; index < made.states.size(); ++index) {
      if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
        sources.push_back(generations[index]);
      }
    }
    if (made.id != 0) {
      const std::vector<uint32_t> sums(sources.size() * EXTENTS);
      const auto states = all[to]->commit(made.id, 0, sources.size(), sums.data(), memory.now, {}, {level(from), sources});
      KVPOOL_CHECK(all_are(states, SaveState::STORED));
      KVPOOL_CHECK(all[to]->end_reservation(made.id, ++memory.now));
    }
    for (const HoldId pin : pins) {
      KVPOOL_CHECK(all[from]->unpin(pin));
    }
    return sources.size();
  }

  [[nodiscard]] static Tier level(size_t tier) { return std::array{Tier::DRAM, Tier::SSD, Tier::PEER}[tier]; }
  // The tiers that have a chunk, by the directories' own words.
  [[nodiscard]] uint8_t found(const ChunkKey& key) const {
    uint8_t bits = 0;
    for (size_t tier = 0; tier < TIERS; ++tier) {
      bits = static_cast<uint8_t>(bits | (all[tier]->place_of(key) ? tier_bit(level(tier)) : 0));
    }
    return bits;
  }
  // The same by what clients read.
  [[nodiscard]] uint8_t shown(const ChunkKey& key) const {
    const auto entry = memory.view->find(key);
    return entry ? entry->tiers : uint8_t{0};
  }
  [[nodiscard]] bool is_sound() const {
    bool is_sound = true;
    for (const Directory* tier : all) {
      for (const auto& line : tier->verify()) {
        std::printf("  %s\n", line.c_str());
        is_sound = false;
      }
    }
    return is_sound;
  }

  Pool memory;
  DirectoryGeometry files_geometry;
  DirectoryGeometry store_geometry;
  Directory files;
  Directory store;
  std::array<Directory*, TIERS> all;
  TierSet set;
};

}  // namespace kvpool::testing
