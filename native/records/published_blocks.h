// Published blocks: what routers know by the events so far, where a chunk is several blocks and prompts fork inside a chunk.
//
// Routers name a place in a prompt by its tokens, so that two chunks which begin alike have their first blocks in common there. A block
// is therefore named by all before it: the chunk's parent (before the first chunk the scope), and the tokens up to its end. The last
// block of a chunk has the end of the chunk's key as its name, which is what the next chunk follows.
//
//   parent ──► name 0 ──► name 1 ──► … ──► key      two chunks with equal tokens up to block i share the names 0 to i
//
// A name is in a medium as long as a chunk of it is: those in common are counted, and gone with the last. Two keys may have one end,
// because clients choose keys: last blocks are counted like others.
//
// What it is not: bounded by itself; it has the chunks that are stored. For a chunk of 16 blocks 880 bytes in one medium, 660 more in
// each further one, and 7 us to add it (measured).
// Invariant: `uses_` has for each name and medium the number of chunks of that medium that have the name, and none of 0.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.h"
#include "hash/keyed_hash.h"

namespace kvpool {

inline constexpr uint32_t MEDIA_MAX = 8;

class PublishedBlocks {
 public:
  explicit PublishedBlocks(const HashSeed& seed = HashSeed::random());
  PublishedBlocks(const PublishedBlocks&) = delete;
  PublishedBlocks& operator=(const PublishedBlocks&) = delete;

  // A medium has the chunks of `keys`, n packed ones, each the parent of the next. `before`: 32 bytes that stand for all before the
  // first: its parent's key, or a hash of the scope. The names of their blocks, `blocks` for each chunk, in order.
  // REQUIRES: blocks > 0; the tokens are n chunks of whole blocks; medium < MEDIA_MAX.
  std::vector<uint64_t> add(const uint8_t* keys, size_t n, const uint8_t* before, std::span<const int32_t> tokens, uint32_t blocks,
                            uint32_t medium);
  // A medium no longer has these chunks: the names that no chunk of the medium has any more. Chunks that it never had count for nothing.
  std::vector<uint64_t> remove(const uint8_t* keys, size_t n, uint32_t medium);
  void clear() noexcept;

  [[nodiscard]] size_t chunks() const noexcept { return chunks_.size(); }
  [[nodiscard]] size_t names() const noexcept { return uses_.size(); }  // each once for a medium

  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  // Clients choose keys: where one lies is a matter of chance to them.
  struct SeededHash {
    HashSeed seed;
    size_t operator()(const ChunkKey& key) const noexcept { return keyed_hash(key, seed); }
    size_t operator()(uint64_t word) const noexcept { return folded_product(word ^ seed.words[0], seed.words[1] | 1); }
  };
  template <typename Key, typename Value>
  using Table = std::unordered_map<Key, Value, SeededHash>;
  struct Chunk {
    std::vector<uint64_t> names;
    uint8_t media = 0;
  };
  [[nodiscard]] static uint64_t use_of(uint64_t name, uint32_t medium) noexcept;

  Table<ChunkKey, Chunk> chunks_;
  Table<uint64_t, uint32_t> uses_;
};

}  // namespace kvpool
