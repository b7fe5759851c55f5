// Any bytes in the index and the records of a former life, sealed as they should be or not: what is taken over is sound, and can be used.
#include "fuzz_input.h"

#include "tests/directory/random_life.h"

using namespace kvpool;
using namespace kvpool::testing;
using kvpool::fuzzing::Input;

namespace {

constexpr uint32_t MAX_CHUNKS = 64;

// Makes all checksums right, so that what they protect is read.
void seal_all(const KeptRegion& region) {
  const auto* const records = reinterpret_cast<const ChunkRecord*>(region.records());
  for (uint32_t id = 0; id < MAX_CHUNKS; ++id) {
    RecordSeal& seal = region.seals()[id];
    seal.crc = seal_of(records[id], RecordId(id), seal.parent < MAX_CHUNKS ? records[seal.parent].generation : 0);
  }
  for (uint32_t segment = 0; segment < region.shape().segments; ++segment) {
    region.runs()[segment].crc = crc_of(region.runs()[segment], segment);
  }
}

void change(Input& input, const Pool& former, const KeptRegion& region) {
  const auto records_bytes = MAX_CHUNKS * sizeof(ChunkRecord);
  for (uint64_t left = input.up_to(32); left > 0; --left) {
    const uint64_t choice = input.up_to(7);
    if (choice == 0) {
      former.index->data()[input.number<uint64_t>() % former.index->size()] = input.number<uint8_t>();
    } else if (choice == 1) {
      former.records->data()[input.number<uint64_t>() % former.records->size()] = input.number<uint8_t>();
    } else if (choice == 2) {
      region.seals()[input.up_to(MAX_CHUNKS - 1)].parent = static_cast<uint32_t>(input.awkward());
    } else if (choice == 3) {
      auto* const run = reinterpret_cast<uint32_t*>(&region.runs()[input.up_to(region.shape().segments - 1)]);
      run[input.up_to(5)] = static_cast<uint32_t>(input.awkward());
    } else {
      auto* const words = reinterpret_cast<uint32_t*>(region.records());
      words[input.number<uint16_t>() % (records_bytes / sizeof(uint32_t))] = static_cast<uint32_t>(input.awkward());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const DirectoryGeometry geometry = *DirectoryGeometry::plan(48 * CHUNK, 4 * CHUNK, MAX_CHUNKS);
  const auto policy = input.up_to(1) != 0 ? PolicyKind::CLASS_QUEUES : PolicyKind::LRU;
  const auto former = new_life(geometry, nullptr, policy);
  make_ready(*former);
  RandomLife life(*former, input.number<uint64_t>());
  for (uint64_t steps = input.up_to(100); steps > 0; --steps) {
    life.step();
  }
  const auto index = copy_of(*former->index);
  const auto records = copy_of(*former->records);
  const KeptRegion region(former->records, geometry.kept());
  change(input, *former, region);
  if (input.up_to(3) != 0) {
    seal_all(region);
  }
  const auto next = new_life(geometry, former->arena, policy);
  if (FormerLife::why_refused(former->index, former->records, geometry) == nullptr) {
    const FormerCounts counts = take_over(*next, *former);
    FUZZ_EXPECT(counts.taken == next->directory.stats().chunks && counts.withheld == next->directory.stats().withheld);
    FUZZ_EXPECT(next->is_sound());
  }
  make_ready(*next);
  if (next->directory.arena().class_count() < SlotArena::MAX_CLASSES) {
    RandomLife more(*next, input.number<uint64_t>());
    for (uint64_t steps = input.up_to(60); steps > 0; --steps) {
      more.step();
    }
    FUZZ_EXPECT(next->is_sound());
  }
  while (!next->directory.withheld().by_holder().empty()) {
    const HolderId holder(next->directory.withheld().by_holder().begin()->first);
    FUZZ_EXPECT(next->directory.release_withheld(holder) > 0);
  }
  FUZZ_EXPECT(next->is_sound());
  // The former life, which has its own memory back, ends as if nothing had been.
  std::memcpy(former->index->data(), index->data(), index->size());
  std::memcpy(former->records->data(), records->data(), records->size());
  FUZZ_EXPECT(former->is_sound());
  return 0;
}
