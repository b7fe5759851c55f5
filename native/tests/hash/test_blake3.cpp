// BLAKE3: published values, and every vector width against the scalar twin on odd lengths and counts.
#include "hash/blake3.h"

#include <cstring>
#include <string>
#include <vector>

#include "tests/harness.h"

using namespace kvpool;

namespace {

std::string hex(const uint8_t* data) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < HASH_BYTES; ++i) {
    text += digits[data[i] >> 4];
    text += digits[data[i] & 15];
  }
  return text;
}

// The input of the official test vectors: bytes 0 … 250, repeated.
std::vector<uint8_t> vector_input(size_t size) {
  std::vector<uint8_t> input(size);
  for (size_t i = 0; i < size; ++i) {
    input[i] = static_cast<uint8_t>(i % 251);
  }
  return input;
}

std::string hash_of(const std::vector<uint8_t>& input) {
  uint8_t out[HASH_BYTES];
  blake3_hash(plain_hash_key(), input.data(), input.size(), out);
  return hex(out);
}

}  // namespace

TEST(published_values) {
  EXPECT(hash_of({}) == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  EXPECT(hash_of(vector_input(1)) == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213");
  const char* abc = "abc";
  uint8_t out[HASH_BYTES];
  blake3_hash(plain_hash_key(), reinterpret_cast<const uint8_t*>(abc), 3, out);
  EXPECT(hex(out) == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
}

TEST(every_width_equals_the_scalar_twin) {
  std::mt19937_64 random(testing::seed());
  const uint8_t key_bytes[HASH_BYTES] = {1, 2, 3};
  for (const LaneWidth width : {LaneWidth::NEON, LaneWidth::AVX2, LaneWidth::AVX512}) {
    if (!blake3_supports(width)) {
      std::printf("  width %d is not on this machine\n", static_cast<int>(width));
      continue;
    }
    for (const size_t size : std::initializer_list<size_t>{0, 1, 63, 64, 65, 128, 1000, 1023, 1024, 1025, 2048, 3000, 5121}) {
      for (const size_t count : std::initializer_list<size_t>{1, 2, 7, 8, 9, 15, 16, 17, 33}) {
        std::vector<uint8_t> data(size * count + 1);
        for (uint8_t& byte : data) {
          byte = static_cast<uint8_t>(random());
        }
        for (const bool keyed : {false, true}) {
          const HashKey key = keyed ? keyed_hash_key(key_bytes) : plain_hash_key();
          std::vector<uint8_t> expected(count * HASH_BYTES);
          std::vector<uint8_t> found(count * HASH_BYTES);
          blake3_hash_many_with(LaneWidth::SCALAR, key, data.data() + 1, size, count, expected.data());
          blake3_hash_many_with(width, key, data.data() + 1, size, count, found.data());
          EXPECT(expected == found);
        }
      }
    }
  }
}

TEST(chains_of_every_width_are_those_of_pairs) {
  std::mt19937_64 random(testing::seed());
  constexpr size_t STEPS = 5;
  std::vector<uint8_t> inputs(STEPS * HASH_BYTES);
  for (uint8_t& byte : inputs) {
    byte = static_cast<uint8_t>(random());
  }
  for (const LaneWidth width : {LaneWidth::SCALAR, LaneWidth::NEON, LaneWidth::AVX2, LaneWidth::AVX512}) {
    if (!blake3_supports(width)) {
      std::printf("  width %d is not on this machine\n", static_cast<int>(width));
      continue;
    }
    for (const bool keyed : {false, true}) {
      const uint8_t key_bytes[HASH_BYTES] = {1, 2, 3};
      const HashKey key = keyed ? keyed_hash_key(key_bytes) : plain_hash_key();
      for (size_t chains = 0; chains <= 35; ++chains) {
        std::vector<uint8_t> parents(chains * HASH_BYTES);
        std::vector<uint8_t> expected(chains * STEPS * HASH_BYTES);
        for (uint8_t& byte : parents) {
          byte = static_cast<uint8_t>(random());
        }
        for (size_t chain = 0; chain < chains; ++chain) {
          uint8_t pair[2 * HASH_BYTES];
          std::copy_n(&parents[chain * HASH_BYTES], HASH_BYTES, pair);
          for (size_t step = 0; step < STEPS; ++step) {
            std::copy_n(&inputs[step * HASH_BYTES], HASH_BYTES, pair + HASH_BYTES);
            uint8_t* const result = &expected[(chain * STEPS + step) * HASH_BYTES];
            blake3_hash(key, pair, sizeof(pair), result);
            std::copy_n(result, HASH_BYTES, pair);
          }
        }
        std::vector<uint8_t> found(chains * STEPS * HASH_BYTES);
        blake3_hash_chains_with(width, key, parents.data(), chains, inputs.data(), STEPS, found.data());
        EXPECT(expected == found);
      }
    }
  }
}
