// A reader of an index that says anything: it may answer anything, but ends, and touches nothing outside.
#include "fuzz_input.h"
#include "shared_index/chunk_table.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

// A region of a few pages that repeats the input's bytes, with a header that is right, or nearly.
std::shared_ptr<Mapping> make_region(Input& input, IndexShape& shape) {
  const bool is_right = input.number<uint8_t>() % 8 != 0;
  shape = {64 + input.up_to(500), (1 + input.up_to(40)) * PAGE_BYTES};
  const uint64_t size = is_right ? shape.total_bytes() : (1 + input.up_to(20)) * PAGE_BYTES;
  auto region = Mapping::create("fuzz-index", size, false).mapping;
  FUZZ_EXPECT(region != nullptr);
  IndexHeader header{};
  std::memcpy(header.magic, INDEX_MAGIC, sizeof(INDEX_MAGIC));
  header.version = INDEX_VERSION;
  header.slots = is_right ? shape.slots : input.awkward();
  header.seed = {{input.number<uint64_t>(), 7}};
  header.arena_bytes = is_right ? shape.arena_bytes : input.awkward() * PAGE_BYTES;
  header.moves = input.number<uint64_t>();
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
  IndexShape shape{};
  const auto region = make_region(input, shape);
  const auto index = IndexView::attach(region);
  if (index == nullptr) {
    return 0;
  }
  FUZZ_EXPECT(index->arena_bytes() % PAGE_BYTES == 0);
  const auto* header = reinterpret_cast<const IndexHeader*>(region->data());
  const IndexShape seen{header->slots, header->arena_bytes};
  FUZZ_EXPECT(seen.total_bytes() <= region->size());
  const auto keys = pick_keys(input, *region, seen.slots);
  const size_t count = keys.size() / KEY_BYTES;
  std::vector<uint8_t> levels(count, NO_LEVEL);
  const size_t found = index->lookup(keys.data(), count, levels.data());
  FUZZ_EXPECT(found <= count);
  for (size_t number = 0; number < count; ++number) {
    FUZZ_EXPECT((number < found) == (levels[number] < 8));
    const auto entry = index->find(ChunkKey::from_bytes(&keys[number * KEY_BYTES]));
    if (entry) {
      const uint64_t offset = uint64_t{entry->page.value()} * PAGE_BYTES;
      static_cast<void>(index->generation_at(offset));
      static_cast<void>(index->checksum_at(offset, input.number<uint32_t>()));
    }
  }
  for (int look = 0; look < 32; ++look) {
    const uint64_t offset = input.awkward();
    const auto layers = static_cast<uint32_t>(input.awkward());
    const bool is_covered = index->covers(offset, layers);
    FUZZ_EXPECT(!is_covered || (offset % PAGE_BYTES == 0 && offset < index->arena_bytes()));
    if (is_covered && layers > 0) {
      static_cast<void>(index->checksum_at(offset, layers - 1));
    }
    static_cast<void>(index->checksum_at(offset, layers));
    static_cast<void>(index->generation_at(offset));
  }
  static_cast<void>(index->count());
  FUZZ_EXPECT(index->epoch().size() == 16);
  return 0;
}
