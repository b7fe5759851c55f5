// A hash of a chunk key under a seed: where a table looks for the key, and which keys stand for all of them.
//
// What it is: quick, and a matter of chance to whoever does not know the seed; clients choose keys. What it is not: a hash for
// who knows the seed: the shared index shows its own, so that what is denied there must not depend on it alone.
// Threads: any.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace kvpool {

struct HashSeed {
  uint64_t words[2];

  // From the system's source of randomness.
  [[nodiscard]] static HashSeed random();
};

// Upper and lower half of a product, each of which depends on all of both factors.
[[nodiscard]] inline uint64_t folded_product(uint64_t a, uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Every bit of it depends on all of the key and of the seed.
[[nodiscard]] inline uint64_t keyed_hash(const ChunkKey& key, const HashSeed& seed) noexcept {
  const uint64_t front = folded_product(key.words[0] ^ seed.words[0], key.words[1] ^ seed.words[1]);
  const uint64_t back = folded_product(key.words[2] ^ ~seed.words[0], key.words[3] ^ ~seed.words[1]);
  return front + back;
}

// The slot of a table at which the probe for a key begins.
[[nodiscard]] inline uint64_t home_of(const ChunkKey& key, const HashSeed& seed, uint64_t slots) noexcept {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(keyed_hash(key, seed)) * slots >> 64);
}

}  // namespace kvpool
