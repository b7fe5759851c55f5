// Sixteen inputs at a time, of few inputs four; compiled with -mavx512f -mavx512vl.
#include "hash/blake3_wide.h"

namespace kvpool::blake3_detail {

using Lanes16 = uint32_t __attribute__((vector_size(64)));
// A processor takes more steps on short registers at once than on long ones: the chains of a few groups cost half as much so.
using Lanes4 = uint32_t __attribute__((vector_size(16)));

void hash_chunk_avx512(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept {
  if (count <= 4) {
    return hash_chunk_of_lanes<Lanes4, 4>(key, work, count, out, chain);
  }
  hash_chunk_of_lanes<Lanes16, 16>(key, work, count, out, chain);
}

void hash_pairs_avx512(const ChainsWork& work, size_t count) noexcept {
  if (count <= 4) {
    return hash_pairs_of_lanes<Lanes4, 4>(work, count);
  }
  hash_pairs_of_lanes<Lanes16, 16>(work, count);
}

}  // namespace kvpool::blake3_detail
