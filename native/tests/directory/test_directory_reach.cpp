// Keys that crowd one place of the shared table: others are stored all the same, at the cost of an idle chunk.
#include "tests/directory/directory_tiers.h"
#include "tests/table_keys.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint32_t CHUNKS = 400;
constexpr uint64_t HOME = 90;

const IndexHeader& header_of(const Pool& pool) { return *reinterpret_cast<const IndexHeader*>(pool.index->data()); }

// Somebody has read the seed.
ChunkKey crowding(const Pool& pool, uint64_t id, uint64_t home = HOME) {
  return key_at(home, id, header_of(pool).slots, header_of(pool).seed);
}

std::vector<uint8_t> bytes_of(const std::vector<ChunkKey>& keys) {
  std::vector<uint8_t> packed(keys.size() * KEY_BYTES);
  std::memcpy(packed.data(), keys.data(), packed.size());
  return packed;
}

Reservation reserve(Pool& pool, const std::vector<ChunkKey>& keys, const std::optional<ChunkKey>& parent = std::nullopt) {
  return pool.directory.reserve(pool.owner, pool.small, parent, bytes_of(keys).data(), keys.size(), ++pool.now);
}

bool store(Pool& pool, const std::vector<ChunkKey>& keys, const std::optional<ChunkKey>& parent = std::nullopt) {
  const Reservation made = reserve(pool, keys, parent);
  if (!all_are(made.states, SaveState::RESERVED)) {
    return false;
  }
  const std::vector<uint32_t> sums(keys.size() * EXTENTS, 1);
  const bool is_stored = all_are(pool.directory.commit(made.id, 0, keys.size(), sums.data()), SaveState::STORED);
  return pool.directory.end_reservation(made.id, ++pool.now) && is_stored;
}

std::vector<ChunkKey> crowd(Pool& pool) {
  std::vector<ChunkKey> keys;
  for (uint64_t id = 1; id <= MAX_PROBE; ++id) {
    keys.push_back(crowding(pool, id));
    EXPECT(store(pool, {keys.back()}));
  }
  return keys;
}

}  // namespace

TEST(a_crowded_key_takes_the_slot_of_the_coldest_idle_chunk) {
  Pool pool(CHUNKS * CHUNK, CHUNKS);
  const std::vector<ChunkKey> keys = crowd(pool);
  for (uint64_t id = 500; id < 600; ++id) {
    EXPECT(store(pool, {crowding(pool, id, HOME + id % 200)}));
  }
  EXPECT(store(pool, {crowding(pool, 1000)}));
  EXPECT(pool.directory.stats().evicted_chunks >= 1);
  EXPECT(!pool.directory.place_of(keys[0]));
  EXPECT(pool.directory.place_of(keys[100]));
  EXPECT(pool.is_sound());
  for (uint64_t id = 1001; id < 1300; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
  }
  EXPECT(pool.is_sound());
}

TEST(raised_priorities_are_crowded_out_last) {
  Pool pool(CHUNKS * CHUNK, CHUNKS);
  const std::vector<ChunkKey> keys = crowd(pool);
  pool.directory.retention().ledger().cap(1.0);
  const std::vector<ChunkKey> kept(keys.begin(), keys.begin() + 200);
  const auto states = pool.directory.retention().retain(pool.owner, bytes_of(kept).data(), std::vector<Retention>(200, {90, 0}), ++pool.now);
  EXPECT(all_are(states, SaveState{0}));
  for (uint64_t id = 1001; id < 1057; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
  }
  EXPECT(pool.directory.place_of(keys[0]));
  EXPECT(!pool.directory.place_of(keys[255]));
  EXPECT(pool.is_sound());
}

TEST(held_chunks_are_not_crowded_out) {
  Pool pool(CHUNKS * CHUNK, CHUNKS);
  const std::vector<ChunkKey> keys = crowd(pool);
  std::vector<HoldId> holds;
  for (const ChunkKey& key : keys) {
    holds.push_back(pool.directory.acquire(pool.owner, bytes_of({key}).data(), 1).id);
  }
  const Reservation made = reserve(pool, {crowding(pool, 1000)});
  EXPECT(all_are(made.states, SaveState::FULL));
  EXPECT(pool.directory.stats().chunks == MAX_PROBE);
  EXPECT(pool.directory.release(holds[9], ++pool.now));
  EXPECT(store(pool, {crowding(pool, 1000)}));
  EXPECT(!pool.directory.place_of(keys[9]));
  EXPECT(pool.is_sound());
}

TEST(a_chain_is_crowded_out_from_its_leaf) {
  Pool pool(CHUNKS * CHUNK, CHUNKS);
  std::vector<ChunkKey> chain;
  for (uint64_t id = 1; id <= MAX_PROBE; ++id) {
    chain.push_back(crowding(pool, id));
  }
  EXPECT(store(pool, chain));
  EXPECT(store(pool, {crowding(pool, 1000)}));
  EXPECT(!pool.directory.place_of(chain.back()));
  EXPECT(pool.directory.stats().evicted_chunks == 1);
  EXPECT(pool.is_sound());
}

TEST(chunks_with_followers_elsewhere_are_crowded_out_with_them) {
  Pool pool(CHUNKS * CHUNK, CHUNKS);
  for (uint64_t id = 1; id <= MAX_PROBE; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
  }
  for (uint64_t id = 1; id <= 140; ++id) {
    EXPECT(store(pool, {crowding(pool, 5000 + id, HOME + 270 + id)}, crowding(pool, id)));
  }
  for (uint64_t id = 1001; id < 1001 + MAX_PROBE; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
  }
  EXPECT(pool.is_sound());
}

TEST(a_slot_that_was_taken_for_nothing_is_freed) {
  Pool pool(MAX_PROBE * CHUNK, CHUNKS);
  const std::vector<ChunkKey> keys = crowd(pool);
  std::vector<HoldId> holds;
  for (size_t index = 1; index < keys.size(); ++index) {
    holds.push_back(pool.directory.acquire(pool.owner, bytes_of({keys[index]}).data(), 1).id);
  }
  const ClassId large = *pool.directory.add_class(8 * CHUNK, EXTENTS);
  const ChunkKey late = crowding(pool, 1000);
  const Reservation made = pool.directory.reserve(pool.owner, large, std::nullopt, bytes_of({late}).data(), 1, ++pool.now);
  EXPECT(all_are(made.states, SaveState::FULL));
  EXPECT(!pool.view->find(late));
  EXPECT(pool.is_sound());
}

TEST(a_chunk_that_only_the_lower_tier_has_is_crowded_out_there) {
  Tiers tiers(CHUNKS, 600);
  Pool& pool = tiers.memory;
  for (uint64_t id = 1; id <= MAX_PROBE; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
    EXPECT(tiers.demote(true, true) == 1);
  }
  EXPECT(store(pool, {crowding(pool, 1000)}));  // with the second copy of what goes
  EXPECT(tiers.is_sound());
  EXPECT(tiers.files.stats().chunks == MAX_PROBE - 1);
  static_cast<void>(flush(pool.directory, std::nullopt, UINT64_MAX));
  EXPECT(tiers.is_sound());
  for (uint64_t id = 1001; id < 1011; ++id) {
    EXPECT(store(pool, {crowding(pool, id)}));
  }
  EXPECT(tiers.is_sound());
  EXPECT(tiers.files.take_departed().size() == MAX_PROBE - tiers.files.stats().chunks);
}

TEST(a_protected_chunk_is_evicted_only_after_its_demotion) {
  Tiers tiers(CHUNKS, 600);
  const std::vector<ChunkKey> keys = crowd(tiers.memory);
  tiers.memory.directory.room().protect_unsaved(true);
  const Reservation made = reserve(tiers.memory, {crowding(tiers.memory, 1000)});
  EXPECT(all_are(made.states, SaveState::NOT_READY));
  EXPECT(tiers.demote() > 0);
  EXPECT(store(tiers.memory, {crowding(tiers.memory, 1000)}));
  EXPECT(tiers.is_sound());
}

// Each tier's table has a seed of its own: what crowds one of them does not crowd the other.
TEST(a_lower_tier_with_a_table_of_its_own_makes_room_in_that_one) {
  Pool upper(CHUNKS * CHUNK, 4 * CHUNKS);
  const DirectoryGeometry geometry = *DirectoryGeometry::plan(CHUNKS * CHUNK, 64 << 20, CHUNKS, 0);
  const std::shared_ptr<Mapping> index = Mapping::create("index", geometry.index.total_bytes(), false).mapping;
  Directory below(nullptr, index, geometry, EPOCH, Tier::SSD);
  const TierSet set({&upper.directory, &below});
  const NamespaceId owner = below.add_namespace();
  const ClassId size_class = *below.add_class(CHUNK, EXTENTS);
  for (uint32_t segment = 0; segment < geometry.arena.segments; ++segment) {
    below.mark_segment_ready(segment);
  }
  const auto& header = *reinterpret_cast<const IndexHeader*>(index->data());
  uint64_t now = 0;
  std::vector<ChunkKey> keys;
  for (uint64_t id = 1; id <= MAX_PROBE + 10; ++id) {
    keys.push_back(key_at(HOME, id, header.slots, header.seed));
    const Reservation made = below.reserve(owner, size_class, std::nullopt, bytes_of({keys.back()}).data(), 1, ++now);
    EXPECT(all_are(made.states, SaveState::RESERVED));
    const std::vector<uint32_t> sums(EXTENTS, 1);
    EXPECT(made.id != 0 && all_are(below.commit(made.id, 0, 1, sums.data()), SaveState::STORED));
    EXPECT(below.end_reservation(made.id, ++now));
    EXPECT(below.verify().empty() && upper.is_sound());
  }
  EXPECT(below.stats().chunks == MAX_PROBE);
  EXPECT(!below.place_of(keys[0]) && !upper.view->find(keys[0]));
  EXPECT(below.place_of(keys[10]) && upper.view->find(keys[10]));
}

TEST(rows_whose_keys_are_out_of_reach_are_not_restored) {
  Tiers tiers(CHUNKS, 600);
  Pool& pool = tiers.memory;
  const std::vector<ChunkKey> keys = crowd(pool);
  const auto restore = [&](const ChunkKey& key, uint64_t number, const std::optional<ChunkKey>& parent = std::nullopt) {
    const uint64_t pages = FILE_SLOT / PAGE_BYTES;
    const PageIndex page(number * pages);
    return tiers.files.restore(pool.owner, tiers.in_files, parent, key, page, 1000 + number, {60, 0}, ++pool.now);
  };
  const ChunkKey late = crowding(pool, 1000);
  EXPECT(!restore(late, 0));
  EXPECT(!restore(crowding(pool, 1001, HOME + 270), 1, late));
  EXPECT(restore(keys[0], 0));  // its entry is there
  EXPECT(restore(crowding(pool, 1002, HOME + 270), 1, keys[0]));
  EXPECT(tiers.is_sound());
  EXPECT(pool.directory.stats().chunks == MAX_PROBE);
  EXPECT(drop(pool.directory, keys[9]) == 1);
  EXPECT(restore(late, 2));
  EXPECT(!restore(crowding(pool, 1003), 3));
  tiers.files.finish_restore();
  EXPECT(tiers.is_sound());
  EXPECT(tiers.files.stats().chunks == 3);
  EXPECT(store(pool, {crowding(pool, 1003)}));
  EXPECT(tiers.is_sound());
}
