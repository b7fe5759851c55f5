// The seed of the sample. See sampling.h.
#include "hash/sampling.h"

#include "hash/keyed_hash.h"

namespace kvpool {

uint64_t sampling_word(const ChunkKey& key) noexcept {
  static const HashSeed seed = HashSeed::random();
  return keyed_hash(key, seed);
}

}  // namespace kvpool
