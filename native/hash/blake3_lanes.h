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

// The chaining value `cv` after one block with message words `m`.
template <typename Lanes>
[[gnu::always_inline]] inline void compress(Lanes (&cv)[8], const Lanes (&m)[16], uint64_t counter, uint32_t size,
                                            uint32_t flags) noexcept {
  const Lanes zero = cv[0] ^ cv[0];
  Lanes v[16] = {cv[0],        cv[1],        cv[2],        cv[3],
                 cv[4],        cv[5],        cv[6],        cv[7],
                 zero + IV[0], zero + IV[1], zero + IV[2], zero + IV[3],
                 zero + static_cast<uint32_t>(counter), zero + static_cast<uint32_t>(counter >> 32),
                 zero + size,  zero + flags};
  mix_rounds(v, m, std::make_index_sequence<ROUNDS>{});
  for (size_t i = 0; i < 8; ++i) {
    cv[i] = v[i] ^ v[i + 8];
  }
}

}  // namespace kvpool::blake3_detail
