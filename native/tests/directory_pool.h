// What the tests of the directory share: a directory over small regions, and keys made of numbers.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "directory/directory.h"

namespace kvpool::testing {

inline constexpr uint8_t EPOCH[16] = {9};
inline constexpr uint32_t EXTENTS = 3;
inline constexpr uint64_t CHUNK = 2 * PAGE_BYTES;

inline std::vector<uint8_t> pack(const std::vector<uint64_t>& ids) {
  std::vector<uint8_t> keys(ids.size() * KEY_BYTES);
  for (size_t index = 0; index < ids.size(); ++index) {
    const ChunkKey key{{ids[index] * 0x9E3779B97F4A7C15ULL, ids[index], 0, 0}};
    std::memcpy(&keys[index * KEY_BYTES], key.words, KEY_BYTES);
  }
  return keys;
}

inline ChunkKey key_of(uint64_t id) { return ChunkKey::from_bytes(pack({id}).data()); }

struct Pool {
  explicit Pool(uint64_t capacity, uint32_t max_chunks = 1000, bool ready = true, uint64_t segment_bytes = 64 << 20,
                PolicyKind policy = PolicyKind::LRU, uint32_t further_entries = 0, const DirectoryGeometry* device = nullptr)
      : Pool(*DirectoryGeometry::plan(capacity, segment_bytes, max_chunks, further_entries, device), nullptr, nullptr, policy) {
    for (uint32_t segment = 0; ready && segment < geometry.arena.segments; ++segment) {
      directory.mark_segment_ready(segment);
    }
  }
  // Over an arena of a former life, if there is one, with its records in this region, if there is one. No segment is ready.
  Pool(const DirectoryGeometry& sizes, std::shared_ptr<Mapping> former_arena, std::shared_ptr<Mapping> kept, PolicyKind policy)
      : geometry(sizes),
        arena(former_arena != nullptr ? std::move(former_arena) : Mapping::create("arena", geometry.arena.total_bytes(), false).mapping),
        index(Mapping::create("index", geometry.index.total_bytes(), false).mapping),
        records(std::move(kept)),
        directory(arena, index, geometry, EPOCH, Tier::DRAM, policy, HashSeed::random(), records),
        view(IndexView::attach(index)),
        owner(directory.add_namespace()),
        small(*directory.add_class(CHUNK, EXTENTS)) {}

  Reservation reserve(const std::vector<uint64_t>& ids, std::optional<uint64_t> parent = std::nullopt) {
    std::optional<ChunkKey> above;
    if (parent) {
      above = key_of(*parent);
    }
    return directory.reserve(owner, small, above, pack(ids).data(), ids.size(), ++now);
  }
  // `first` and `count` of the chunks reserved.
  std::vector<uint8_t> commit(const Reservation& made, size_t first, size_t count) {
    std::vector<uint32_t> sums(count * EXTENTS);
    for (size_t word = 0; word < sums.size(); ++word) {
      sums[word] = static_cast<uint32_t>(first * EXTENTS + word + 1);
    }
    return directory.commit(made.id, first, count, sums.data());
  }
  // Stores a chain; returns how many of its chunks are stored then.
  size_t store(const std::vector<uint64_t>& ids, std::optional<uint64_t> parent = std::nullopt) {
    const Reservation made = reserve(ids, parent);
    const auto is_placed = [](uint8_t code) { return code <= static_cast<uint8_t>(SaveState::RESERVED); };
    const auto placed = static_cast<size_t>(std::count_if(made.states.begin(), made.states.end(), is_placed));
    if (made.id != 0) {
      static_cast<void>(commit(made, 0, placed));
      directory.end_reservation(made.id, ++now);
    }
    return placed;
  }
  size_t lookup(const std::vector<uint64_t>& ids) const {
    std::vector<uint8_t> levels(ids.size());
    return view->lookup(pack(ids).data(), ids.size(), levels.data());
  }
  Hold acquire(const std::vector<uint64_t>& ids) { return directory.acquire(owner, pack(ids).data(), ids.size()); }
  // The chain that ends in this leaf.
  std::vector<Hold> hold_chain(uint64_t leaf, size_t n, HolderId holder = {}) {
    const auto key = pack({leaf});
    return directory.hold_hit(std::vector{HitRun{owner, key, n, true}}, holder, ++now);
  }
  bool is_sound() const {
    const auto broken = directory.verify();
    for (const auto& line : broken) {
      std::printf("  %s\n", line.c_str());
    }
    return broken.empty();
  }

  DirectoryGeometry geometry;
  std::shared_ptr<Mapping> arena;
  std::shared_ptr<Mapping> index;
  std::shared_ptr<Mapping> records;  // nullptr: they are not kept
  Directory directory;
  std::shared_ptr<const IndexView> view;
  NamespaceId owner;
  ClassId small;
  uint64_t now = 0;
};

// What a verdict about the chunk as it is now does.
inline uint64_t drop(Directory& directory, const ChunkKey& key) {
  const auto place = directory.place_of(key);
  return place ? directory.drop(key, place->generation) : 0;
}

inline bool all_are(const std::vector<uint8_t>& states, SaveState state) {
  return std::all_of(states.begin(), states.end(),
                     [state](uint8_t code) { return code == static_cast<uint8_t>(state); });
}

inline std::vector<uint64_t> range(uint64_t first, uint64_t count) {
  std::vector<uint64_t> ids(count);
  for (uint64_t index = 0; index < count; ++index) {
    ids[index] = first + index;
  }
  return ids;
}

}  // namespace kvpool::testing
