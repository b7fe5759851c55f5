// The longest hit of several columns, against a search of every end by each column's rule.
#include <algorithm>
#include <random>
#include <vector>

#include "shared_index/hit_needs.h"
#include "tests/harness.h"
#include "tests/remote_index/remote_table.h"

using namespace kvpool;
using kvpool::testing::packed;
using kvpool::testing::remote_key;
using kvpool::testing::RemoteTable;

namespace {

constexpr uint8_t EPOCH[16] = {9};
constexpr uint8_t DRAM_LEVEL = static_cast<uint8_t>(Tier::DRAM);
constexpr uint8_t SSD_LEVEL = static_cast<uint8_t>(Tier::SSD);
constexpr uint8_t PEER_LEVEL = static_cast<uint8_t>(Tier::PEER);
constexpr size_t CHUNKS = 24;

// Columns of keys, and the level of each; NO_LEVEL where nobody has the chunk.
struct Prompt {
  explicit Prompt(size_t columns)
      : shape{2048, {{1 << 20, 2048, 2048}}},
        mapping(Mapping::create("index", shape.total_bytes(), false).mapping),
        here(mapping, shape, EPOCH),
        elsewhere(2048),
        owner(*elsewhere.index.add_owner()),
        reader(IndexView::attach(mapping, elsewhere.reader)) {
    for (size_t number = 0; number < columns; ++number) {
      std::vector<ChunkKey> keys;
      for (size_t at = 0; at < CHUNKS; ++at) {
        keys.push_back(remote_key(id_of(number, at)));
      }
      bytes.push_back(packed(keys));
      levels.emplace_back(CHUNKS, NO_LEVEL);
    }
    for (const auto& column : bytes) {
      spans.emplace_back(column);
    }
  }
  static uint64_t id_of(size_t number, size_t at) { return number * CHUNKS + at; }

  void put(size_t number, size_t at, uint8_t level) {
    const uint64_t id = id_of(number, at);
    levels[number][at] = level;
    if (level == PEER_LEVEL) {
      elsewhere.insert(owner, remote_key(id));
    } else if (level != NO_LEVEL) {
      EXPECT(here.insert(remote_key(id), RecordId(1), 1 + id, {DRAM_REGION, static_cast<uint32_t>(id)}));
      here.set_tiers(remote_key(id), tier_bit(static_cast<Tier>(level)));
    }
  }
  void put_all(size_t number, uint8_t level) {
    for (size_t at = 0; at < CHUNKS; ++at) {
      put(number, at, level);
    }
  }
  [[nodiscard]] FoundHit find(const std::vector<size_t>& runs, size_t elsewhere_max, size_t end, bool is_here) const {
    return HitNeeds(runs, elsewhere_max).find(*reader, spans, end, is_here);
  }

  IndexShape shape;
  std::shared_ptr<Mapping> mapping;
  ChunkTable here;
  RemoteTable elsewhere;
  RemoteOwner owner;
  std::shared_ptr<const IndexView> reader;
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<std::vector<uint8_t>> levels;
  std::vector<std::span<const uint8_t>> spans;
};

size_t first_of(size_t run, size_t end) { return run == 0 ? 0 : end - std::min(run, end); }

// Whether a hit may end here: `chains`: by the chains alone.
bool may_end(const Prompt& prompt, const std::vector<size_t>& runs, size_t end, bool is_here, bool chains) {
  for (size_t number = 0; number < runs.size(); ++number) {
    for (size_t at = first_of(runs[number], end); at < end && !(chains && runs[number] != 0); ++at) {
      const uint8_t level = prompt.levels[number][at];
      if (level == NO_LEVEL || (is_here && level == PEER_LEVEL)) {
        return false;
      }
    }
  }
  return true;
}

size_t last_end(const Prompt& prompt, const std::vector<size_t>& runs, size_t end, bool is_here, bool chains) {
  while (!may_end(prompt, runs, end, is_here, chains)) {
    --end;
  }
  return end;
}

// By the definition.
FoundHit searched(const Prompt& prompt, const std::vector<size_t>& runs, size_t elsewhere_max, size_t most, bool is_here) {
  FoundHit hit;
  hit.chained = last_end(prompt, runs, most, is_here, true);
  const size_t end = last_end(prompt, runs, hit.chained, is_here, false);
  const bool has_chain = std::find(runs.begin(), runs.end(), size_t{0}) != runs.end();
  hit.levels.assign(end, has_chain ? uint8_t{0} : DRAM_LEVEL);
  size_t elsewhere = 0;
  for (size_t number = 0; number < runs.size(); ++number) {
    for (size_t at = first_of(runs[number], end); at < end; ++at) {
      const uint8_t level = prompt.levels[number][at];
      hit.levels[at] = std::max(hit.levels[at], level);
      elsewhere += runs[number] != 0 && level == PEER_LEVEL ? 1U : 0U;
    }
  }
  return elsewhere > elsewhere_max ? searched(prompt, runs, elsewhere_max, most, true) : hit;
}

bool is_equal(const FoundHit& one, const FoundHit& other) { return one.levels == other.levels && one.chained == other.chained; }

}  // namespace

TEST(a_plain_layout_is_one_chain) {
  Prompt prompt(1);
  EXPECT(is_equal(prompt.find({0}, 4, CHUNKS, false), {}));
  prompt.put(0, 0, DRAM_LEVEL);
  prompt.put(0, 1, SSD_LEVEL);
  prompt.put(0, 3, DRAM_LEVEL);
  EXPECT(is_equal(prompt.find({0}, 4, CHUNKS, false), {{DRAM_LEVEL, SSD_LEVEL}, 2}));
  EXPECT(is_equal(prompt.find({0}, 4, 1, false), {{DRAM_LEVEL}, 1}));
  EXPECT(is_equal(prompt.find({0}, 4, 0, false), {}));
}

TEST(a_hit_ends_where_a_window_was_stored_for) {
  Prompt prompt(2);
  prompt.put_all(0, DRAM_LEVEL);
  EXPECT(is_equal(prompt.find({0, 2}, 4, CHUNKS, false), {{}, CHUNKS}));
  prompt.put(1, 3, DRAM_LEVEL);
  prompt.put(1, 4, SSD_LEVEL);
  prompt.put(1, 9, DRAM_LEVEL);
  EXPECT(is_equal(prompt.find({0, 2}, 4, CHUNKS, false), {{DRAM_LEVEL, DRAM_LEVEL, DRAM_LEVEL, DRAM_LEVEL, SSD_LEVEL}, CHUNKS}));
  EXPECT(prompt.find({0, 2}, 4, 4, false).levels.empty());
  EXPECT(prompt.find({0, 1}, 4, CHUNKS, false).levels.size() == 10);
}

TEST(a_hit_with_too_much_elsewhere_is_one_of_this_node) {
  Prompt prompt(2);
  prompt.put_all(0, DRAM_LEVEL);
  prompt.put(1, 1, DRAM_LEVEL);
  prompt.put(1, 2, DRAM_LEVEL);
  prompt.put(1, 6, PEER_LEVEL);
  prompt.put(1, 7, PEER_LEVEL);
  EXPECT(prompt.find({0, 2}, 2, CHUNKS, false).levels.size() == 8);
  EXPECT(prompt.find({0, 2}, 1, CHUNKS, false).levels.size() == 3);
  EXPECT(prompt.find({0, 2}, 2, CHUNKS, true).levels.size() == 3);
}

TEST(random_hits_agree_with_a_search_of_every_end) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int round = 0; round < 500; ++round) {
    std::vector<size_t> runs(1 + random() % 5);
    for (size_t& run : runs) {
      run = random() % 2 == 0 ? 0 : 1 + random() % 9;
    }
    Prompt prompt(runs.size());
    const uint64_t density = 2 + random() % 60;
    for (size_t number = 0; number < runs.size(); ++number) {
      for (size_t at = 0; at < CHUNKS; ++at) {
        constexpr uint8_t LEVELS[] = {DRAM_LEVEL, DRAM_LEVEL, SSD_LEVEL, PEER_LEVEL};
        prompt.put(number, at, random() % density == 0 ? NO_LEVEL : LEVELS[random() % 4]);
      }
    }
    const size_t elsewhere_max = random() % 12;
    const size_t end = random() % (CHUNKS + 1);
    const bool is_here = random() % 3 == 0;
    EXPECT(is_equal(prompt.find(runs, elsewhere_max, end, is_here), searched(prompt, runs, elsewhere_max, end, is_here)));
  }
}

TEST(the_keys_of_a_hit_are_the_last_ones_of_each_column) {
  Prompt prompt(3);
  const HitNeeds needs({0, 2, 30}, 4);
  const auto keys_at = [&](size_t number, size_t first, size_t end) {
    return std::string(prompt.bytes[number].begin() + static_cast<std::ptrdiff_t>(first * KEY_BYTES),
                       prompt.bytes[number].begin() + static_cast<std::ptrdiff_t>(end * KEY_BYTES));
  };
  EXPECT(needs.keys_of(prompt.spans, 5, false) == keys_at(0, 0, 5) + keys_at(1, 3, 5) + keys_at(2, 0, 5));
  EXPECT(needs.keys_of(prompt.spans, 5, true) == keys_at(0, 4, 5) + keys_at(1, 3, 5) + keys_at(2, 0, 5));
  EXPECT(needs.keys_of(prompt.spans, 1, true) == keys_at(0, 0, 1) + keys_at(1, 0, 1) + keys_at(2, 0, 1));
  EXPECT(needs.keys_of(prompt.spans, 0, true).empty());
}
