// What the tests of copies share: a pool of memory with a device beside it, and files below.
#pragma once

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/check.h"
#include "tests/directory_pool.h"

namespace kvpool::testing {

struct DevicePool {
  // The device has room for more bytes than for chunks.
  DevicePool(uint32_t memory_chunks, uint32_t device_chunks, uint32_t file_chunks = 100, PolicyKind policy = PolicyKind::LRU)
      : device_geometry(*DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, device_chunks)),
        memory(memory_chunks * CHUNK, 1000, true, 64 << 20, policy, 1000, &device_geometry),
        files_geometry(*DirectoryGeometry::plan_files(CHUNK, file_chunks, file_chunks)),
        files(nullptr, nullptr, files_geometry, nullptr, Tier::SSD),
        set({&memory.directory, &files}),
        device(memory.directory, device_geometry, policy) {
    for (Directory* other : {&files, &device}) {
      KVPOOL_CHECK(other->add_namespace() == memory.owner);
      KVPOOL_CHECK(other->add_class(CHUNK, EXTENTS) == memory.small);
      for (uint32_t segment = 0; segment < other->geometry().arena.segments; ++segment) {
        other->mark_segment_ready(segment);
      }
    }
  }

  Reservation reserve(Directory& tier, const std::vector<uint64_t>& ids, std::optional<uint64_t> parent = std::nullopt) {
    const auto above = parent ? std::optional(key_of(*parent)) : std::nullopt;
    return tier.reserve(memory.owner, memory.small, above, pack(ids).data(), ids.size(), ++memory.now);
  }
  // The generations that memory has of what is RESERVED.
  [[nodiscard]] std::vector<uint64_t> sources(const Reservation& made, const std::vector<uint64_t>& ids) const {
    std::vector<uint64_t> generations;
    for (size_t index = 0; index < made.states.size(); ++index) {
      if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
        generations.push_back(memory.directory.place_of(key_of(ids[index])).value_or(ChunkPlace{}).generation);
      }
    }
    return generations;
  }
  static std::vector<uint32_t> sums(size_t chunks) {
    std::vector<uint32_t> words(chunks * EXTENTS);
    for (size_t word = 0; word < words.size(); ++word) {
      words[word] = static_cast<uint32_t>(word + 1);
    }
    return words;
  }
  std::vector<uint8_t> commit(Directory& tier, const Reservation& made, const std::vector<uint64_t>& generations) {
    return tier.commit(made.id, 0, generations.size(), sums(generations.size()).data(), memory.now, {}, {Tier::DRAM, generations});
  }
  // Copies what memory has of a chain, as far as the other tier takes it: how many chunks came.
  size_t copy(Directory& tier, const std::vector<uint64_t>& ids, std::optional<uint64_t> parent = std::nullopt) {
    const Reservation made = reserve(tier, ids, parent);
    const auto generations = sources(made, ids);
    if (made.id != 0) {
      KVPOOL_CHECK(all_are(commit(tier, made, generations), SaveState::STORED));
      KVPOOL_CHECK(tier.end_reservation(made.id, ++memory.now));
    }
    return generations.size();
  }
  size_t copy(const std::vector<uint64_t>& ids, std::optional<uint64_t> parent = std::nullopt) { return copy(device, ids, parent); }

  // The leading levels that a client reads.
  [[nodiscard]] std::vector<uint8_t> levels(const std::vector<uint64_t>& ids) const {
    std::vector<uint8_t> found(ids.size());
    found.resize(memory.view->lookup(pack(ids).data(), ids.size(), found.data()));
    return found;
  }
  // The bits that clients read of a chunk.
  [[nodiscard]] uint8_t shown(uint64_t id) const {
    const auto entry = memory.view->find(key_of(id));
    return entry ? entry->tiers : uint8_t{0};
  }
  void use(const std::vector<uint64_t>& ids) {
    const Hold hold = memory.acquire(ids);
    KVPOOL_CHECK(memory.directory.release(hold.id, ++memory.now));
  }
  [[nodiscard]] bool is_sound() const {
    bool is_sound = true;
    for (const Directory* tier : {&memory.directory, &files, &device}) {
      for (const auto& line : tier->verify()) {
        std::printf("  %u: %s\n", static_cast<unsigned>(tier->tier()), line.c_str());
        is_sound = false;
      }
    }
    return is_sound;
  }

  DirectoryGeometry device_geometry;
  Pool memory;
  DirectoryGeometry files_geometry;
  Directory files;
  TierSet set;
  Directory device;
};

}  // namespace kvpool::testing
