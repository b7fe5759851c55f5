// Published blocks against a model: a name is what stands before a block, and is in a medium as long as a chunk there has it.
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "records/published_blocks.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint32_t BLOCKS = 3, BLOCK_TOKENS = 2, MEDIA = 3;
constexpr size_t CHUNK_TOKENS = BLOCKS * BLOCK_TOKENS;

using Key = std::array<uint8_t, KEY_BYTES>;

Key key_of(uint64_t number) {
  Key key{};
  for (size_t at = 0; at < KEY_BYTES; ++at) {
    key[at] = static_cast<uint8_t>(number * 0x9E3779B97F4A7C15ull >> (at % 8 * 8));
  }
  return key;
}

struct Chunk {
  Key key;
  Key before;
  std::vector<int32_t> tokens;
  std::vector<uint64_t> names;
};

// What a block's name stands for: all before the chunk, and the chunk's tokens up to its end.
using Place = std::tuple<Key, std::vector<int32_t>>;

Place place_of(const Chunk& chunk, uint32_t block) {
  return {chunk.before, {chunk.tokens.begin(), chunk.tokens.begin() + (block + 1) * BLOCK_TOKENS}};
}

}  // namespace

TEST(names_are_in_a_medium_as_long_as_a_chunk_there_has_them) {
  std::mt19937_64 random(seed());
  const auto draw = [&random](uint64_t end) { return random() % end; };
  PublishedBlocks published;
  std::vector<Chunk> chunks;
  std::map<Place, uint64_t> name_of;
  std::set<uint64_t> taken;
  for (uint64_t number = 0; number < 40; ++number) {  // few tokens and few parents: most fork inside a chunk
    Chunk chunk{key_of(100 + number), number < 8 ? key_of(draw(2)) : chunks[draw(8)].key, {}, {}};
    for (size_t at = 0; at < CHUNK_TOKENS; ++at) {
      chunk.tokens.push_back(static_cast<int32_t>(draw(2)));
    }
    chunks.push_back(chunk);
  }
  std::vector<std::set<size_t>> truth(MEDIA);
  std::vector<std::set<uint64_t>> known(MEDIA);
  for (int step = 0; step < 2000; ++step) {
    const size_t which = draw(chunks.size());
    const auto medium = static_cast<uint32_t>(draw(MEDIA));
    Chunk& chunk = chunks[which];
    if (draw(2) == 0) {
      chunk.names = published.add(chunk.key.data(), 1, chunk.before.data(), chunk.tokens, BLOCKS, medium);
      EXPECT(chunk.names.size() == BLOCKS);
      for (uint32_t block = 0; block + 1 < BLOCKS; ++block) {
        const auto [at, is_new] = name_of.emplace(place_of(chunk, block), chunk.names[block]);
        EXPECT(at->second == chunk.names[block]);  // one name for one place
        EXPECT(!is_new || taken.insert(chunk.names[block]).second);  // and no other place has it
      }
      known[medium].insert(chunk.names.begin(), chunk.names.end());
      truth[medium].insert(which);
    } else {
      for (const uint64_t name : published.remove(chunk.key.data(), 1, medium)) {
        EXPECT(known[medium].erase(name) == 1);
      }
      truth[medium].erase(which);
    }
    std::set<uint64_t> there;
    for (const size_t stored : truth[medium]) {
      there.insert(chunks[stored].names.begin(), chunks[stored].names.end());
    }
    EXPECT(known[medium] == there);
    EXPECT(published.verify().empty());
  }
  published.clear();
  EXPECT(published.chunks() == 0 && published.names() == 0);
}

TEST(keys_with_one_end_take_nothing_from_each_other) {
  PublishedBlocks published;
  Key first = key_of(5), second = key_of(6);
  std::copy(first.begin() + 24, first.end(), second.begin() + 24);
  const std::vector<int32_t> tokens(CHUNK_TOKENS, 1), longer(2 * CHUNK_TOKENS, 2);
  const std::vector<uint64_t> mine = published.add(first.data(), 1, key_of(1).data(), tokens, BLOCKS, 0);
  const std::vector<uint64_t> others = published.add(second.data(), 1, key_of(2).data(), longer, 2 * BLOCKS, 0);
  EXPECT(mine.size() == BLOCKS && others.size() == 2 * BLOCKS && mine.back() == others.back());
  EXPECT(published.remove(second.data(), 1, 0) == std::vector<uint64_t>(others.begin(), others.end() - 1));
  EXPECT(published.remove(first.data(), 1, 0) == mine);
  EXPECT(published.verify().empty() && published.names() == 0);
}

TEST(a_chain_has_the_names_of_its_chunks_one_by_one) {
  PublishedBlocks whole, single;
  const Key before = key_of(1);
  const std::vector<Key> keys{key_of(2), key_of(3)};
  std::vector<uint8_t> packed;
  std::vector<int32_t> tokens;
  for (const Key& key : keys) {
    packed.insert(packed.end(), key.begin(), key.end());
    for (size_t at = 0; at < CHUNK_TOKENS; ++at) {
      tokens.push_back(static_cast<int32_t>(7 * at));
    }
  }
  std::vector<uint64_t> names = single.add(keys[0].data(), 1, before.data(), std::span(tokens).first(CHUNK_TOKENS), BLOCKS, 0);
  const std::vector<uint64_t> more =
      single.add(keys[1].data(), 1, keys[0].data(), std::span(tokens).last(CHUNK_TOKENS), BLOCKS, 0);
  names.insert(names.end(), more.begin(), more.end());
  EXPECT(whole.add(packed.data(), 2, before.data(), tokens, BLOCKS, 0) == names);
  EXPECT(whole.remove(packed.data(), 2, 1).empty());  // a medium that never had them
  EXPECT(whole.remove(packed.data(), 2, 0) == names);
  EXPECT(whole.chunks() == 0 && whole.names() == 0);
}
