#include "hash/blake3.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "hash/blake3_lanes.h"
#include "base/check.h"
#include "base/processor.h"

namespace kvpool {
namespace blake3_detail {
#if defined(__x86_64__)
void hash_chunk_avx2(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept;
void hash_chunk_avx512(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept;
void hash_pairs_avx2(const ChainsWork& work, size_t count) noexcept;
void hash_pairs_avx512(const ChainsWork& work, size_t count) noexcept;
#elif defined(__aarch64__)
void hash_chunk_neon(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out, PairChain* chain) noexcept;
void hash_pairs_neon(const ChainsWork& work, size_t count) noexcept;
#endif
}  // namespace blake3_detail

namespace {

using namespace blake3_detail;

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie");

// The chaining value of one chunk of one input.
void hash_chunk_scalar(const HashWords& key, const ChunkWork& work, uint32_t* out) noexcept {
  uint32_t cv[8];
  std::copy(key.begin(), key.end(), cv);
  const size_t blocks = std::max<size_t>(1, (work.size + BLOCK_BYTES - 1) / BLOCK_BYTES);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t offset = block * BLOCK_BYTES;
    const size_t size = std::min(BLOCK_BYTES, work.size - offset);
    uint32_t m[16] = {};
    std::memcpy(m, work.data + offset, size);
    const bool is_last = block + 1 == blocks;
    const uint32_t flags = (work.flags & ~ROOT) | (block == 0 ? CHUNK_START : 0) |
                           (is_last ? CHUNK_END | (work.flags & ROOT) : 0);
    compress(cv, m, work.counter, static_cast<uint32_t>(size), flags);
  }
  std::copy(cv, cv + 8, out);
}

void hash_chunk(LaneWidth width, const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out,
                PairChain* chain) noexcept {
#if defined(__x86_64__)
  if (width == LaneWidth::AVX512) {
    return hash_chunk_avx512(key, work, count, out, chain);
  }
  if (width == LaneWidth::AVX2) {
    return hash_chunk_avx2(key, work, count, out, chain);
  }
#elif defined(__aarch64__)
  if (width == LaneWidth::NEON) {
    return hash_chunk_neon(key, work, count, out, chain);
  }
#endif
  KVPOOL_DCHECK(count == 1);
  static_cast<void>(chain);  // one input leaves no room beside it
  hash_chunk_scalar(key, work, out);
}

void hash_chains_scalar(const HashKey& key, const ChainsWork& work) noexcept {
  PairChain chain{key, {}, work.inputs, work.steps, work.results};
  std::memcpy(chain.link.data(), work.parents, HASH_BYTES);
  blake3_hash_pairs(chain);
}

// REQUIRES: 1 <= count <= lanes of the width.
void hash_chains(LaneWidth width, const HashKey& key, const ChainsWork& work, size_t count) noexcept {
#if defined(__x86_64__)
  if (width == LaneWidth::AVX512 && count > 1) {
    return hash_pairs_avx512(work, count);
  }
  if (width == LaneWidth::AVX2 && count > 1) {
    return hash_pairs_avx2(work, count);
  }
#elif defined(__aarch64__)
  if (width == LaneWidth::NEON && count > 1) {
    return hash_pairs_neon(work, count);
  }
#endif
  KVPOOL_DCHECK(count == 1);
  hash_chains_scalar(key, work);
}

// cv of a parent node over its two children's 16 words.
HashWords parent_of(const HashKey& key, const uint32_t children[16], uint32_t flags) noexcept {
  uint32_t cv[8];
  std::copy(key.words.begin(), key.words.end(), cv);
  uint32_t m[16];
  std::copy(children, children + 16, m);
  compress(cv, m, 0, BLOCK_BYTES, PARENT | (key.keyed ? KEYED_HASH : 0) | flags);
  HashWords parent;
  std::copy(cv, cv + 8, parent.begin());
  return parent;
}

// The root over `count` chunk values, 8 words each. The left subtree is the largest power of two below count.
HashWords root_of(const HashKey& key, const uint32_t* values, size_t count, uint32_t flags) noexcept {
  KVPOOL_DCHECK(count >= 2);
  const size_t left = std::bit_floor(count - 1);
  uint32_t children[16];
  const auto subtree = [&](const uint32_t* first, size_t n, uint32_t* out) {
    if (n == 1) {
      std::copy(first, first + 8, out);
    } else {
      const HashWords words = root_of(key, first, n, 0);
      std::copy(words.begin(), words.end(), out);
    }
  };
  subtree(values, left, children);
  subtree(values + left * 8, count - left, children + 8);
  return parent_of(key, children, flags);
}

// Stands for input of no bytes, whose pointer may be null.
constexpr uint8_t NO_DATA = 0;

LaneWidth find_best_width() noexcept {
  for (const LaneWidth width : {LaneWidth::AVX512, LaneWidth::AVX2, LaneWidth::NEON}) {
    if (blake3_supports(width)) {
      return width;
    }
  }
  return LaneWidth::SCALAR;
}

LaneWidth best_width() noexcept {
  static const LaneWidth width = find_best_width();
  return width;
}

// A group of at most 16 inputs of more than one chunk: every chunk of all of them side by side, then each one's tree.
void hash_trees(LaneWidth width, const HashKey& key, const uint8_t* data, size_t size, size_t count, uint8_t* out,
                PairChain* chain) {
  const size_t chunks = (size + BLAKE3_CHUNK_BYTES - 1) / BLAKE3_CHUNK_BYTES;
  std::vector<uint32_t> values(count * chunks * 8);
  std::array<uint32_t, 16 * 8> row;
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    const size_t offset = chunk * BLAKE3_CHUNK_BYTES;
    const ChunkWork work = {data + offset, size, std::min(BLAKE3_CHUNK_BYTES, size - offset), chunk,
                            key.keyed ? KEYED_HASH : 0};
    hash_chunk(width, key.words, work, count, row.data(), chain);
    for (size_t input = 0; input < count; ++input) {
      std::copy_n(&row[input * 8], 8, &values[(input * chunks + chunk) * 8]);
    }
  }
  for (size_t input = 0; input < count; ++input) {
    const HashWords root = root_of(key, &values[input * chunks * 8], chunks, ROOT);
    std::memcpy(out + input * HASH_BYTES, root.data(), HASH_BYTES);
  }
}

}  // namespace

HashKey plain_hash_key() noexcept { return {IV, false}; }

HashKey keyed_hash_key(const uint8_t key[HASH_BYTES]) noexcept {
  HashKey made{{}, true};
  std::memcpy(made.words.data(), key, HASH_BYTES);
  return made;
}

void blake3_hash(const HashKey& key, const uint8_t* data, size_t size, uint8_t out[HASH_BYTES]) noexcept {
  blake3_hash_many_with(LaneWidth::SCALAR, key, data, size, 1, out);
}

void blake3_hash_many(const HashKey& key, const uint8_t* data, size_t size, size_t count, uint8_t* out) noexcept {
  blake3_hash_many_with(best_width(), key, data, size, count, out);
}

void blake3_hash_many_beside(const HashKey& key, const uint8_t* data, size_t size, size_t count, uint8_t* out,
                             PairChain& chain) noexcept {
  blake3_hash_many_with(best_width(), key, data, size, count, out, &chain);
}

void blake3_hash_pairs(PairChain& chain) noexcept {
  while (chain.ready > 0) {
    uint32_t cv[8];
    uint32_t m[16];
    begin_pair(chain, cv, m);
    compress(cv, m, 0, BLOCK_BYTES, pair_flags(chain.key));
    end_pair(chain, cv);
  }
}

void blake3_hash_many_with(LaneWidth width, const HashKey& key, const uint8_t* data, size_t size, size_t count,
                           uint8_t* out, PairChain* chain) noexcept {
  const size_t lanes = static_cast<size_t>(width);
  for (size_t first = 0; first < count; first += lanes) {
    const size_t group = std::min(lanes, count - first);
    const uint8_t* input = size == 0 ? &NO_DATA : data + first * size;
    uint8_t* target = out + first * HASH_BYTES;
    if (size > BLAKE3_CHUNK_BYTES) {
      hash_trees(width, key, input, size, group, target, chain);
      continue;
    }
    const ChunkWork work = {input, size, size, 0, ROOT | (key.keyed ? KEYED_HASH : 0)};
    std::array<uint32_t, 16 * 8> values;
    hash_chunk(width, key.words, work, group, values.data(), chain);
    std::memcpy(target, values.data(), group * HASH_BYTES);
  }
}

void blake3_hash_chains(const HashKey& key, const uint8_t* parents, size_t chains, const uint8_t* inputs, size_t steps,
                        uint8_t* results) noexcept {
  blake3_hash_chains_with(best_width(), key, parents, chains, inputs, steps, results);
}

void blake3_hash_chains_with(LaneWidth width, const HashKey& key, const uint8_t* parents, size_t chains, const uint8_t* inputs,
                             size_t steps, uint8_t* results) noexcept {
  const size_t lanes = static_cast<size_t>(width);
  for (size_t first = 0; first < chains; first += lanes) {
    const ChainsWork work = {key.words, pair_flags(key), parents + first * HASH_BYTES, inputs, steps,
                             results + first * steps * HASH_BYTES};
    hash_chains(width, key, work, std::min(lanes, chains - first));
  }
}

bool blake3_supports(LaneWidth width) noexcept {
#if defined(__x86_64__)
  if (width == LaneWidth::AVX512) {
    return processor_features().avx512f && processor_features().avx512vl;
  }
  if (width == LaneWidth::AVX2) {
    return processor_features().avx2;
  }
#elif defined(__aarch64__)
  if (width == LaneWidth::NEON) {
    return true;  // part of the architecture
  }
#endif
  return width == LaneWidth::SCALAR;
}

const char* blake3_lanes() noexcept {
  switch (best_width()) {
    case LaneWidth::AVX512:
      return "avx512";
    case LaneWidth::AVX2:
      return "avx2";
    case LaneWidth::NEON:
      return "neon";
    case LaneWidth::SCALAR:
      return "scalar";
  }
  return "scalar";
}

}  // namespace kvpool
