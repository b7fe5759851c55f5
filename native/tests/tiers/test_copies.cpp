// Copies in a device: there while memory has the chunk, found at level 0, gone before the chunk is.
#include "tests/tiers/device_pool.h"

#include <tuple>

#include "directory/flush_walk.h"
#include "tests/harness.h"
#include "tests/table_keys.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint8_t HBM = tier_bit(Tier::HBM);
constexpr uint8_t DRAM = tier_bit(Tier::DRAM);
constexpr uint8_t SSD = tier_bit(Tier::SSD);

bool has(const Directory& tier, uint64_t id) { return tier.place_of(key_of(id)).has_value(); }

std::vector<uint8_t> states_of(const Reservation& made, std::vector<SaveState> states) {
  std::vector<uint8_t> expected;
  for (const SaveState state : states) {
    expected.push_back(static_cast<uint8_t>(state));
  }
  return made.states == expected ? made.states : std::vector<uint8_t>{};
}

}  // namespace

TEST(a_copy_is_found_at_level_0_with_its_words) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 4)) == 4);
  EXPECT(pool.copy(range(1, 3)) == 3);
  EXPECT(pool.levels(range(1, 4)) == std::vector<uint8_t>({0, 0, 0, 1}));
  const Hold hold = pool.memory.acquire(range(1, 4));
  EXPECT(pool.memory.directory.columns({hold.id})->levels == std::vector<uint8_t>({0, 0, 0, 1}));
  const Columns copies = *pool.memory.directory.copies({hold.id});
  EXPECT(copies.levels == std::vector<uint8_t>({0, 0, 0, NO_LEVEL}));
  EXPECT(copies.generations[3] == 0);
  for (size_t index = 0; index < 3; ++index) {
    const SlotAddress slot = SlotAddress::unpacked(copies.slots[index]);
    EXPECT(slot.region == DEVICE_REGION);
    EXPECT(pool.memory.view->generation_at(slot) == copies.generations[index] && copies.generations[index] != 0);
    EXPECT(pool.memory.view->residency(key_of(1 + index), Tier::HBM) == Residency{copies.generations[index], slot});
    EXPECT(pool.memory.view->checksum_at(slot, 1) == index * EXTENTS + 2);
    EXPECT(copies.offsets[index] == pool.device.place_of(key_of(1 + index))->offset);
  }
  EXPECT(!pool.memory.directory.copies({hold.id + 1}));
  EXPECT(pool.is_sound());
  EXPECT(pool.memory.directory.release(hold.id, ++pool.memory.now));
}

TEST(a_device_is_planned_in_whole_segments) {
  const auto planned = DirectoryGeometry::plan_device(5 * HUGE_PAGE_BYTES + 1, 2 * HUGE_PAGE_BYTES, 7);
  EXPECT(planned && planned->arena.segments == 2 && planned->capacity == 4 * HUGE_PAGE_BYTES);
  EXPECT(!DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, 7));
  EXPECT(!DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, PAGE_BYTES, 7));
  EXPECT(!DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, 0));
  EXPECT(DirectoryGeometry::plan(CHUNK, CHUNK, 1)->index.regions.size() == 1);  // without a device
}

TEST(copies_need_an_index_planned_for_the_device) {
  DevicePool pool(16, 16);
  const auto other = *DirectoryGeometry::plan_device(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, 16);
  EXPECT(CopyLink::why_refused(pool.memory.directory, pool.device_geometry) != nullptr);  // it has some already
  EXPECT(CopyLink::why_refused(pool.files, pool.device_geometry) != nullptr);
  Pool plain(16 * CHUNK);
  EXPECT(CopyLink::why_refused(plain.directory, pool.device_geometry) != nullptr);
  Pool for_other(16 * CHUNK, 1000, true, 64 << 20, PolicyKind::LRU, 0, &other);
  EXPECT(CopyLink::why_refused(for_other.directory, pool.device_geometry) != nullptr);
  EXPECT(CopyLink::why_refused(for_other.directory, other) == nullptr);
  EXPECT(TierSet::why_refused({&pool.device}) != nullptr);
}

TEST(a_copy_is_reserved_only_of_what_memory_has_behind_the_same_chunk) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.memory.store(range(4, 1), 1) == 1);
  EXPECT(!states_of(pool.reserve(pool.device, {8}), {SaveState::NO_PARENT}).empty());
  EXPECT(!states_of(pool.reserve(pool.device, {2}), {SaveState::NO_PARENT}).empty());  // it is no root
  EXPECT(!states_of(pool.reserve(pool.device, {2}, 1), {SaveState::NO_PARENT}).empty());  // its parent has no copy
  const Reservation writing = pool.memory.reserve({9});
  EXPECT(!states_of(pool.reserve(pool.device, {9}), {SaveState::NO_PARENT}).empty());  // it is not stored yet
  EXPECT(pool.memory.directory.end_reservation(writing.id, ++pool.memory.now));
  const ClassId large = *pool.device.add_class(2 * CHUNK, EXTENTS);
  const auto wrong = pool.device.reserve(pool.memory.owner, large, std::nullopt, pack({1}).data(), 1, ++pool.memory.now);
  EXPECT(!states_of(wrong, {SaveState::FOREIGN}).empty());
  const NamespaceId other = pool.device.add_namespace();
  const auto foreign = pool.device.reserve(other, pool.memory.small, std::nullopt, pack({1}).data(), 1, ++pool.memory.now);
  EXPECT(!states_of(foreign, {SaveState::FOREIGN}).empty());
  const Reservation made = pool.reserve(pool.device, {1, 4, 2});
  EXPECT(!states_of(made, {SaveState::RESERVED, SaveState::RESERVED, SaveState::NO_PARENT}).empty());  // 2 does not follow 4
  EXPECT(pool.device.end_reservation(made.id, ++pool.memory.now));
  EXPECT(pool.device.stats().used_bytes == 0);
  EXPECT(pool.is_sound());
}

TEST(what_is_dropped_while_it_is_copied_is_not_published) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  const Reservation made = pool.reserve(pool.device, range(1, 3));
  const auto sources = pool.sources(made, range(1, 3));
  EXPECT(drop(pool.memory.directory, key_of(2)) == 2);
  EXPECT(pool.is_sound());
  EXPECT(pool.memory.store(range(1, 3)) == 3);  // with other generations
  const auto states = pool.commit(pool.device, made, sources);
  EXPECT(states == std::vector<uint8_t>({static_cast<uint8_t>(SaveState::STORED), static_cast<uint8_t>(SaveState::EXPIRED),
                                         static_cast<uint8_t>(SaveState::EXPIRED)}));
  EXPECT(pool.levels(range(1, 3)) == std::vector<uint8_t>({0, 1, 1}));
  EXPECT(pool.device.end_reservation(made.id, ++pool.memory.now));
  EXPECT(pool.device.stats().used_bytes == CHUNK);
  EXPECT(pool.copy(range(1, 3)) == 2);
  EXPECT(pool.is_sound());
}

TEST(a_copy_of_another_generation_is_not_published) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store({1}) == 1);
  const Reservation made = pool.reserve(pool.device, {1});
  EXPECT(all_are(pool.commit(pool.device, made, {pool.sources(made, {1})[0] + 1}), SaveState::EXPIRED));
  EXPECT(pool.shown(1) == DRAM);
  EXPECT(pool.device.end_reservation(made.id, ++pool.memory.now));
  EXPECT(pool.is_sound());
}

TEST(a_chunk_takes_its_copy_along_whatever_makes_it_leave) {
  DevicePool pool(4, 16);
  EXPECT(pool.memory.store(range(1, 4)) == 4);
  EXPECT(pool.copy(range(1, 4)) == 4);
  EXPECT(pool.memory.store({11}) == 1);  // evicts 4
  EXPECT(!has(pool.device, 4) && pool.shown(4) == 0 && pool.shown(3) == (HBM | DRAM));
  EXPECT(pool.memory.directory.stats().evicted_chunks == 1 && pool.memory.directory.stats().shed_chunks == 0);
  EXPECT(drop(pool.memory.directory, key_of(3)) == 1);
  EXPECT(!has(pool.device, 3));
  EXPECT(pool.memory.directory.discard(key_of(2)) == 1);
  EXPECT(!has(pool.device, 2));
  EXPECT(flush(pool.memory.directory, std::nullopt, UINT64_MAX).chunks == 2);
  EXPECT(pool.device.stats().chunks == 0 && pool.device.stats().used_bytes == 0);
  EXPECT(pool.device.stats().withdrawn_chunks == 4 && pool.memory.view->count() == 0);
  EXPECT(pool.is_sound());
}

TEST(a_held_chunk_that_is_dropped_takes_its_copy_along) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.copy(range(1, 3)) == 3);
  const Hold hold = pool.memory.acquire(range(1, 3));
  EXPECT(drop(pool.memory.directory, key_of(2)) == 2);
  EXPECT(pool.device.stats().chunks == 1);
  EXPECT(pool.memory.directory.columns({hold.id})->levels == std::vector<uint8_t>({0, NO_LEVEL, NO_LEVEL}));
  EXPECT(pool.memory.directory.copies({hold.id})->levels == std::vector<uint8_t>({0, NO_LEVEL, NO_LEVEL}));
  EXPECT(pool.is_sound());
  EXPECT(pool.memory.directory.release(hold.id, ++pool.memory.now));
  EXPECT(pool.is_sound());
}

TEST(a_pinned_copy_keeps_its_slot_out_of_sight) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 2)) == 2);
  EXPECT(pool.copy(range(1, 2)) == 2);
  const HoldId pin = *pool.device.pin_key(pool.memory.owner, key_of(2));
  const auto slot = pool.memory.view->residency(key_of(2), Tier::HBM)->slot;
  EXPECT(drop(pool.memory.directory, key_of(1)) == 2);
  EXPECT(pool.shown(2) == 0 && pool.memory.view->generation_at(slot) == 0);
  EXPECT(pool.device.stats().zombies == 1 && pool.device.stats().used_bytes == CHUNK);
  EXPECT(pool.is_sound());
  EXPECT(pool.device.unpin(pin));
  EXPECT(pool.device.stats().zombies == 0 && pool.device.stats().used_bytes == 0);
  EXPECT(pool.is_sound());
}

TEST(an_eviction_in_the_device_leaves_memory_as_it_is) {
  DevicePool pool(16, 4);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.memory.store(range(11, 3)) == 3);
  EXPECT(pool.copy(range(1, 3)) == 3);
  EXPECT(pool.copy(range(11, 3)) == 3);  // two of the first chain go, from its end
  EXPECT(pool.levels(range(1, 3)) == std::vector<uint8_t>({0, 1, 1}));
  EXPECT(pool.levels(range(11, 3)) == std::vector<uint8_t>({0, 0, 0}));
  EXPECT(pool.device.stats().shed_chunks == 2 && pool.device.stats().evicted_chunks == 0);
  EXPECT(pool.memory.directory.stats().chunks == 6);
  EXPECT(pool.is_sound());
}

TEST(a_use_in_memory_is_a_use_of_the_copy) {
  DevicePool pool(16, 4);
  for (const uint64_t first : {1U, 11U, 21U}) {
    EXPECT(pool.memory.store(range(first, 2)) == 2);
  }
  EXPECT(pool.copy(range(1, 2)) == 2);
  EXPECT(pool.copy(range(11, 2)) == 2);
  pool.use(range(1, 2));
  EXPECT(pool.copy(range(21, 2)) == 2);
  EXPECT(pool.levels(range(1, 2)) == std::vector<uint8_t>({0, 0}));
  EXPECT(pool.levels(range(11, 2)) == std::vector<uint8_t>({1, 1}));
  EXPECT(pool.is_sound());
}

TEST(a_use_of_chunks_without_a_parent_is_one_of_each_copy_that_there_is) {
  DevicePool pool(16, 4);
  for (const uint64_t alone : {1U, 2U, 3U, 11U, 12U, 21U, 22U}) {
    EXPECT(pool.memory.store({alone}) == 1);
  }
  for (const uint64_t alone : {2U, 3U, 11U, 12U}) {  // the first one of those that are used has no copy
    EXPECT(pool.copy({alone}) == 1);
  }
  Directory& memory = pool.memory.directory;
  const auto keys = pack({1, 2, 3});
  const Hold held = memory.hold_hit(std::vector{HitRun{pool.memory.owner, keys, 3, false}}, {}, ++pool.memory.now).front();
  EXPECT(memory.release(held.id, ++pool.memory.now));
  EXPECT(pool.copy({21}) == 1 && pool.copy({22}) == 1);
  for (const uint64_t alone : {2U, 3U, 21U, 22U}) {
    EXPECT(pool.levels({alone}) == std::vector<uint8_t>({0}));
  }
  EXPECT(pool.levels({11}) == std::vector<uint8_t>({1}) && pool.levels({12}) == std::vector<uint8_t>({1}));
  EXPECT(pool.is_sound());
}

TEST(a_part_of_a_hold_that_ends_is_a_use_of_its_copies) {
  DevicePool pool(16, 8);
  EXPECT(pool.memory.store(range(1, 6)) == 6);
  EXPECT(pool.copy(range(1, 4)) == 4);
  const Hold hold = pool.memory.acquire(range(1, 6));
  for (const size_t ended : {3U, 2U, 1U}) {
    EXPECT(pool.memory.directory.release_part(hold.id, ended, ++pool.memory.now) == ended);
    EXPECT(pool.is_sound());
  }
}

TEST(a_copy_is_retained_as_its_original_is) {
  DevicePool pool(16, 4);
  pool.memory.directory.retention().ledger().cap(1.0);
  pool.device.retention().ledger().cap(1.0);
  EXPECT(pool.memory.store(range(1, 2)) == 2);
  EXPECT(pool.memory.store(range(11, 2)) == 2);
  EXPECT(pool.memory.store({21}) == 1);
  const auto retain = [&](uint64_t first, size_t count, Retention as) {
    return pool.memory.directory.retention().retain(pool.memory.owner, pack(range(first, count)).data(), std::vector<Retention>(count, as), pool.memory.now);
  };
  static_cast<void>(retain(1, 1, {80, 5}));
  EXPECT(pool.copy(range(1, 2)) == 2);
  EXPECT(pool.device.retention().of(key_of(1)) == Retention(80, 5));
  static_cast<void>(retain(2, 1, {70, 0}));
  EXPECT(pool.device.retention().of(key_of(2)) == Retention(70, 0));
  EXPECT(pool.device.stats().retention.chunks == 2);
  EXPECT(pool.copy(range(11, 2)) == 2);
  EXPECT(pool.copy({21}) == 1);  // in the place of the newer chunk that is not retained
  EXPECT(pool.levels(range(1, 2)) == std::vector<uint8_t>({0, 0}));
  EXPECT(pool.levels(range(11, 2)) == std::vector<uint8_t>({0, 1}));
  EXPECT(pool.is_sound());
  pool.memory.now += 6'000'000;
  pool.memory.directory.retention().expire_due(pool.memory.now + (uint64_t{2} << TICK_SHIFT));
  EXPECT(pool.device.retention().of(key_of(1)) == Retention());
  EXPECT(pool.device.retention().of(key_of(2)) == Retention(70, 0));
  static_cast<void>(retain(2, 1, {}));
  EXPECT(pool.device.stats().retention.chunks == 0);
  EXPECT(pool.is_sound());
  EXPECT(all_are(pool.device.retention().retain(pool.memory.owner, pack({1}).data(), {{90, 0}}, pool.memory.now), SaveState{2}));  // RetainState::ABSENT
}

TEST(a_flush_of_the_device_takes_copies_alone) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.copy(range(1, 3)) == 3);
  FlushWalk walk(pool.device, std::nullopt, UINT64_MAX);
  EXPECT(walk.advance(1));
  EXPECT(pool.levels(range(1, 3)) == std::vector<uint8_t>({0, 0, 1}));
  while (walk.advance(1)) {
  }
  EXPECT(walk.result().chunks == 3 && pool.device.stats().flushed_chunks == 3);
  EXPECT(pool.levels(range(1, 3)) == std::vector<uint8_t>({1, 1, 1}));
  EXPECT(pool.is_sound());
}

TEST(a_bad_copy_is_dropped_and_its_original_stays) {
  DevicePool pool(16, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.copy(range(1, 3)) == 3);
  EXPECT(drop(pool.device, key_of(2)) == 2);
  EXPECT(pool.levels(range(1, 3)) == std::vector<uint8_t>({0, 1, 1}));
  EXPECT(pool.is_sound());
}

TEST(a_chunk_with_a_copy_is_shed_only_where_a_lower_tier_has_it) {
  DevicePool pool(3, 16);
  EXPECT(pool.memory.store(range(1, 3)) == 3);
  EXPECT(pool.memory.directory.count_unsaved() == 3);
  EXPECT(pool.copy(range(1, 3)) == 3);
  EXPECT(pool.memory.directory.count_unsaved() == 3);  // a copy saves nothing
  EXPECT(pool.copy(pool.files, range(1, 2)) == 2);
  EXPECT(pool.shown(1) == (HBM | DRAM | SSD));
  EXPECT(pool.memory.store(range(11, 3)) == 3);
  EXPECT(pool.shown(1) == SSD && pool.shown(2) == SSD && pool.shown(3) == 0);
  EXPECT(pool.memory.directory.stats().shed_chunks == 2 && pool.memory.directory.stats().evicted_chunks == 1);
  EXPECT(pool.device.stats().chunks == 0);
  EXPECT(pool.is_sound());
}

TEST(a_lower_tier_that_loses_a_chunk_leaves_the_copy) {
  DevicePool pool(4, 16);
  EXPECT(pool.memory.store({1}) == 1);
  EXPECT(pool.copy({1}) == 1);
  EXPECT(pool.copy(pool.files, {1}) == 1);
  EXPECT(drop(pool.files, key_of(1)) == 1);
  EXPECT(pool.shown(1) == (HBM | DRAM));
  EXPECT(pool.memory.directory.count_unsaved() == 1);
  EXPECT(pool.is_sound());
}

TEST(changes_of_copies_are_reported_in_their_order) {
  DevicePool pool(2, 16);
  const auto feed = ChangeFeed::create(32);
  for (Directory* tier : {&pool.memory.directory, &pool.files, &pool.device}) {
    tier->reports().report_to(feed);
  }
  EXPECT(pool.memory.store({1, 2}) == 2);
  EXPECT(pool.copy({1, 2}) == 2);
  EXPECT(pool.memory.store({11}) == 1);
  using Row = std::tuple<uint64_t, ChangeKind, Tier, uint8_t>;  // key, what has happened, where, the tiers after it
  bool has_gap = false;
  std::vector<Change> taken(32);
  taken.resize(feed->take(taken.data(), taken.size(), has_gap));
  std::vector<Row> rows;
  for (const Change& row : taken) {
    rows.emplace_back(row.key.words[1], row.kind, static_cast<Tier>(row.level), row.tiers);
  }
  EXPECT(rows == std::vector<Row>({{1, ChangeKind::ARRIVED, Tier::DRAM, DRAM},
                                   {2, ChangeKind::ARRIVED, Tier::DRAM, DRAM},
                                   {1, ChangeKind::ARRIVED, Tier::HBM, HBM | DRAM},
                                   {2, ChangeKind::ARRIVED, Tier::HBM, HBM | DRAM},
                                   {2, ChangeKind::LEFT, Tier::HBM, DRAM},
                                   {2, ChangeKind::LEFT, Tier::DRAM, 0},
                                   {11, ChangeKind::ARRIVED, Tier::DRAM, DRAM}}));
  EXPECT(taken[4].cause == taken[5].cause);
}

TEST(priorities_are_reported_once_for_a_chunk_and_its_copy) {
  DevicePool pool(4, 16);
  EXPECT(pool.memory.store({1}) == 1);
  EXPECT(pool.copy({1}) == 1);
  const auto feed = ChangeFeed::create(8);
  pool.memory.directory.reports().report_to(feed);
  pool.device.reports().report_to(feed);
  static_cast<void>(pool.memory.directory.retention().retain(pool.memory.owner, pack({1}).data(), {{60, 0}}, ++pool.memory.now));
  EXPECT(feed->waiting() == 1);
}

TEST(a_key_without_room_in_the_table_takes_the_slot_of_a_chunk_with_a_copy) {
  DevicePool pool(400, 400);
  const IndexHeader& header = *reinterpret_cast<const IndexHeader*>(pool.memory.index->data());
  const auto store = [&pool](Directory& tier, const ChunkKey& key) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(key.words);
    const auto made = tier.reserve(pool.memory.owner, pool.memory.small, std::nullopt, bytes, 1, ++pool.memory.now);
    const bool is_stored = all_are(tier.commit(made.id, 0, 1, DevicePool::sums(1).data()), SaveState::STORED);
    return tier.end_reservation(made.id, ++pool.memory.now) && is_stored;
  };
  constexpr uint64_t CROWD = MAX_PROBE + 100;  // the last of them stand behind the reach of the first place
  for (uint64_t id = 1; id <= CROWD + 2; ++id) {
    const ChunkKey key = key_at(id > MAX_PROBE && id <= CROWD ? 190 + id % 100 : 90, id, header.slots, header.seed);
    EXPECT(store(pool.memory.directory, key));
    EXPECT(id > 2 || store(pool.device, key));
  }
  EXPECT(pool.device.stats().withdrawn_chunks == 2 && pool.memory.directory.stats().evicted_chunks == 2);
  EXPECT(pool.is_sound());
}

TEST(several_sizes_of_chunks_share_a_device) {
  DevicePool pool(400, 400);
  constexpr uint64_t LARGE = HUGE_PAGE_BYTES / 2;
  Directory& memory = pool.memory.directory;
  const ClassId large = *memory.add_class(LARGE, 2);
  EXPECT(pool.device.add_class(LARGE, 2) == large);
  EXPECT(pool.memory.store(range(1, 40)) == 40 && pool.copy(range(1, 40)) == 40);
  const NamespaceId owner = memory.add_namespace();
  EXPECT(pool.device.add_namespace() == owner);
  for (Directory* tier : {&memory, &pool.device}) {
    const auto made = tier->reserve(owner, large, std::nullopt, pack(range(101, 2)).data(), 2, ++pool.memory.now);
    EXPECT(all_are(made.states, SaveState::RESERVED));
    EXPECT(all_are(tier->commit(made.id, 0, 2, std::vector<uint32_t>(4).data()), SaveState::STORED));
    EXPECT(tier->end_reservation(made.id, ++pool.memory.now));
  }
  EXPECT(pool.levels(range(101, 2)) == std::vector<uint8_t>({0, 0}));
  EXPECT(pool.levels({1}) == std::vector<uint8_t>({1}));  // the only segment went to the other size
  EXPECT(pool.is_sound());
}

TEST(copies_are_found_no_more_when_their_directory_ends) {
  const auto device = *DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, 8);
  Pool pool(16 * CHUNK, 1000, true, 64 << 20, PolicyKind::LRU, 0, &device);
  EXPECT(pool.store(range(1, 2)) == 2);
  for (int life = 0; life < 2; ++life) {
    Directory copies(pool.directory, device);
    EXPECT(copies.add_namespace() == pool.owner && copies.add_class(CHUNK, EXTENTS) == pool.small);
    copies.mark_segment_ready(0);
    const auto made = copies.reserve(pool.owner, pool.small, std::nullopt, pack(range(1, 2)).data(), 2, ++pool.now);
    EXPECT(all_are(copies.commit(made.id, 0, 2, DevicePool::sums(2).data()), SaveState::STORED));
    EXPECT(copies.end_reservation(made.id, ++pool.now));
    EXPECT(pool.view->find(key_of(2))->tiers == (HBM | DRAM) && pool.is_sound());
  }
  EXPECT(pool.view->find(key_of(2))->tiers == DRAM && pool.is_sound());
  EXPECT(!pool.view->residency(key_of(2), Tier::HBM));
}
