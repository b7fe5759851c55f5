// Restoring a tier's chunks while others use it: each restored chunk is whole at once, whatever is asked between two of them.
#include <functional>

#include "tests/directory/directory_tiers.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint32_t SLOT_PAGES = FILE_SLOT / PAGE_BYTES;
constexpr uint64_t CHAINS = 4;
constexpr uint64_t CHAIN = 4;

// The slot's place: eight to a segment.
PageIndex slot(uint64_t number) {
  return PageIndex(static_cast<uint32_t>(number / 8 * 8 * SLOT_PAGES + number % 8 * SLOT_PAGES));
}

uint64_t id_of(uint64_t chain, uint64_t depth) { return 100 * (chain + 1) + depth; }

bool restore(Tiers& tiers, uint64_t chain, uint64_t depth, Retention kept = {}) {
  std::optional<ChunkKey> parent;
  if (depth > 0) {
    parent = key_of(id_of(chain, depth - 1));
  }
  const uint64_t number = chain * CHAIN + depth;
  return tiers.files.restore(tiers.memory.owner, tiers.in_files, parent, key_of(id_of(chain, depth)), slot(2 * number),
                             number + 1, kept, ++tiers.memory.now);
}

std::vector<uint8_t> chain_keys(uint64_t chain) { return pack(range(id_of(chain, 0), CHAIN)); }

// As the daemon does it: every row is tried, and refused where its parent has gone meanwhile.
void restore_rest(Tiers& tiers) {
  for (uint64_t chain = 0; chain < CHAINS; ++chain) {
    for (uint64_t depth = 0; depth < CHAIN; ++depth) {
      static_cast<void>(restore(tiers, chain, depth));
    }
  }
  tiers.files.finish_restore();
}

void fill_files(Tiers& tiers) {
  const auto keys = pack(range(7000, 32));
  const Reservation made = tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, keys.data(), 32, ++tiers.memory.now);
  EXPECT(made.id != 0);
  EXPECT(tiers.is_sound());
  EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
}

using Verb = std::function<void(Tiers&)>;

const std::vector<std::pair<const char*, Verb>> VERBS = {
    {"retain",
     [](Tiers& tiers) {
       const std::vector<Retention> retentions(CHAIN, {70, 1000});
       const auto keys = chain_keys(0);
       EXPECT(all_are(tiers.memory.directory.retention().retain(tiers.memory.owner, keys.data(), retentions, ++tiers.memory.now), SaveState{0}));
     }},
    {"retain below the default",
     [](Tiers& tiers) {
       const auto keys = chain_keys(1);
       static_cast<void>(tiers.memory.directory.retention().retain(tiers.memory.owner, keys.data(),
                                                       std::vector<Retention>(CHAIN, {10, 0}), ++tiers.memory.now));
     }},
    {"save what is below", [](Tiers& tiers) { EXPECT(tiers.memory.store(range(id_of(0, 0), CHAIN)) == CHAIN); }},
    {"save and evict",
     [](Tiers& tiers) {
       EXPECT(tiers.memory.store(range(id_of(0, 0), CHAIN)) == CHAIN);
       EXPECT(tiers.memory.store(range(5000, 16)) == 16);
     }},
    {"save and write down",
     [](Tiers& tiers) {
       EXPECT(tiers.memory.store(range(id_of(1, 0), CHAIN + 2)) == CHAIN + 2);
       EXPECT(tiers.demote() == CHAIN);
     }},
    {"load", [](Tiers& tiers) { EXPECT(tiers.load(range(id_of(0, 0), CHAIN)) == CHAIN); }},
    {"fail to load", [](Tiers& tiers) { static_cast<void>(tiers.load(range(id_of(0, 0), CHAIN), false)); }},
    {"hold", [](Tiers& tiers) {
       const auto keys = chain_keys(1);
       const Hold hold = tiers.files.acquire(tiers.memory.owner, keys.data(), CHAIN);
       EXPECT(hold.chunks == 2);
       EXPECT(restore(tiers, 1, 2));
       EXPECT(tiers.is_sound());
       EXPECT(tiers.files.release(hold.id, ++tiers.memory.now));
     }},
    {"flush the tier", [](Tiers& tiers) { EXPECT(flush(tiers.files, std::nullopt, UINT64_MAX).chunks == CHAIN + 2); }},
    {"flush old", [](Tiers& tiers) { static_cast<void>(flush(tiers.files, tiers.memory.owner, 1)); }},
    {"drop", [](Tiers& tiers) { EXPECT(drop(tiers.files, key_of(id_of(0, 1))) == CHAIN - 1); }},
    {"discard a parent", [](Tiers& tiers) { EXPECT(tiers.files.discard(key_of(id_of(1, 0))) == 2); }},
    {"drop while held",
     [](Tiers& tiers) {
       const auto keys = chain_keys(1);
       const Hold hold = tiers.files.acquire(tiers.memory.owner, keys.data(), CHAIN);
       EXPECT(drop(tiers.files, key_of(id_of(1, 0))) == 2);
       EXPECT(!restore(tiers, 1, 2));
       EXPECT(tiers.is_sound());
       EXPECT(tiers.files.release(hold.id, ++tiers.memory.now));
     }},
    {"look at all",
     [](Tiers& tiers) {
       const RecordPage page = tiers.files.records(0, 100);
       EXPECT(page.records.size() == CHAIN + 2);
       EXPECT(tiers.is_sound());
       EXPECT(tiers.files.unpin(page.pin));
     }},
    {"expire", [](Tiers& tiers) { tiers.files.retention().expire_due(tiers.memory.now += 10'000'000'000); }},
    {"fill the files", [](Tiers& tiers) { fill_files(tiers); }},
    {"write into a place of a later row",
     [](Tiers& tiers) {
       const auto keys = pack(range(7000, 20));
       const Reservation made =
           tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, keys.data(), 20, ++tiers.memory.now);
       const std::vector<uint32_t> sums(20 * EXTENTS);
       EXPECT(all_are(tiers.files.commit(made.id, 0, 20, sums.data()), SaveState::STORED));
       EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
     }},
    {"reserve what a later row has",
     [](Tiers& tiers) {
       const auto keys = pack(range(id_of(1, 2), 2));
       const Reservation made = tiers.files.reserve(tiers.memory.owner, tiers.in_files, key_of(id_of(1, 1)), keys.data(), 2,
                                                    ++tiers.memory.now);
       EXPECT(made.id != 0);
       EXPECT(!restore(tiers, 1, 2));
       EXPECT(!restore(tiers, 1, 3));  // its parent is being written
       EXPECT(tiers.is_sound());
       EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
     }},
};

}  // namespace

TEST(every_verb_works_between_two_batches_of_a_restore) {
  for (const auto& [name, verb] : VERBS) {
    for (const bool is_retained : {false, true}) {
      Tiers tiers(16, 32);
      for (uint64_t depth = 0; depth < CHAIN; ++depth) {
        EXPECT(restore(tiers, 0, depth, is_retained ? Retention{60, 1000} : Retention{}));
      }
      EXPECT(restore(tiers, 1, 0));
      EXPECT(restore(tiers, 1, 1));
      EXPECT(tiers.is_sound());
      verb(tiers);
      const bool is_sound_before = tiers.is_sound();
      restore_rest(tiers);
      if (!is_sound_before || !tiers.is_sound()) {
        std::printf("  after: %s\n", name);
        EXPECT(false);
      }
      fill_files(tiers);
      EXPECT(tiers.is_sound());
      static_cast<void>(flush(tiers.files, std::nullopt, UINT64_MAX));
      EXPECT(tiers.files.stats().used_bytes == 0);
      EXPECT(tiers.files.arena().free_segments() == tiers.files.arena().ready_segments());
    }
  }
}

TEST(the_last_restored_chunks_are_evicted_first_and_leaves_before_parents) {
  Tiers tiers(16, 16);
  for (uint64_t chain = 0; chain < 2; ++chain) {
    for (uint64_t depth = 0; depth < CHAIN; ++depth) {
      EXPECT(restore(tiers, chain, depth));
    }
  }
  tiers.files.finish_restore();
  EXPECT(tiers.files.stats().idle_bytes == 8 * FILE_SLOT);
  std::vector<ChunkKey> gone;
  for (uint64_t id = 0; id < 16; ++id) {
    const auto keys = pack({9000 + id});
    const Reservation made = tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, keys.data(), 1, ++tiers.memory.now);
    const std::vector<uint32_t> sums(EXTENTS);
    EXPECT(all_are(tiers.files.commit(made.id, 0, 1, sums.data()), SaveState::STORED));
    EXPECT(tiers.files.end_reservation(made.id, ++tiers.memory.now));
  }
  gone = tiers.files.take_departed();
  EXPECT(gone.size() == 8);
  for (uint64_t index = 0; index < gone.size(); ++index) {
    EXPECT(gone[index] == key_of(id_of(1 - index / CHAIN, CHAIN - 1 - index % CHAIN)));
  }
  EXPECT(tiers.is_sound());
}

TEST(rows_of_a_key_that_another_namespace_has_in_the_upper_tier_are_refused) {
  Tiers tiers(16, 32);
  const NamespaceId other = tiers.memory.directory.add_namespace();
  EXPECT(tiers.files.add_namespace() == other);
  const auto keys = chain_keys(0);
  const Reservation made =
      tiers.memory.directory.reserve(other, tiers.memory.small, std::nullopt, keys.data(), 1, ++tiers.memory.now);
  EXPECT(made.id != 0);
  EXPECT(!restore(tiers, 0, 0));
  EXPECT(restore(tiers, 1, 0));
  EXPECT(tiers.memory.directory.end_reservation(made.id, ++tiers.memory.now));
  EXPECT(restore(tiers, 0, 0));
  EXPECT(tiers.is_sound());
}

TEST(random_verbs_between_restored_rows_keep_both_tiers_sound) {
  const uint64_t first_seed = kvpool::testing::seed();
  for (uint64_t seed = first_seed; seed < first_seed + 20; ++seed) {
    std::mt19937_64 random(seed);
    Tiers tiers(12, 32, seed % 2 == 0 ? PolicyKind::LRU : PolicyKind::CLASS_QUEUES);
    for (int step = 0; step < 300; ++step) {
      if (random() % 2 == 0) {
        const Retention kept{static_cast<uint8_t>(random() % 101), static_cast<uint32_t>(random() % 3 * 40)};
        static_cast<void>(restore(tiers, random() % CHAINS, random() % CHAIN, random() % 3 == 0 ? kept : Retention{}));
      } else {
        const std::vector<uint64_t> ids = range(id_of(random() % CHAINS, 0), 1 + random() % CHAIN);
        switch (random() % 7) {
          case 0: static_cast<void>(tiers.memory.store(ids)); break;
          case 1: static_cast<void>(tiers.demote(random() % 5 != 0, random() % 3 == 0)); break;
          case 2: static_cast<void>(tiers.load(ids, random() % 8 != 0)); break;
          case 3: static_cast<void>(drop(tiers.files, key_of(ids.back()))); break;
          case 4: static_cast<void>(flush(tiers.files, std::nullopt, random() % (tiers.memory.now + 2))); break;
          case 5: static_cast<void>(tiers.memory.store({1000 + random() % 100})); break;
          default:
            static_cast<void>(tiers.memory.directory.retention().retain(
                tiers.memory.owner, pack(ids).data(),
                std::vector<Retention>(ids.size(), {static_cast<uint8_t>(random() % 101), 40}), tiers.memory.now));
        }
      }
      if (!tiers.is_sound()) {
        std::printf("  seed %llu step %d\n", static_cast<unsigned long long>(seed), step);
        EXPECT(false);
        return;
      }
    }
  }
}

TEST(a_tier_of_64_tib_has_slots_up_to_its_end) {
  constexpr uint64_t SEGMENT = uint64_t{4} << 30;
  EXPECT(!DirectoryGeometry::plan_files(SEGMENT, (1 << 14) + 1, 1000));
  const auto geometry = DirectoryGeometry::plan_files(SEGMENT, 1 << 14, 1000);
  EXPECT(geometry.has_value());
  EXPECT(geometry->capacity == FILES_BYTES_MAX);
  Directory files(nullptr, nullptr, *geometry, nullptr, Tier::SSD);
  const NamespaceId owner = files.add_namespace();
  constexpr uint64_t CHUNK_SLOT = (uint64_t{1} << 20) + PAGE_BYTES;
  const ClassId size_class = *files.add_class(CHUNK_SLOT, 32);
  files.mark_segment_ready((1 << 14) - 1);
  const uint64_t last_slot = SEGMENT / CHUNK_SLOT - 1;
  const PageIndex last((FILES_BYTES_MAX - SEGMENT + last_slot * CHUNK_SLOT) / PAGE_BYTES);
  EXPECT(files.restore(owner, size_class, std::nullopt, key_of(1), last, 5));
  EXPECT(!files.restore(owner, size_class, std::nullopt, key_of(2), PageIndex(last.value() + CHUNK_SLOT / PAGE_BYTES), 6));
  EXPECT(files.place_of(key_of(1))->offset == last.value() * PAGE_BYTES);
  const Hold hold = files.acquire(owner, pack({1}).data(), 1);
  EXPECT(files.columns({hold.id})->offsets[0] == last.value() * PAGE_BYTES);
  EXPECT(files.release(hold.id, 1));
  const Reservation made = files.reserve(owner, size_class, key_of(1), pack({3, 4}).data(), 2, 2);
  EXPECT(all_are(made.states, SaveState::RESERVED));
  EXPECT(made.offsets[0] == FILES_BYTES_MAX - SEGMENT);
  EXPECT(files.end_reservation(made.id, 3));
  EXPECT(files.verify().empty());
}

TEST(generations_go_on_behind_all_that_an_earlier_life_may_have_given) {
  Tiers tiers(8, 4);
  EXPECT(restore(tiers, 0, 0));
  for (const uint64_t never_given : {uint64_t{0}, GENERATION_END, UINT64_MAX}) {
    EXPECT(!tiers.files.restore(tiers.memory.owner, tiers.in_files, std::nullopt, key_of(5), slot(30), never_given));
  }
  tiers.files.finish_restore(uint64_t{1} << 40);
  const auto keys = pack(range(7000, 1));
  const Reservation made = tiers.files.reserve(tiers.memory.owner, tiers.in_files, std::nullopt, keys.data(), 1, ++tiers.memory.now);
  EXPECT(made.generations.at(0) == (uint64_t{1} << 40) + 1);
  EXPECT(tiers.is_sound());
}
