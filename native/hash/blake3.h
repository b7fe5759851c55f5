// BLAKE3 (specification of 2020-01-09), as far as kvpool needs it: hash and keyed hash of 32 bytes' output.
//
// What it is: the hash of chunk keys. What it is not: an extendable output, or a stream; inputs are whole.
// Two shapes of work: one input of any length, and many inputs of one length at a time. The second is why BLAKE3 was
// chosen: its compression function vectorises over independent inputs, 16 at a time with AVX-512, 8 with AVX2, 4
// with NEON.
// Every width computes the same function; the scalar width is the twin that the tests compare with.
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

inline constexpr size_t HASH_BYTES = 32;
inline constexpr size_t BLAKE3_CHUNK_BYTES = 1024;

using HashWords = std::array<uint32_t, 8>;

struct HashKey {
  HashWords words;
  bool keyed;  // keyed hash; otherwise plain, with the words of the standard IV
};

[[nodiscard]] HashKey plain_hash_key() noexcept;
[[nodiscard]] HashKey keyed_hash_key(const uint8_t key[HASH_BYTES]) noexcept;

// out = H(data).
void blake3_hash(const HashKey& key, const uint8_t* data, size_t size, uint8_t out[HASH_BYTES]) noexcept;

// out + 32 i = H(data + size i) for i in [0, count): count inputs of equal size, one behind the other.
void blake3_hash_many(const HashKey& key, const uint8_t* data, size_t size, size_t count, uint8_t* out) noexcept;

// A chain of hashes of pairs: result_i = H(result_{i-1} || input_i), inputs and results of 32 bytes, one behind the other.
// One step waits for the other and leaves most of a processor idle, so steps may be taken beside other hashes.
struct PairChain {
  HashKey key;
  HashWords link;       // the last result; at first what is before the first one
  const uint8_t* next;  // the next input
  size_t ready;         // inputs that are there, and have no result yet
  uint8_t* results;     // where the next result goes; may be where its input is
};

// blake3_hash_many, with steps of the chain beside it: as many as are ready and find a place, at least none.
void blake3_hash_many_beside(const HashKey& key, const uint8_t* data, size_t size, size_t count, uint8_t* out,
                             PairChain& chain) noexcept;

// All the steps that are ready.
void blake3_hash_pairs(PairChain& chain) noexcept;

// So many chains over the same inputs, each behind its parent: the results of one behind those of another. Side by side, in about the
// time of one. Of a single chain the results may be where the inputs are.
void blake3_hash_chains(const HashKey& key, const uint8_t* parents, size_t chains, const uint8_t* inputs, size_t steps,
                        uint8_t* results) noexcept;

// The width that blake3_hash_many uses on this machine: "avx512", "avx2", "neon" or "scalar".
[[nodiscard]] const char* blake3_lanes() noexcept;

enum class LaneWidth : uint8_t { SCALAR = 1, NEON = 4, AVX2 = 8, AVX512 = 16 };

// For tests: hash_many with a chosen width, beside a chain or nullptr. REQUIRES: the machine has it.
void blake3_hash_many_with(LaneWidth width, const HashKey& key, const uint8_t* data, size_t size, size_t count,
                           uint8_t* out, PairChain* chain = nullptr) noexcept;
// The same of chains.
void blake3_hash_chains_with(LaneWidth width, const HashKey& key, const uint8_t* parents, size_t chains, const uint8_t* inputs,
                             size_t steps, uint8_t* results) noexcept;
[[nodiscard]] bool blake3_supports(LaneWidth width) noexcept;

}  // namespace kvpool
