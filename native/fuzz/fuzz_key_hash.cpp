// Key hashing over any tokens, extras and fields: the same keys whatever the width of the tokens and of the vectors.
#include "fuzz_input.h"
#include "hash/key_hash.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

using Hash = std::vector<uint8_t>;

// Leaves of 64-bit tokens, one chunk at a time, as the oracle of the wide path.
void check_leaves(const std::vector<int32_t>& tokens, size_t chunk_tokens) {
  const size_t chunks = tokens.size() / chunk_tokens;
  Hash leaves(chunks * HASH_BYTES);
  hash_leaves(tokens.data(), chunk_tokens, chunks, leaves.data());
  const std::vector<int64_t> wide(tokens.begin(), tokens.end());
  Hash from_wide(leaves.size());
  FUZZ_EXPECT(hash_leaves(wide.data(), chunk_tokens, chunks, from_wide.data()));
  FUZZ_EXPECT(leaves == from_wide);
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    uint8_t one[HASH_BYTES];
    hash_leaves(tokens.data() + chunk * chunk_tokens, chunk_tokens, 1, one);
    FUZZ_EXPECT(std::memcmp(one, &leaves[chunk * HASH_BYTES], HASH_BYTES) == 0);
  }
  const uint8_t parent[HASH_BYTES] = {7};
  Hash keys(leaves.size());
  chain_keys(parent, 1, leaves.data(), chunks, keys.data());
  Hash leaves_at_once(leaves.size());
  Hash keys_at_once(leaves.size());
  hash_chunks(tokens.data(), chunk_tokens, chunks, {parent, HASH_BYTES}, leaves_at_once.data(), keys_at_once.data());
  FUZZ_EXPECT(leaves_at_once == leaves && keys_at_once == keys);
  const size_t first = chunks / 2;
  if (first > 0) {
    Hash rest((chunks - first) * HASH_BYTES);
    chain_keys(&keys[(first - 1) * HASH_BYTES], 1, leaves.data() + first * HASH_BYTES, chunks - first, rest.data());
    FUZZ_EXPECT(std::equal(rest.begin(), rest.end(), keys.begin() + static_cast<std::ptrdiff_t>(first * HASH_BYTES)));
  }
  chain_keys(parent, 1, leaves.data(), chunks, leaves.data());
  FUZZ_EXPECT(leaves == keys);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const size_t chunk_tokens = 1 + input.up_to(300);
  const bool is_wide = input.number<uint8_t>() % 4 == 0;
  const Hash payload = input.bytes(input.up_to(200));
  uint8_t out[HASH_BYTES];
  uint8_t again[HASH_BYTES];
  const uint8_t leaf[HASH_BYTES] = {3};
  mix_leaf(leaf, payload.data(), payload.size(), out);
  derive_root(payload.data(), payload.size(), again);
  FUZZ_EXPECT(std::memcmp(out, again, HASH_BYTES) != 0);
  if (is_wide) {
    std::vector<int64_t> tokens;
    bool fits = true;
    while (!input.is_empty()) {
      tokens.push_back(static_cast<int64_t>(input.awkward()));
    }
    const size_t chunks = tokens.size() / chunk_tokens;
    for (size_t index = 0; index < chunks * chunk_tokens; ++index) {
      fits = fits && tokens[index] >= INT32_MIN && tokens[index] <= INT32_MAX;
    }
    Hash leaves(chunks * HASH_BYTES);
    FUZZ_EXPECT(hash_leaves(tokens.data(), chunk_tokens, chunks, leaves.data()) == fits);
    return 0;
  }
  std::vector<int32_t> tokens;
  while (!input.is_empty()) {
    tokens.push_back(input.number<int32_t>());
  }
  check_leaves(tokens, chunk_tokens);
  return 0;
}
