// The compression function of BLAKE3 over `Lanes`: one word of each of N inputs side by side.
//
// Included by one source per instruction set, each compiled with its own flags; everything here is `static` or a
// template over a type of that source, so no code compiled for one set is linked into another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "hash/blake3.h"

namespace kvpool::blake3_detail {

inline constexpr std::array<uint32_t, 8> IV = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
inline constexpr uint32_t CHUNK_START = 1;
inline constexpr uint32_t CHUNK_END = 2;
inline constexpr uint32_t PARENT = 4;
inline constexpr uint32_t ROOT = 8;
inline constexpr uint32_t KEYED_HASH = 16;
inline constexpr size_t BLOCK_BYTES = 64;
inline constexpr size_t ROUNDS = 7;

// Message word order of each round: the specification's permutation, applied repeatedly.
consteval std::array<std::array<uint8_t, 16>, ROUNDS> make_schedule() {
  constexpr std::array<uint8_t, 16> permutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  std::array<std::array<uint8_t, 16>, ROUNDS> schedule{};
  for (uint8_t i = 0; i < 16; ++i) {
    schedule[0][i] = i;
  }
  for (size_t round = 1; round < ROUNDS; ++round) {
    for (size_t i = 0; i < 16; ++i) {
      schedule[round][i] = schedule[round - 1][permutation[i]];
    }
  }
  return schedule;
}
inline constexpr auto SCHEDULE = make_schedule();

// One chunk of at most 1024 bytes, of N inputs at a time: where it begins, how much of it there is.
struct ChunkWork {
  const uint8_t* data;   // of the first input
  size_t stride;         // from one input to the next
  size_t size;           // bytes of this chunk, equal for all inputs
  uint64_t counter;      // which chunk of its input it is
  uint32_t flags;        // KEYED_HASH, and ROOT where the chunk is the whole input
};

// Chains over the same inputs; see blake3_hash_chains.
struct ChainsWork {
  const HashWords& key;
  uint32_t flags;
  const uint8_t* parents;  // of the first chain
  const uint8_t* inputs;
  size_t steps;
  uint8_t* results;
};

template <typename Lanes, int Bits>
[[gnu::always_inline]] inline Lanes rotate_right(Lanes value) noexcept {
  return (value >> Bits) | (value << (32 - Bits));
}

template <typename Lanes>
[[gnu::always_inline]] inline void mix(Lanes& a, Lanes& b, Lanes& c, Lanes& d, Lanes x, Lanes y) noexcept {
  a = a + b + x;
  d = rotate_right<Lanes, 16>(d ^ a);
  c = c + d;
  b = rotate_right<Lanes, 12>(b ^ c);
  a = a + b + y;
  d = rotate_right<Lanes, 8>(d ^ a);
  c = c + d;
  b = rotate_right<Lanes, 7>(b ^ c);
}

template <typename Lanes, size_t Round>
[[gnu::always_inline]] inline void mix_round(Lanes (&v)[16], const Lanes (&m)[16]) noexcept {
  constexpr auto& s = SCHEDULE[Round];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <typename Lanes, size_t... Round>
[[gnu::always_inline]] inline void mix_rounds(Lanes (&v)[16], const Lanes (&m)[16],
                                              std::index_sequence<Round...>) noexcept {
  (mix_round<Lanes, Round>(v, m), ...);
}

template <typename Lanes, size_t... Round>
[[gnu::always_inline]] inline void mix_rounds_beside(Lanes (&v)[16], const Lanes (&m)[16], uint32_t (&pair)[16],
                                                     const uint32_t (&pair_m)[16],
                                                     std::index_sequence<Round...>) noexcept {
  ((mix_round<Lanes, Round>(v, m), mix_round<uint32_t, Round>(pair, pair_m)), ...);
}

// The state before the rounds of a block.
template <typename Lanes>
[[gnu::always_inline]] inline void begin_block(Lanes (&v)[16], const Lanes (&cv)[8], uint64_t counter, uint32_t size,
                                               uint32_t flags) noexcept {
  const Lanes zero = cv[0] ^ cv[0];
  for (size_t i = 0; i < 8; ++i) {
    v[i] = cv[i];
  }
  for (size_t i = 0; i < 4; ++i) {
    v[8 + i] = zero + IV[i];
  }
  v[12] = zero + static_cast<uint32_t>(counter);
  v[13] = zero + static_cast<uint32_t>(counter >> 32);
  v[14] = zero + size;
  v[15] = zero + flags;
}

template <typename Lanes>
[[gnu::always_inline]] inline void end_block(Lanes (&cv)[8], const Lanes (&v)[16]) noexcept {
  for (size_t i = 0; i < 8; ++i) {
    cv[i] = v[i] ^ v[i + 8];
  }
}

// The chaining value `cv` after one block with message words `m`.
template <typename Lanes>
[[gnu::always_inline]] inline void compress(Lanes (&cv)[8], const Lanes (&m)[16], uint64_t counter, uint32_t size,
                                            uint32_t flags) noexcept {
  Lanes v[16];
  begin_block(v, cv, counter, size, flags);
  mix_rounds(v, m, std::make_index_sequence<ROUNDS>{});
  end_block(cv, v);
}

// The block of a chain's next pair, and its value before it.
[[gnu::always_inline]] inline void begin_pair(const PairChain& chain, uint32_t (&cv)[8], uint32_t (&m)[16]) noexcept {
  std::memcpy(cv, chain.key.words.data(), HASH_BYTES);
  std::memcpy(m, chain.link.data(), HASH_BYTES);
  std::memcpy(m + 8, chain.next, HASH_BYTES);
}

[[gnu::always_inline]] inline void end_pair(PairChain& chain, const uint32_t (&cv)[8]) noexcept {
  std::memcpy(chain.link.data(), cv, HASH_BYTES);
  std::memcpy(chain.results, cv, HASH_BYTES);
  chain.results += HASH_BYTES;
  chain.next += HASH_BYTES;
  --chain.ready;
}

[[gnu::always_inline]] inline uint32_t pair_flags(const HashKey& key) noexcept {
  return CHUNK_START | CHUNK_END | ROOT | (key.keyed ? KEYED_HASH : 0);
}

// `compress`, with a step of the chain between its rounds. REQUIRES: the chain has one that is ready.
template <typename Lanes>
[[gnu::always_inline]] inline void compress_beside(Lanes (&cv)[8], const Lanes (&m)[16], uint64_t counter, uint32_t size,
                                                   uint32_t flags, PairChain& chain) noexcept {
  uint32_t pair_cv[8];
  uint32_t pair_m[16];
  begin_pair(chain, pair_cv, pair_m);
  Lanes v[16];
  uint32_t pair[16];
  begin_block(v, cv, counter, size, flags);
  begin_block(pair, pair_cv, 0, BLOCK_BYTES, pair_flags(chain.key));
  mix_rounds_beside(v, m, pair, pair_m, std::make_index_sequence<ROUNDS>{});
  end_block(cv, v);
  end_block(pair_cv, pair);
  end_pair(chain, pair_cv);
}

}  // namespace kvpool::blake3_detail
