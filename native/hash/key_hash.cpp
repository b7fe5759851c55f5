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

// Tokens narrowed at a time: 16 leaves of 256 tokens stay in the first-level cache.
constexpr size_t NARROW_LEAVES = 16;

}  // namespace

void hash_leaves(const int32_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) noexcept {
  static const HashKey key = named_key("kvpool.leaf.1");
  blake3_hash_many(key, reinterpret_cast<const uint8_t*>(tokens), chunk_tokens * sizeof(int32_t), chunks, leaves);
}

bool hash_leaves(const int64_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) {
  std::vector<int32_t> narrow(chunk_tokens * NARROW_LEAVES);
  for (size_t first = 0; first < chunks; first += NARROW_LEAVES) {
    const size_t group = chunks - first < NARROW_LEAVES ? chunks - first : NARROW_LEAVES;
    const int64_t* source = tokens + first * chunk_tokens;
    for (size_t i = 0; i < group * chunk_tokens; ++i) {
      if (!std::in_range<int32_t>(source[i])) {
        return false;
      }
      narrow[i] = static_cast<int32_t>(source[i]);
    }
    hash_leaves(narrow.data(), chunk_tokens, group, leaves + first * HASH_BYTES);
  }
  return true;
}

void chain_keys(const uint8_t parent[HASH_BYTES], const uint8_t* leaves, size_t chunks, uint8_t* keys) noexcept {
  static const HashKey key = named_key("kvpool.chain.1");
  uint8_t link[2 * HASH_BYTES];
  std::memcpy(link, parent, HASH_BYTES);
  for (size_t i = 0; i < chunks; ++i) {
    std::memcpy(link + HASH_BYTES, leaves + i * HASH_BYTES, HASH_BYTES);
    blake3_hash(key, link, sizeof(link), link);
    std::memcpy(keys + i * HASH_BYTES, link, HASH_BYTES);
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
