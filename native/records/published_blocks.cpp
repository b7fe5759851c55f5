#include "records/published_blocks.h"

#include <algorithm>
#include <cstring>

#include "hash/blake3.h"

namespace kvpool {
namespace {

// The last eight bytes, big endian: as the hash of a whole chunk is published.
uint64_t name_of(const uint8_t hash[HASH_BYTES]) noexcept {
  uint64_t name = 0;
  for (size_t at = HASH_BYTES - sizeof(name); at < HASH_BYTES; ++at) {
    name = name << 8 | hash[at];
  }
  return name;
}

// The names of a chunk's blocks: block_i = H(block_{i-1} || tokens), and of the last one the key's.
std::vector<uint64_t> names_of(const uint8_t* key, const uint8_t* before, std::span<const int32_t> tokens, uint32_t blocks) {
  std::vector<uint64_t> names;
  names.reserve(blocks);
  const size_t block_tokens = tokens.size() / blocks, token_bytes = block_tokens * sizeof(int32_t);
  std::vector<uint8_t> input(HASH_BYTES + token_bytes);
  std::copy_n(before, HASH_BYTES, input.data());
  for (uint32_t block = 0; block + 1 < blocks; ++block) {
    std::memcpy(input.data() + HASH_BYTES, tokens.data() + block * block_tokens, token_bytes);
    uint8_t hash[HASH_BYTES];
    blake3_hash(plain_hash_key(), input.data(), input.size(), hash);
    std::copy_n(hash, HASH_BYTES, input.data());
    names.push_back(name_of(hash));
  }
  names.push_back(name_of(key));
  return names;
}

}  // namespace

PublishedBlocks::PublishedBlocks(const HashSeed& seed)
    : chunks_(0, SeededHash{seed}), uses_(0, SeededHash{seed}) {}

uint64_t PublishedBlocks::use_of(uint64_t name, uint32_t medium) noexcept {
  return folded_product(name ^ 0xD6E8FEB86659FD93ull, 2 * uint64_t{medium} + 0xA0761D6478BD642Full);
}

std::vector<uint64_t> PublishedBlocks::add(const uint8_t* keys, size_t n, const uint8_t* before, std::span<const int32_t> tokens,
                                           uint32_t blocks, uint32_t medium) {
  std::vector<uint64_t> names;
  names.reserve(n * blocks);
  for (size_t i = 0; i < n; ++i) {
    const uint8_t* const key = keys + i * KEY_BYTES;
    Chunk& chunk = chunks_[ChunkKey::from_bytes(key)];
    const auto bit = static_cast<uint8_t>(1U << medium);
    if (chunk.media == 0) {
      chunk.names = names_of(key, before, tokens.subspan(i * (tokens.size() / n), tokens.size() / n), blocks);
    }
    if ((chunk.media & bit) == 0) {
      chunk.media = static_cast<uint8_t>(chunk.media | bit);
      for (const uint64_t name : chunk.names) {
        ++uses_[use_of(name, medium)];
      }
    }
    names.insert(names.end(), chunk.names.begin(), chunk.names.end());
    before = key;
  }
  return names;
}

std::vector<uint64_t> PublishedBlocks::remove(const uint8_t* keys, size_t n, uint32_t medium) {
  std::vector<uint64_t> gone;
  for (size_t i = 0; i < n; ++i) {
    const auto found = chunks_.find(ChunkKey::from_bytes(keys + i * KEY_BYTES));
    const auto bit = static_cast<uint8_t>(1U << medium);
    if (found == chunks_.end() || (found->second.media & bit) == 0) {
      continue;
    }
    Chunk& chunk = found->second;
    for (const uint64_t name : chunk.names) {
      const auto use = uses_.find(use_of(name, medium));
      if (--use->second == 0) {
        uses_.erase(use);
        gone.push_back(name);
      }
    }
    chunk.media = static_cast<uint8_t>(chunk.media & ~bit);
    if (chunk.media == 0) {
      chunks_.erase(found);
    }
  }
  return gone;
}

void PublishedBlocks::clear() noexcept {
  chunks_.clear();
  uses_.clear();
}

std::vector<std::string> PublishedBlocks::verify() const {
  std::vector<std::string> faults;
  Table<uint64_t, uint32_t> counted(0, uses_.hash_function());
  for (const auto& [key, chunk] : chunks_) {
    if (chunk.media == 0) {
      faults.push_back("a chunk is in no medium: its last block is " + std::to_string(chunk.names.back()));
    }
    for (uint32_t medium = 0; medium < MEDIA_MAX; ++medium) {
      if ((chunk.media >> medium & 1) != 0) {
        for (const uint64_t name : chunk.names) {
          ++counted[use_of(name, medium)];
        }
      }
    }
  }
  if (counted != uses_) {
    faults.push_back("names are counted as " + std::to_string(uses_.size()) + " uses, and chunks have " + std::to_string(counted.size()));
  }
  return faults;
}

}  // namespace kvpool
