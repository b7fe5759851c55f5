// Four inputs at a time, with the vectors that every 64-bit ARM has.
#include "hash/blake3_wide.h"

namespace kvpool::blake3_detail {

using Lanes4 = uint32_t __attribute__((vector_size(16)));

void hash_chunk_neon(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept {
  hash_chunk_of_lanes<Lanes4, 4>(key, work, count, out, chain);
}

void hash_pairs_neon(const ChainsWork& work, size_t count) noexcept { hash_pairs_of_lanes<Lanes4, 4>(work, count); }

}  // namespace kvpool::blake3_detail
