// Words of slots as the directory keeps them: reused only after they were cleared, few in a large arena.
#include "tests/directory_pool.h"
#include "tests/harness.h"

using namespace kvpool;
using kvpool::testing::CHUNK;
using kvpool::testing::EXTENTS;
using kvpool::testing::Pool;
using kvpool::testing::range;

namespace {

constexpr uint64_t GIB = uint64_t{1} << 30;

std::vector<SlotAddress> addresses(const std::vector<uint64_t>& packed) {
  std::vector<SlotAddress> slots;
  for (const uint64_t slot : packed) {
    slots.push_back(SlotAddress::unpacked(slot));
  }
  return slots;
}

DirectoryGeometry plan_of(uint64_t capacity) {
  return *DirectoryGeometry::plan(capacity, 64 << 20, static_cast<uint32_t>(capacity >> 15));
}

}  // namespace

TEST(a_run_lent_to_another_class_has_no_state_of_its_former_chunks) {
  Pool pool(16 * CHUNK);
  EXPECT(pool.store(range(1, 16)) == 16);
  const Hold hold = pool.acquire(range(1, 16));
  const auto before = pool.directory.columns({hold.id});
  const auto old = addresses(before->slots);
  for (size_t chunk = 0; chunk < 16; ++chunk) {
    EXPECT(pool.view->generation_at(old[chunk]) == before->generations[chunk]);
    EXPECT(pool.view->checksum_at(old[chunk], 1) == chunk * EXTENTS + 2);
    EXPECT(pool.view->landed_at(old[chunk]) == EXTENTS);
  }
  EXPECT(kvpool::testing::drop(pool.directory, kvpool::testing::key_of(1)) == 16);
  for (const SlotAddress slot : old) {
    EXPECT(pool.view->generation_at(slot) == 0);
  }
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(slots_of_two_alternating_classes_share_no_words) {
  Pool pool(16 * CHUNK);
  const ClassId wide = *pool.directory.add_class(2 * CHUNK, 7);
  for (uint64_t round = 0; round < 6; ++round) {
    const ClassId size_class = round % 2 == 0 ? pool.small : wide;
    const uint32_t extents = round % 2 == 0 ? EXTENTS : 7;
    const size_t chunks = round % 2 == 0 ? 16 : 8;
    const auto keys = kvpool::testing::pack(range(100 * round + 1, chunks));
    const Reservation made = pool.directory.reserve(pool.owner, size_class, std::nullopt, keys.data(), chunks, ++pool.now);
    EXPECT(kvpool::testing::all_are(made.states, SaveState::RESERVED));
    const auto slots = addresses(made.slots);
    std::vector<uint32_t> sums(chunks * extents);
    for (size_t word = 0; word < sums.size(); ++word) {
      sums[word] = static_cast<uint32_t>(1000 * (round + 1) + word);
    }
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      EXPECT(pool.view->generation_at(slots[chunk]) == 0);
      EXPECT(pool.view->landed_at(slots[chunk]) == 0);
      EXPECT(pool.view->covers(slots[chunk], extents));
    }
    static_cast<void>(pool.directory.commit(made.id, 0, chunks, sums.data()));
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      EXPECT(pool.view->generation_at(slots[chunk]) == made.generations[chunk]);
      for (uint32_t extent = 0; extent < extents; ++extent) {
        EXPECT(pool.view->checksum_at(slots[chunk], extent) == sums[chunk * extents + extent]);
      }
      const auto entry = pool.view->find(ChunkKey::from_bytes(&keys[chunk * KEY_BYTES]));
      EXPECT(entry && entry->slot == slots[chunk] && entry->generation == made.generations[chunk]);
    }
    EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
    EXPECT(pool.is_sound());
  }
}

TEST(words_are_a_small_part_of_a_large_arena_and_layouts_fit_them) {
  const DirectoryGeometry large = plan_of(1024 * GIB);
  const uint64_t words = large.index.total_bytes() - large.index.table_end();
  std::printf("  1 TiB: table %.2f GB, words %.2f GB\n", static_cast<double>(large.index.table_end()) / 1e9,
              static_cast<double>(words) / 1e9);
  EXPECT(words < 1024 * GIB / 350);  // by page it was 1/146
  SlotArena arena(large.arena);
  // A chunk of 256 tokens of a model with one KV head a rank in 8 bits, of 16 tokens with 8 heads, of one latent head.
  for (const auto& [extent_bytes, extents] : {std::pair{64 << 10, 32U}, {32 << 10, 80U}, {9 << 10, 61U}, {2 << 10, 24U}}) {
    const uint64_t chunk_bytes = static_cast<uint64_t>(extent_bytes) * extents;
    EXPECT(arena.size_class(*arena.add_class(chunk_bytes, extents)).slot_bytes == round_up(chunk_bytes, PAGE_BYTES));
  }
  // A small arena has words for slots of a page, and one for each KiB of extents.
  const DirectoryGeometry small = *DirectoryGeometry::plan(GIB, 64 << 20, 1 << 18);
  EXPECT(small.arena.slot_bytes_min == PAGE_BYTES);
  EXPECT(small.arena.checksum_bytes_min == 1024);
  // So has a large arena for which many chunks are expected; where few are expected, no room is lost either.
  EXPECT(DirectoryGeometry::plan(64 * GIB, 64 << 20, 1 << 24)->arena.slot_bytes_min == PAGE_BYTES);
  EXPECT(DirectoryGeometry::plan(64 * GIB, 64 << 20, 1000)->arena.slot_bytes_min == 32 << 10);
  for (uint64_t capacity = 1 << 20; capacity <= ARENA_BYTES_MAX; capacity *= 2) {
    const auto most = std::min<uint64_t>(capacity / PAGE_BYTES, uint64_t{1} << 28);
    const auto geometry = DirectoryGeometry::plan(capacity, 64 << 20, static_cast<uint32_t>(most));
    EXPECT(geometry && geometry->index.valid());
    EXPECT(geometry->index.regions[DRAM_REGION].slots * geometry->arena.slot_bytes_min >= capacity);
  }
}
