// Sixteen inputs at a time; compiled with -mavx512f -mavx512vl.
#include "hash/blake3_wide.h"

namespace kvpool::blake3_detail {

using Lanes16 = uint32_t __attribute__((vector_size(64)));

void hash_chunk_avx512(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept {
  hash_chunk_of_lanes<Lanes16, 16>(key, work, count, out, chain);
}

}  // namespace kvpool::blake3_detail
