// Where a tier's records are by their keys, for a tier that no client looks into: a few bytes a chunk.
//
// What it is: an open-addressed table of record ids, with a tag of eight bits beside each, the key itself being in the record. What
// it is not: shared, or in reach of anybody who could learn its seed; so probes need no bound.
//
// Linear probing from the key's home, behind the last slot comes the first, load at most 7/10, erase by backward shift: no empty
// slot lies between a key and its home. A tag of 0 marks an empty slot; another one saves 127 of 128 useless looks at a record.
// Invariant: each id names a record that has a key of its own; `verify` looks each up.
// Threads: the control thread only. O(1).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "records/chunk_records.h"
#include "hash/keyed_hash.h"
#include "base/lazy_array.h"

namespace kvpool {

class KeyMap {
 public:
  // REQUIRES: `records` lives as long.
  KeyMap(uint32_t max_keys, const ChunkRecords& records, const HashSeed& seed = HashSeed::random());
  KeyMap(const KeyMap&) = delete;
  KeyMap& operator=(const KeyMap&) = delete;

  [[nodiscard]] RecordId find(const ChunkKey& key) const noexcept;
  // Asks the cache for where the probe for a key begins.
  uint64_t prefetch(const ChunkKey& key) const noexcept;
  // REQUIRES: the record has its key, which is absent; fewer than `max_keys` are here.
  void insert(RecordId id) noexcept;
  // REQUIRES: the key is present.
  void erase(const ChunkKey& key) noexcept;
  [[nodiscard]] uint64_t count() const noexcept { return count_; }
  [[nodiscard]] bool has_room() const noexcept { return count_ < max_keys_; }

  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  // Never 0. Its bits are not those that choose the home.
  [[nodiscard]] uint8_t tag_of(const ChunkKey& key) const noexcept {
    return static_cast<uint8_t>((keyed_hash(key, seed_) & 0xFF) | 1);
  }
  [[nodiscard]] uint64_t home(const ChunkKey& key) const noexcept { return home_of(key, seed_, slots_); }
  [[nodiscard]] uint64_t behind(uint64_t position) const noexcept { return position + 1 == slots_ ? 0 : position + 1; }
  [[nodiscard]] uint64_t distance(uint64_t first, uint64_t second) const noexcept {
    return second >= first ? second - first : second + slots_ - first;
  }
  [[nodiscard]] std::optional<uint64_t> position_of(const ChunkKey& key) const noexcept;

  const ChunkRecords& records_;
  const HashSeed seed_;
  const uint32_t max_keys_;
  const uint64_t slots_;
  LazyArray<uint8_t> tags_;
  LazyArray<uint32_t> ids_;
  uint64_t count_ = 0;
};

}  // namespace kvpool
