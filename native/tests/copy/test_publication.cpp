// What becomes of chunks that are dropped while they move between the tiers, whatever keys they have.
#include "tests/directory/directory_tiers.h"
#include "tests/harness.h"
#include "tests/table_keys.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// A writer below that has copied a chunk from memory, and may publish it later.
struct Copied {
  Copied(Tiers& of, const std::vector<uint64_t>& ids)
      : tiers(of), hold(tiers.memory.acquire(ids)), sources(tiers.memory.directory.columns({hold.id})->generations),
        made(tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, pack(ids).data(), ids.size(), 1)) {}

  // The states of all chunks.
  [[nodiscard]] std::vector<uint8_t> publish(bool names_sources) {
    const std::vector<uint32_t> sums(sources.size() * EXTENTS);
    const auto states = tiers.files.commit(made.id, 0, sources.size(), sums.data(), 0, {},
                                           names_sources ? CopySources{Tier::DRAM, sources} : CopySources{});
    EXPECT(tiers.files.end_reservation(made.id, 2));
    EXPECT(tiers.memory.directory.release(hold.id, 3));
    return states;
  }

  Tiers& tiers;
  Hold hold;
  std::vector<uint64_t> sources;
  Reservation made;
};

}  // namespace

TEST(a_chunk_dropped_during_its_demotion_is_not_published_in_the_lower_tier) {
  Tiers tiers(8, 16);
  EXPECT(tiers.memory.store({1, 2, 3}) == 3);
  Copied copied(tiers, {1, 2, 3});
  EXPECT(drop(tiers.memory.directory, key_of(2)) == 2);
  const std::vector<uint8_t> expected = {static_cast<uint8_t>(SaveState::STORED), static_cast<uint8_t>(SaveState::EXPIRED),
                                         static_cast<uint8_t>(SaveState::NO_PARENT)};
  EXPECT(copied.publish(true) == expected);
  EXPECT(tiers.files.stats().chunks == 1);
  EXPECT(tiers.memory.lookup({1, 2, 3}) == 1);
  EXPECT(tiers.is_sound());
}

TEST(a_chunk_saved_again_during_the_demotion_of_its_older_copy_is_not_that_copy) {
  Tiers tiers(8, 16);
  EXPECT(tiers.memory.store({1}) == 1);
  Copied copied(tiers, {1});
  EXPECT(drop(tiers.memory.directory, key_of(1)) == 1);
  EXPECT(tiers.memory.store({1}) == 1);
  EXPECT(all_are(copied.publish(true), SaveState::EXPIRED));
  EXPECT(tiers.files.stats().chunks == 0);
  EXPECT(tiers.is_sound());
}

// Keys are clients' choice, and the table's seed can be read: as many as one probe looks at, of one home, leave no room for what was
// dropped meanwhile.
TEST(a_shared_table_without_room_for_a_key_refuses_its_publication) {
  Tiers tiers(400, 16);
  const auto& header = *reinterpret_cast<const IndexHeader*>(tiers.memory.index->data());
  const auto alike = [&](uint64_t number) { return key_at(7, number, header.slots, header.seed); };
  const auto bytes_of = [](const ChunkKey& key) { return reinterpret_cast<const uint8_t*>(key.words); };
  Directory& memory = tiers.memory.directory;
  const auto store = [&](const ChunkKey& key) {
    const Reservation made = memory.reserve(tiers.memory.owner, tiers.memory.small, std::nullopt, bytes_of(key), 1, ++tiers.memory.now);
    const std::vector<uint32_t> sums(EXTENTS);
    static_cast<void>(made.id != 0 && !memory.commit(made.id, 0, 1, sums.data()).empty());
    memory.end_reservation(made.id, tiers.memory.now);
    return made.states[0] == static_cast<uint8_t>(SaveState::RESERVED);
  };
  EXPECT(store(alike(0)));
  const Hold hold = memory.acquire(tiers.memory.owner, bytes_of(alike(0)), 1);
  const Reservation made =
      tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, bytes_of(alike(0)), 1, ++tiers.memory.now);
  EXPECT(drop(memory, alike(0)) == 1);
  for (uint32_t number = 1; number <= MAX_PROBE; ++number) {
    EXPECT(store(alike(number)));
  }
  const std::vector<uint32_t> sums(EXTENTS);
  EXPECT(all_are(tiers.files.commit(made.id, 0, 1, sums.data()), SaveState::FULL));
  EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
  EXPECT(memory.release(hold.id, ++tiers.memory.now));
  EXPECT(tiers.is_sound());
}

// Whoever acquires a chunk on its way up may outlive who reads it, and end in any of the ways in which holds end.
TEST(a_chunk_that_never_lands_is_removed_with_its_last_hold) {
  for (int way = 0; way < 3; ++way) {
    Tiers tiers(4, 16);
    EXPECT(tiers.memory.store({1, 2}) == 2);
    EXPECT(tiers.demote() == 2);
    EXPECT(tiers.memory.store({11, 12, 13, 14}) == 4);
    Directory& memory = tiers.memory.directory;
    const Reservation reading = memory.promotions().promote(tiers.memory.owner, tiers.memory.small, std::nullopt, pack({1}).data(), 1, 30);
    const Hold lease = way == 0 ? tiers.memory.acquire({1}) : Hold{};
    const Reservation saving = way == 0 ? Reservation{} : tiers.memory.reserve({5}, 1);
    EXPECT(memory.release(reading.id, 31));
    EXPECT(memory.stats().promoting == 1);
    EXPECT(way != 0 || memory.release(lease.id, 32));
    EXPECT(way != 1 || memory.end_reservation(saving.id, 32));
    EXPECT(way != 2 || (memory.expire_part(saving.id, SIZE_MAX, 32) && memory.end_reservation(saving.id, 33)));
    EXPECT(memory.stats().promoting == 0 && memory.stats().zombies == 0);
    EXPECT(tiers.memory.lookup({1, 2}) == 2);
    EXPECT(tiers.is_sound());
  }
}
