// Eight inputs at a time; compiled with -mavx2.
#include "hash/blake3_wide.h"

namespace kvpool::blake3_detail {

using Lanes8 = uint32_t __attribute__((vector_size(32)));

void hash_chunk_avx2(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept {
  hash_chunk_of_lanes<Lanes8, 8>(key, work, count, out, chain);
}

void hash_pairs_avx2(const ChainsWork& work, size_t count) noexcept { hash_pairs_of_lanes<Lanes8, 8>(work, count); }

}  // namespace kvpool::blake3_detail
