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
// Names hashed at a time: many of the widest lanes, on the stack.
constexpr size_t NAMED_AT_ONCE = 64;

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

// One chain has its steps taken beside the leaves; several take theirs side by side, behind them.
template <typename Token>
bool hash_groups_with_keys(const Token* tokens, size_t chunk_tokens, size_t chunks, std::span<const uint8_t> parents, uint8_t* leaves,
                           uint8_t* keys) {
  if (parents.size() != HASH_BYTES) {
    const bool fits = hash_groups(tokens, chunk_tokens, chunks, leaves);
    if (fits) {
      chain_keys(parents.data(), parents.size() / HASH_BYTES, leaves, chunks, keys);
    }
    return fits;
  }
  PairChain chain = chain_from(parents.data(), leaves, keys);
  const bool fits = visit_groups(tokens, chunk_tokens, chunks, [&](size_t first, size_t group, const uint8_t* bytes) {
    const size_t size = chunk_tokens * sizeof(int32_t);
    blake3_hash_many_beside(leaf_key(), bytes, size, group, leaves + first * HASH_BYTES, chain);
    chain.ready += group;
  });
  blake3_hash_pairs(chain);
  return fits;
}

}  // namespace

void hash_leaves(const int32_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) noexcept {
  static_cast<void>(hash_groups(tokens, chunk_tokens, chunks, leaves));  // every one fits
}

bool hash_leaves(const int64_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) {
  return hash_groups(tokens, chunk_tokens, chunks, leaves);
}

void hash_chunks(const int32_t* tokens, size_t chunk_tokens, size_t chunks, std::span<const uint8_t> parents, uint8_t* leaves,
                 uint8_t* keys) noexcept {
  static_cast<void>(hash_groups_with_keys(tokens, chunk_tokens, chunks, parents, leaves, keys));  // every one fits
}

bool hash_chunks(const int64_t* tokens, size_t chunk_tokens, size_t chunks, std::span<const uint8_t> parents, uint8_t* leaves,
                 uint8_t* keys) {
  return hash_groups_with_keys(tokens, chunk_tokens, chunks, parents, leaves, keys);
}

void chain_keys(const uint8_t* parents, size_t chains, const uint8_t* leaves, size_t chunks, uint8_t* keys) noexcept {
  blake3_hash_chains(chain_key(), parents, chains, leaves, chunks, keys);
}

void name_keys(const uint8_t root[HASH_BYTES], const uint8_t* names, size_t count, uint8_t* keys) noexcept {
  uint8_t leaves[NAMED_AT_ONCE][HASH_BYTES];
  uint8_t pairs[NAMED_AT_ONCE][2 * HASH_BYTES];
  for (size_t first = 0; first < count; first += NAMED_AT_ONCE) {
    const size_t group = std::min(NAMED_AT_ONCE, count - first);
    blake3_hash_many(plain_hash_key(), names + first * HASH_BYTES, HASH_BYTES, group, leaves[0]);
    for (size_t i = 0; i < group; ++i) {
      std::memcpy(pairs[i], root, HASH_BYTES);
      std::memcpy(pairs[i] + HASH_BYTES, leaves[i], HASH_BYTES);
    }
    blake3_hash_many(chain_key(), pairs[0], sizeof(pairs[0]), group, keys + first * HASH_BYTES);
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
