// A reader of an index with arbitrary content: it may answer anything, but ends, and reads nothing outside.
#include <algorithm>

#include "fuzz_input.h"
#include "shared_index/chunk_table.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

constexpr Tier TIERS[] = {Tier::HBM, Tier::DRAM, Tier::SSD, Tier::PEER};

IndexShape make_shape(Input& input) {
  IndexShape shape{64 + input.up_to(500), {}};
  for (uint64_t count = 1 + input.up_to(3); count > 0; --count) {
    shape.regions.push_back({(1 + input.up_to(40)) * PAGE_BYTES, 1 + input.up_to(40), 1 + input.up_to(200),
                             TIERS[input.up_to(1)], Backing::MEMFD});
  }
  return shape;
}

// A region of a few pages that repeats the input's bytes, with a header that is right, or nearly.
std::shared_ptr<Mapping> make_region(Input& input) {
  const bool is_right = input.number<uint8_t>() % 8 != 0;
  const IndexShape shape = make_shape(input);
  const IndexLayout layout = shape.layout();
  const uint64_t size = is_right ? layout.total_bytes : (1 + input.up_to(20)) * PAGE_BYTES;
  auto region = Mapping::create("fuzz-index", size, false).mapping;
  FUZZ_EXPECT(region != nullptr);
  IndexHeader header{};
  std::memcpy(header.magic, INDEX_MAGIC, sizeof(INDEX_MAGIC));
  header.version = INDEX_VERSION;
  header.slots = shape.slots;
  header.regions = static_cast<uint32_t>(layout.regions.size());
  header.further_offset = layout.further_offset;
  header.seed = {{input.number<uint64_t>(), 7}};
  header.moves = input.number<uint64_t>();
  std::copy(layout.regions.begin(), layout.regions.end(), header.region);
  if (!is_right) {
    // One number of the header, which may be any of its regions', is something else.
    uint64_t* const numbers[] = {&header.slots,
                                 &header.further_offset,
                                 &header.region[0].bytes,
                                 &header.region[0].slots,
                                 &header.region[0].checksums,
                                 &header.region[0].words_offset,
                                 &header.region[0].checksums_offset};
    *numbers[input.up_to(6)] = input.awkward();
    header.regions = input.number<uint8_t>() % 4 == 0 ? input.number<uint32_t>() : header.regions;
    header.region[0].tier = input.number<uint8_t>() % 4 == 0 ? input.number<uint8_t>() : header.region[0].tier;
  }
  const auto pattern = input.bytes(2048);
  if (!pattern.empty()) {
    for (uint64_t at = 0; at < region->size(); at += pattern.size()) {
      std::memcpy(region->data() + at, pattern.data(), std::min<uint64_t>(pattern.size(), region->size() - at));
    }
  }
  std::memcpy(region->data(), &header, sizeof(header));
  return region;
}

// Keys that stand in the table, or that lead to them.
std::vector<uint8_t> pick_keys(Input& input, const Mapping& region, uint64_t slots) {
  std::vector<uint8_t> keys;
  const uint64_t count = 1 + input.up_to(40);
  for (uint64_t number = 0; number < count; ++number) {
    ChunkKey key{{input.number<uint64_t>(), 0, 0, 0}};
    if (input.number<uint8_t>() % 2 == 0) {
      const uint64_t at = PAGE_BYTES + input.up_to(slots - 1) * sizeof(TableSlot) + offsetof(TableSlot, key);
      std::memcpy(key.words, region.data() + at, KEY_BYTES);
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(key.words);
    keys.insert(keys.end(), bytes, bytes + KEY_BYTES);
  }
  return keys;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const auto region = make_region(input);
  const auto index = IndexView::attach(region);
  if (index == nullptr) {
    return 0;
  }
  const IndexShape& seen = index->shape();
  FUZZ_EXPECT(seen.valid());
  FUZZ_EXPECT(seen.table_end() <= region->size());
  const auto keys = pick_keys(input, *region, seen.slots);
  const size_t count = keys.size() / KEY_BYTES;
  std::vector<uint8_t> levels(count, NO_LEVEL);
  const size_t found = index->lookup(keys.data(), count, levels.data());
  FUZZ_EXPECT(found <= count);
  const auto look_at = [&](SlotAddress slot) {
    const auto extents = static_cast<uint32_t>(input.awkward());
    const bool is_covered = index->covers(slot, extents);
    FUZZ_EXPECT(!is_covered || seen.has(slot));
    FUZZ_EXPECT(seen.has(slot) == (index->landing_word(slot) != nullptr));
    static_cast<void>(index->checksum_at(slot, is_covered && extents > 0 ? extents - 1 : extents));
    FUZZ_EXPECT(seen.has(slot) || index->generation_at(slot) == 0);
    static_cast<void>(index->landed_at(slot));
  };
  for (size_t number = 0; number < count; ++number) {
    FUZZ_EXPECT((number < found) == (levels[number] < 8));
    const ChunkKey key = ChunkKey::from_bytes(&keys[number * KEY_BYTES]);
    if (const auto entry = index->find(key)) {
      look_at(entry->slot);
    }
    for (const Tier tier : TIERS) {
      if (const auto residency = index->residency(key, tier)) {
        look_at(residency->slot);
      }
    }
  }
  for (int look = 0; look < 32; ++look) {
    look_at(SlotAddress::unpacked(input.number<uint8_t>() % 2 == 0 ? input.awkward() : input.up_to(300)));
  }
  static_cast<void>(index->count());
  FUZZ_EXPECT(index->epoch().size() == 16);
  return 0;
}
