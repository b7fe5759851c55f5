// Chunks of N inputs at a time with GCC's vector types: loading by transposition, the block loop, storing.
//
// Included by the AVX2, AVX-512 and NEON sources only. See blake3_lanes.h.
#pragma once

#include <algorithm>

#include "hash/blake3_lanes.h"

namespace kvpool::blake3_detail {

// Swaps the off-diagonal blocks of size `Step` of two rows: one stage of an in-register transposition.
template <typename Lanes, size_t N, size_t Step, size_t... Lane>
[[gnu::always_inline]] inline void exchange(Lanes& low, Lanes& high, std::index_sequence<Lane...>) noexcept {
  const Lanes first = __builtin_shufflevector(low, high, ((Lane & Step) == 0 ? Lane : N + Lane - Step)...);
  const Lanes second = __builtin_shufflevector(low, high, ((Lane & Step) == 0 ? Lane + Step : N + Lane)...);
  low = first;
  high = second;
}

template <typename Lanes, size_t N, size_t Step>
[[gnu::always_inline]] inline void transpose_from(Lanes* rows) noexcept {
  for (size_t row = 0; row < N; ++row) {
    if ((row & Step) == 0) {
      exchange<Lanes, N, Step>(rows[row], rows[row + Step], std::make_index_sequence<N>{});
    }
  }
  if constexpr (Step > 1) {
    transpose_from<Lanes, N, Step / 2>(rows);
  }
}

// m[w] = word w of each input's block.
template <typename Lanes, size_t N>
[[gnu::always_inline]] inline void load_block(Lanes (&m)[16], const uint8_t* const (&inputs)[N], size_t offset) noexcept {
  for (size_t part = 0; part < 16 / N; ++part) {
    for (size_t lane = 0; lane < N; ++lane) {
      std::memcpy(&m[part * N + lane], inputs[lane] + offset + part * sizeof(Lanes), sizeof(Lanes));
    }
    transpose_from<Lanes, N, N / 2>(&m[part * N]);
  }
}

// The chaining values of one chunk of each of `count` inputs, 8 words an input. REQUIRES: 1 <= count <= N.
// `chain`: steps of it are taken beside the blocks; nullptr: there is none.
template <typename Lanes, size_t N>
inline void hash_chunk_of_lanes(const HashWords& key, const ChunkWork& work, size_t count, uint32_t* out,
                                PairChain* chain) noexcept {
  const uint8_t* inputs[N];
  for (size_t lane = 0; lane < N; ++lane) {
    inputs[lane] = work.data + work.stride * std::min(lane, count - 1);
  }
  Lanes cv[8];
  for (size_t i = 0; i < 8; ++i) {
    cv[i] = Lanes{} + key[i];
  }
  Lanes m[16];
  const size_t blocks = std::max<size_t>(1, (work.size + BLOCK_BYTES - 1) / BLOCK_BYTES);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t offset = block * BLOCK_BYTES;
    const size_t size = std::min(BLOCK_BYTES, work.size - offset);
    if (size == BLOCK_BYTES) {
      load_block<Lanes, N>(m, inputs, offset);
    } else {
      uint8_t padded[N][BLOCK_BYTES] = {};
      const uint8_t* rows[N];
      for (size_t lane = 0; lane < N; ++lane) {
        std::memcpy(padded[lane], inputs[lane] + offset, size);
        rows[lane] = padded[lane];
      }
      load_block<Lanes, N>(m, rows, 0);
    }
    const bool is_last = block + 1 == blocks;
    const uint32_t flags = (work.flags & ~ROOT) | (block == 0 ? CHUNK_START : 0) |
                           (is_last ? CHUNK_END | (work.flags & ROOT) : 0);
    if (chain != nullptr && chain->ready > 0) {
      compress_beside(cv, m, work.counter, static_cast<uint32_t>(size), flags, *chain);
    } else {
      compress(cv, m, work.counter, static_cast<uint32_t>(size), flags);
    }
  }
  for (size_t lane = 0; lane < count; ++lane) {
    for (size_t i = 0; i < 8; ++i) {
      out[lane * 8 + i] = cv[i][lane];
    }
  }
}

// Rows of results from lanes of words: N rows of N words, or of 8 where there are more lanes.
template <typename Lanes, size_t N>
[[gnu::always_inline]] inline void store_links(const Lanes (&words)[8], size_t count, uint8_t* out, size_t stride) noexcept {
  if constexpr (N <= 8) {
    Lanes rows[8];
    std::copy(words, words + 8, rows);
    for (size_t part = 0; part < 8 / N; ++part) {
      transpose_from<Lanes, N, N / 2>(rows + part * N);
      for (size_t lane = 0; lane < count; ++lane) {
        std::memcpy(out + lane * stride + part * sizeof(Lanes), &rows[part * N + lane], sizeof(Lanes));
      }
    }
  } else {
    for (size_t lane = 0; lane < count; ++lane) {
      for (size_t i = 0; i < 8; ++i) {
        const uint32_t word = words[i][lane];
        std::memcpy(out + lane * stride + i * sizeof(word), &word, sizeof(word));
      }
    }
  }
}

// Steps of several chains over the same inputs, a lane for each: a step's results are the next one's words as they lie.
// REQUIRES: 1 <= count <= N.
template <typename Lanes, size_t N>
inline void hash_pairs_of_lanes(const ChainsWork& work, size_t count) noexcept {
  Lanes m[16];
  for (size_t i = 0; i < 8; ++i) {
    for (size_t lane = 0; lane < N; ++lane) {
      uint32_t word = 0;
      std::memcpy(&word, work.parents + std::min(lane, count - 1) * HASH_BYTES + i * sizeof(word), sizeof(word));
      m[i][lane] = word;
    }
  }
  for (size_t step = 0; step < work.steps; ++step) {
    HashWords input;
    std::memcpy(input.data(), work.inputs + step * HASH_BYTES, HASH_BYTES);
    Lanes cv[8];
    for (size_t i = 0; i < 8; ++i) {
      cv[i] = Lanes{} + work.key[i];
      m[8 + i] = Lanes{} + input[i];
    }
    compress(cv, m, 0, BLOCK_BYTES, work.flags);
    std::copy(cv, cv + 8, m);
    store_links<Lanes, N>(cv, count, work.results + step * HASH_BYTES, work.steps * HASH_BYTES);
  }
}

}  // namespace kvpool::blake3_detail
