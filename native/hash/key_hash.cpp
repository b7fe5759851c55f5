#include "hash/key_hash.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

HashKey named_key(std::string_view name) noexcept {
  uint8_t key[HASH_BYTES];
  blake3_hash(plain_hash_key(), reinterpret_cast<const uint8_t*>(name.data()), name.size(), key);
  return keyed_hash_key(key);
}

// Leaves hashed at a time: 16 of 256 tokens stay in the first-level cache while they are narrowed, and the keys of one such group
// are chained beside the leaves of the next.
constexpr size_t GROUP_LEAVES = 16;
// From so many chains on they are hashed side by side, in the time of two that are not.
constexpr size_t WIDE_CHAINS = 3;
constexpr size_t WIDE_CHAINS_MAX = 16;

const HashKey& leaf_key() noexcept {
  static const HashKey key = named_key("kvpool.leaf.1");
  return key;
}

const HashKey& chain_key() noexcept {
  static const HashKey key = named_key("kvpool.chain.1");
  return key;
}

PairChain chain_from(const uint8_t parent[HASH_BYTES], const uint8_t* leaves, uint8_t* keys) noexcept {
  PairChain chain{chain_key(), {}, leaves, 0, keys};
  std::memcpy(chain.link.data(), parent, HASH_BYTES);
  return chain;
}

// A group's tokens as they are hashed; nullptr where one does not fit.
const int32_t* narrowed(const int32_t* tokens, size_t /*count*/, std::vector<int32_t>& /*room*/) { return tokens; }

const int32_t* narrowed(const int64_t* tokens, size_t count, std::vector<int32_t>& room) {
  room.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (!std::in_range<int32_t>(tokens[i])) {
      return nullptr;
    }
    room[i] = static_cast<int32_t>(tokens[i]);
  }
  return room.data();
}

// Calls `visit(first, group, bytes)` for each group of leaves, with its tokens' bytes. False where a token does not fit.
template <typename Token, typename Visit>
bool visit_groups(const Token* tokens, size_t chunk_tokens, size_t chunks, Visit visit) {
  std::vector<int32_t> room;
  for (size_t first = 0; first < chunks; first += GROUP_LEAVES) {
    const size_t group = std::min(GROUP_LEAVES, chunks - first);
    const int32_t* const narrow = narrowed(tokens + first * chunk_tokens, group * chunk_tokens, room);
    if (narrow == nullptr) {
      return false;
    }
    visit(first, group, reinterpret_cast<const uint8_t*>(narrow));
  }
  return true;
}

template <typename Token>
bool hash_groups(const Token* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) {
  return visit_groups(tokens, chunk_tokens, chunks, [&](size_t first, size_t group, const uint8_t* bytes) {
    blake3_hash_many(leaf_key(), bytes, chunk_tokens * sizeof(int32_t), group, leaves + first * HASH_BYTES);
  });
}

template <typename Token>
bool hash_groups_beside(const Token* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves, PairChain& chain) {
  const bool fits = visit_groups(tokens, chunk_tokens, chunks, [&](size_t first, size_t group, const uint8_t* bytes) {
    const size_t size = chunk_tokens * sizeof(int32_t);
    blake3_hash_many_beside(leaf_key(), bytes, size, group, leaves + first * HASH_BYTES, chain);
    chain.ready += group;
  });
  blake3_hash_pairs(chain);
  return fits;
}

// REQUIRES: at most WIDE_CHAINS_MAX chains.
void chain_side_by_side(const uint8_t* parents, size_t chains, const uint8_t* leaves, size_t chunks, uint8_t* keys) noexcept {
  uint8_t pairs[WIDE_CHAINS_MAX][2 * HASH_BYTES];
  uint8_t links[WIDE_CHAINS_MAX][HASH_BYTES];
  std::memcpy(links, parents, chains * HASH_BYTES);
  for (size_t i = 0; i < chunks; ++i) {
    for (size_t chain = 0; chain < chains; ++chain) {
      std::memcpy(pairs[chain], links[chain], HASH_BYTES);
      std::memcpy(pairs[chain] + HASH_BYTES, leaves + i * HASH_BYTES, HASH_BYTES);
    }
    blake3_hash_many(chain_key(), pairs[0], sizeof(pairs[0]), chains, links[0]);
    for (size_t chain = 0; chain < chains; ++chain) {
      std::memcpy(keys + (chain * chunks + i) * HASH_BYTES, links[chain], HASH_BYTES);
    }
  }
}

}  // namespace

void hash_leaves(const int32_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) noexcept {
  static_cast<void>(hash_groups(tokens, chunk_tokens, chunks, leaves));  // every one fits
}

bool hash_leaves(const int64_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) {
  return hash_groups(tokens, chunk_tokens, chunks, leaves);
}

void hash_chunks(const int32_t* tokens, size_t chunk_tokens, size_t chunks, const uint8_t parent[HASH_BYTES],
                 uint8_t* leaves, uint8_t* keys) noexcept {
  PairChain chain = chain_from(parent, leaves, keys);
  static_cast<void>(hash_groups_beside(tokens, chunk_tokens, chunks, leaves, chain));  // every one fits
}

bool hash_chunks(const int64_t* tokens, size_t chunk_tokens, size_t chunks, const uint8_t parent[HASH_BYTES],
                 uint8_t* leaves, uint8_t* keys) {
  PairChain chain = chain_from(parent, leaves, keys);
  return hash_groups_beside(tokens, chunk_tokens, chunks, leaves, chain);
}

void chain_keys(const uint8_t* parents, size_t chains, const uint8_t* leaves, size_t chunks, uint8_t* keys) noexcept {
  size_t first = 0;
  while (chains - first >= WIDE_CHAINS) {
    const size_t group = std::min(WIDE_CHAINS_MAX, chains - first);
    chain_side_by_side(parents + first * HASH_BYTES, group, leaves, chunks, keys + first * chunks * HASH_BYTES);
    first += group;
  }
  for (; first < chains; ++first) {
    PairChain chain = chain_from(parents + first * HASH_BYTES, leaves, keys + first * chunks * HASH_BYTES);
    chain.ready = chunks;
    blake3_hash_pairs(chain);
  }
}

void mix_leaf(const uint8_t leaf[HASH_BYTES], const uint8_t* payload, size_t size, uint8_t out[HASH_BYTES]) {
  static const HashKey key = named_key("kvpool.extra.1");
  std::vector<uint8_t> joined(HASH_BYTES + size);
  std::memcpy(joined.data(), leaf, HASH_BYTES);
  std::copy_n(payload, size, joined.data() + HASH_BYTES);  // of nothing, there may be no pointer
  blake3_hash(key, joined.data(), joined.size(), out);
}

void derive_root(const uint8_t* fields, size_t size, uint8_t out[HASH_BYTES]) noexcept {
  static const HashKey key = named_key("kvpool.root.1");
  blake3_hash(key, fields, size, out);
}

}  // namespace kvpool
