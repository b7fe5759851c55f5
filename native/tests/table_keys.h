// Keys chosen so that their probes begin at one slot of a table: what somebody can do who reads the table's seed.
#pragma once

#include "hash/keyed_hash.h"

namespace kvpool::testing {

inline constexpr HashSeed SEED{{0x243F6A8885A308D3, 0x13198A2E03707344}};

// A key that begins at `home` in a table of so many slots, and whose identity is `id`. The last words prove that it is whole.
inline ChunkKey key_at(uint64_t home, uint64_t id, uint64_t slots, const HashSeed& seed = SEED) {
  ChunkKey key{{0, id, id * 0x9E3779B97F4A7C15ULL, ~id}};
  while (home_of(key, seed, slots) != home) {
    ++key.words[0];
  }
  return key;
}

}  // namespace kvpool::testing
