// A small remote index with its reader, and keys for it.
#pragma once

#include <random>
#include <set>

#include "remote_index/remote_index.h"
#include "remote_index/remote_view.h"

namespace kvpool::testing {

inline constexpr HashSeed REMOTE_SEED{{0xA4093822299F31D0, 0x082EFA98EC4E6C89}};
inline constexpr uint8_t REMOTE_EPOCH[16] = {7, 7};

// The keys of ids are as different as those of a cryptographic hash.
inline ChunkKey remote_key(uint64_t id) {
  std::mt19937_64 random(id);
  return ChunkKey{{random(), random(), random(), random()}};
}

// Keys with one fingerprint under REMOTE_SEED: the hash multiplies by zero.
inline ChunkKey colliding_key(uint64_t id) { return ChunkKey{{REMOTE_SEED.words[0], id, ~REMOTE_SEED.words[0], ~id}}; }

inline std::vector<uint8_t> packed(const std::vector<ChunkKey>& keys) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(keys.data());
  return {bytes, bytes + keys.size() * KEY_BYTES};
}

struct RemoteTable {
  explicit RemoteTable(uint64_t buckets)
      : mapping(Mapping::create("remote", remote_bytes(buckets), false).mapping),
        index(mapping, buckets, REMOTE_EPOCH, REMOTE_SEED),
        reader(RemoteView::attach(Mapping::attach(mapping->fd(), remote_bytes(buckets), false).mapping)) {}

  void insert(RemoteOwner owner, const ChunkKey& key) { index.insert(owner, bytes_of(key), 1); }
  void remove(RemoteOwner owner, const ChunkKey& key) { index.remove(owner, bytes_of(key), 1); }
  [[nodiscard]] bool has(const ChunkKey& key) const { return reader->has(reader->place_of(key)); }
  [[nodiscard]] std::set<RemoteOwner> owners(const ChunkKey& key) const {
    std::set<RemoteOwner> found;
    for (const RemoteRun& run : index.runs(bytes_of(key), 1)) {
      found.insert(run.owner);
    }
    return found;
  }
  [[nodiscard]] static const uint8_t* bytes_of(const ChunkKey& key) {
    return reinterpret_cast<const uint8_t*>(key.words);
  }

  std::shared_ptr<Mapping> mapping;
  RemoteIndex index;
  std::shared_ptr<const RemoteView> reader;
};

}  // namespace kvpool::testing
