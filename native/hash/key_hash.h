// Chunk keys: independent leaves, then the chain.
//
//   leaf_i = H_leaf(tokens of chunk i as int32 little endian)          many at a time
//   key_i  = H_chain(key_{i-1} || leaf_i)                              one short hash each, in order
//   root   = H_root(for each field: u32 length || bytes)
//   mixed leaf = H_extra(leaf || payload)                              content that tokens do not name
//
// Every H is BLAKE3 keyed with a key of its own, the hash of a name, so that no output of one is an input's stand-in
// for another. 32 bytes, never shortened. Deterministic over processes, machines and instruction sets.
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "hash/blake3.h"

namespace kvpool {

// leaves + 32 i = the leaf of chunk i, for `chunks` chunks of `chunk_tokens` tokens.
void hash_leaves(const int32_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves) noexcept;

// The same for 64-bit tokens. False, and nothing promised about `leaves`, if one does not fit 32 bits.
[[nodiscard]] bool hash_leaves(const int64_t* tokens, size_t chunk_tokens, size_t chunks, uint8_t* leaves);

// keys + 32 (chunks r + i) = the key of chunk i behind parent r, for so many `chains`. Of one, `keys` may be `leaves`.
void chain_keys(const uint8_t* parents, size_t chains, const uint8_t* leaves, size_t chunks, uint8_t* keys) noexcept;

// keys + 32 i = the key of the chunk without a parent that an engine names by the 32 bytes at names + 32 i: behind the root, the leaf is
// the plain hash of its name.
void name_keys(const uint8_t root[HASH_BYTES], const uint8_t* names, size_t count, uint8_t* keys) noexcept;

// hash_leaves and chain_keys: of one chain in about the time of the first of them. `parents`: packed, one for each chain.
void hash_chunks(const int32_t* tokens, size_t chunk_tokens, size_t chunks, std::span<const uint8_t> parents, uint8_t* leaves,
                 uint8_t* keys) noexcept;
[[nodiscard]] bool hash_chunks(const int64_t* tokens, size_t chunk_tokens, size_t chunks, std::span<const uint8_t> parents,
                               uint8_t* leaves, uint8_t* keys);

void mix_leaf(const uint8_t leaf[HASH_BYTES], const uint8_t* payload, size_t size, uint8_t out[HASH_BYTES]);

// `fields`: the fields with their lengths, packed as above.
void derive_root(const uint8_t* fields, size_t size, uint8_t out[HASH_BYTES]) noexcept;

}  // namespace kvpool
