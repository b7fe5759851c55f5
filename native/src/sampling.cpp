// Seeded hashes of keys. See sampling.h.
#include "kvpool/sampling.h"

#include <random>

namespace kvpool {
namespace {

constexpr uint64_t MIXER = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio, odd

}  // namespace

uint64_t random_seed() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

// The upper bits depend on all of the key, and the lower ones do.
uint64_t seeded_hash(const ChunkKey& key, uint64_t seed) noexcept {
  uint64_t hash = seed;
  for (const uint64_t word : key.words) {
    hash = (hash ^ word) * MIXER;
    hash ^= hash >> 32;
  }
  return hash * MIXER;
}

uint64_t sampling_word(const ChunkKey& key) noexcept {
  static const uint64_t seed = random_seed();
  return seeded_hash(key, seed);
}

}  // namespace kvpool
