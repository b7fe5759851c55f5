// Chunk keys: equal for both token widths, incremental, different wherever an input differs.
#include "hash/key_hash.h"

#include <cstring>
#include <vector>

#include "tests/harness.h"

using namespace kvpool;

namespace {

constexpr size_t CHUNK_TOKENS = 256;
constexpr size_t CHUNKS = 37;

std::vector<int32_t> some_tokens(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(CHUNKS * CHUNK_TOKENS);
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random());
  }
  return tokens;
}

std::vector<uint8_t> keys_of(const std::vector<int32_t>& tokens) {
  std::vector<uint8_t> keys(CHUNKS * HASH_BYTES);
  const uint8_t root[HASH_BYTES] = {9};
  hash_leaves(tokens.data(), CHUNK_TOKENS, CHUNKS, keys.data());
  chain_keys(root, 1, keys.data(), CHUNKS, keys.data());
  return keys;
}

}  // namespace

TEST(both_token_widths_give_the_same_leaves) {
  const auto tokens = some_tokens(testing::seed());
  const std::vector<int64_t> wide(tokens.begin(), tokens.end());
  std::vector<uint8_t> narrow_leaves(CHUNKS * HASH_BYTES);
  std::vector<uint8_t> wide_leaves(CHUNKS * HASH_BYTES);
  hash_leaves(tokens.data(), CHUNK_TOKENS, CHUNKS, narrow_leaves.data());
  EXPECT(hash_leaves(wide.data(), CHUNK_TOKENS, CHUNKS, wide_leaves.data()));
  EXPECT(narrow_leaves == wide_leaves);
}

TEST(a_token_beyond_32_bits_is_refused) {
  std::vector<int64_t> tokens(CHUNK_TOKENS * 2, 1);
  tokens.back() = int64_t{1} << 31;
  std::vector<uint8_t> leaves(2 * HASH_BYTES);
  EXPECT(!hash_leaves(tokens.data(), CHUNK_TOKENS, 2, leaves.data()));
}

TEST(a_changed_token_changes_its_key_and_all_that_follow) {
  auto tokens = some_tokens(testing::seed());
  const auto before = keys_of(tokens);
  tokens[20 * CHUNK_TOKENS + 3] ^= 1;
  const auto after = keys_of(tokens);
  for (size_t i = 0; i < CHUNKS; ++i) {
    const bool equal = std::memcmp(&before[i * HASH_BYTES], &after[i * HASH_BYTES], HASH_BYTES) == 0;
    EXPECT(equal == (i < 20));
  }
}

TEST(a_chain_may_be_made_in_parts) {
  const auto tokens = some_tokens(testing::seed());
  std::vector<uint8_t> leaves(CHUNKS * HASH_BYTES);
  hash_leaves(tokens.data(), CHUNK_TOKENS, CHUNKS, leaves.data());
  const auto whole = keys_of(tokens);
  const uint8_t root[HASH_BYTES] = {9};
  std::vector<uint8_t> parts(CHUNKS * HASH_BYTES);
  chain_keys(root, 1, leaves.data(), 10, parts.data());
  chain_keys(&parts[9 * HASH_BYTES], 1, &leaves[10 * HASH_BYTES], CHUNKS - 10, &parts[10 * HASH_BYTES]);
  EXPECT(parts == whole);
}

TEST(chunks_hashed_at_once_have_the_same_leaves_and_keys) {
  const auto tokens = some_tokens(testing::seed());
  const std::vector<int64_t> wide(tokens.begin(), tokens.end());
  std::vector<uint8_t> parents;
  for (uint8_t chain = 0; chain < 5; ++chain) {
    parents.resize(parents.size() + HASH_BYTES, static_cast<uint8_t>(chain + 9));
    const size_t chains = parents.size() / HASH_BYTES;
    for (const size_t chunk_tokens : {size_t{1}, size_t{16}, CHUNK_TOKENS, size_t{300}}) {
      for (const size_t chunks : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{30}}) {
        std::vector<uint8_t> expected_leaves(chunks * HASH_BYTES);
        std::vector<uint8_t> expected_keys(chains * chunks * HASH_BYTES);
        hash_leaves(tokens.data(), chunk_tokens, chunks, expected_leaves.data());
        chain_keys(parents.data(), chains, expected_leaves.data(), chunks, expected_keys.data());
        std::vector<uint8_t> leaves(chunks * HASH_BYTES);
        std::vector<uint8_t> keys(chains * chunks * HASH_BYTES);
        hash_chunks(tokens.data(), chunk_tokens, chunks, parents, leaves.data(), keys.data());
        EXPECT(leaves == expected_leaves);
        EXPECT(keys == expected_keys);
        std::vector<uint8_t> wide_keys(chains * chunks * HASH_BYTES);
        EXPECT(hash_chunks(wide.data(), chunk_tokens, chunks, parents, leaves.data(), wide_keys.data()));
        EXPECT(wide_keys == expected_keys);
      }
    }
  }
}

TEST(chains_side_by_side_have_the_same_keys) {
  const auto tokens = some_tokens(testing::seed());
  std::vector<uint8_t> leaves(CHUNKS * HASH_BYTES);
  hash_leaves(tokens.data(), CHUNK_TOKENS, CHUNKS, leaves.data());
  for (size_t chains = 0; chains <= 35; ++chains) {
    std::vector<uint8_t> parents(chains * HASH_BYTES);
    std::vector<uint8_t> expected(chains * CHUNKS * HASH_BYTES);
    for (size_t chain = 0; chain < chains; ++chain) {
      parents[chain * HASH_BYTES] = static_cast<uint8_t>(chain + 1);
      chain_keys(&parents[chain * HASH_BYTES], 1, leaves.data(), CHUNKS, &expected[chain * CHUNKS * HASH_BYTES]);
    }
    std::vector<uint8_t> keys(chains * CHUNKS * HASH_BYTES);
    chain_keys(parents.data(), chains, leaves.data(), CHUNKS, keys.data());
    EXPECT(keys == expected);
  }
}

TEST(field_boundaries_change_the_hash) {
  const uint8_t one[] = {1, 0, 0, 0, 'a', 1, 0, 0, 0, 'b'};
  const uint8_t two[] = {2, 0, 0, 0, 'a', 'b', 0, 0, 0, 0};
  uint8_t first[HASH_BYTES];
  uint8_t second[HASH_BYTES];
  derive_root(one, sizeof(one), first);
  derive_root(two, sizeof(two), second);
  EXPECT(std::memcmp(first, second, HASH_BYTES) != 0);
}

TEST(a_named_key_is_a_chain_of_one_behind_the_hash_of_its_name) {
  std::mt19937_64 random(testing::seed());
  for (const size_t count : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{200}}) {
    std::vector<uint8_t> names(count * HASH_BYTES);
    for (uint8_t& byte : names) {
      byte = static_cast<uint8_t>(random());
    }
    const uint8_t root[HASH_BYTES] = {3, 1};
    std::vector<uint8_t> keys(names.size());
    name_keys(root, names.data(), count, keys.data());
    for (size_t index = 0; index < count; ++index) {
      uint8_t leaf[HASH_BYTES];
      uint8_t key[HASH_BYTES];
      blake3_hash(plain_hash_key(), names.data() + index * HASH_BYTES, HASH_BYTES, leaf);
      chain_keys(root, 1, leaf, 1, key);
      EXPECT(std::memcmp(key, keys.data() + index * HASH_BYTES, HASH_BYTES) == 0);
    }
  }
}
