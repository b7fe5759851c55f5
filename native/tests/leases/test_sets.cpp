// Leases of sets: what is here of chunks that are each alone, in one hold and one answer, and what is left to others.
#include <algorithm>
#include <cstring>

#include "leases/lease_desk.h"
#include "leases/lease_frames.h"
#include "saves/save_frames.h"
#include "tests/directory_pool.h"
#include "tests/harness.h"

namespace {

using namespace kvpool;
using namespace kvpool::testing;

constexpr uint64_t TTL = 1000;

struct Setting {
  explicit Setting(bool is_alone = true, uint64_t capacity = 16 * CHUNK)
      : pool(capacity), desk(pool.directory, leases, ending, nullptr, {3, 1000, 100, 8, is_alone}) {
    reader.groups.push_back({true, UINT64_MAX, {pool.owner}, {CHUNK}});
    reader.groups.push_back({false, 2, {pool.directory.add_namespace()}, {CHUNK}});
  }
  std::optional<LeasedSet> lease(const std::vector<uint64_t>& ids, uint64_t group = 0) {
    return desk.lease_set(reader, pack(ids), group, ++pool.now);
  }
  void release(const LeasedSet& set) {
    const uint64_t id = set.lease->id;
    EXPECT(!desk.release_leases(reader, {&id, 1}, ++pool.now));
  }
  Pool pool;
  LeaseTable leases{TTL};
  EndingHolds ending{pool.directory, 64, 4};
  LeaseDesk desk;
  Reader reader{5, HolderId(5), 0, {0}, false, true, {}};
};

std::vector<uint32_t> places(std::initializer_list<uint32_t> of) { return of; }

}  // namespace

TEST(what_is_here_of_a_set_is_leased_once_each_and_the_first_key_is_used_last) {
  Setting setting;
  for (const uint64_t id : range(1, 16)) {
    setting.pool.store({id});
  }
  const auto set = setting.lease({9, 99, 3, 9, 5});
  EXPECT(set && set->lease->chunks == 3 && set->lease->rows == 3 && set->lease->set_group == 0U && set->lease->holds.size() == 1);
  EXPECT(set->places == places({4, 2, 0}));
  const Columns columns = setting.desk.columns_of(setting.reader, *set->lease);
  EXPECT(columns.levels == std::vector<uint8_t>(3, static_cast<uint8_t>(Tier::DRAM)));
  const std::vector<uint64_t> generations{setting.pool.directory.place_of(key_of(5))->generation,
                                          setting.pool.directory.place_of(key_of(3))->generation,
                                          setting.pool.directory.place_of(key_of(9))->generation};
  EXPECT(columns.generations == generations);
  const Columns by_key = setting.desk.rows_by_key(setting.reader, set->lease, set->places, 5);
  constexpr auto DRAM = static_cast<uint8_t>(Tier::DRAM);
  EXPECT(by_key.levels == std::vector<uint8_t>({DRAM, NO_LEVEL, DRAM, NO_LEVEL, DRAM}));
  EXPECT(by_key.generations == std::vector<uint64_t>({generations[2], 0, generations[1], 0, generations[0]}));
  EXPECT(by_key.offsets == std::vector<uint64_t>({columns.offsets[2], 0, columns.offsets[1], 0, columns.offsets[0]}));
  EXPECT(by_key.slots.size() == 5);
  setting.reader.is_scheduler = true;
  const Columns levels = setting.desk.rows_by_key(setting.reader, set->lease, set->places, 5);
  EXPECT(levels.levels == by_key.levels && levels.offsets.empty() && levels.generations.empty() && levels.slots.empty());
  setting.reader.is_scheduler = false;
  const Columns nothing = setting.desk.rows_by_key(setting.reader, nullptr, {}, 2);
  EXPECT(nothing.levels == std::vector<uint8_t>(2, NO_LEVEL) && nothing.offsets == std::vector<uint64_t>(2));
  EXPECT(setting.pool.directory.stats().held == 3 && setting.leases.chunks_of(5) == 3 && setting.leases.verify().empty());
  setting.release(*set);
  EXPECT(setting.pool.directory.stats().held == 0 && setting.pool.is_sound());
  for (const uint64_t id : range(100, 13)) {
    setting.pool.store({id});
  }
  EXPECT(setting.pool.lookup({9}) == 1 && setting.pool.lookup({3}) == 1 && setting.pool.lookup({5}) == 1);
  setting.pool.store({200});
  EXPECT(setting.pool.lookup({5}) == 0 && setting.pool.lookup({3}) == 1);
  setting.pool.store({201});
  EXPECT(setting.pool.lookup({3}) == 0 && setting.pool.lookup({9}) == 1);
  EXPECT(setting.pool.is_sound());
}

TEST(nothing_here_is_an_answer_and_chunks_behind_others_or_of_others_are_not_here) {
  Setting setting;
  setting.pool.store({1, 2});
  const auto none = setting.lease({2, 77});
  EXPECT(none && none->lease == nullptr && none->places.empty());
  const auto of_another = setting.lease({1}, 1);
  EXPECT(of_another && of_another->lease == nullptr);
  const Reservation writing = setting.pool.reserve({5});
  EXPECT(setting.lease({5})->lease == nullptr);
  setting.pool.directory.end_reservation(writing.id, ++setting.pool.now);
  EXPECT(setting.leases.size() == 0 && setting.pool.directory.stats().held == 0 && setting.pool.is_sound());
}

TEST(what_may_be_elsewhere_is_too_much_or_not_allowed_is_left_to_others) {
  Setting setting;
  setting.pool.store({1});
  EXPECT(!setting.lease({}));
  EXPECT(!setting.lease({1}, 2));
  EXPECT(!setting.lease(range(1, 9)));  // more than is looked at at once
  EXPECT(!setting.desk.lease_set(setting.reader, std::vector<uint8_t>(31), 0, 1));
  setting.reader.is_scheduler = true;
  EXPECT(!setting.lease({1}));
  setting.reader.is_scheduler = false;
  std::vector<LeasedSet> held;
  for (int count = 0; count < 3; ++count) {
    held.push_back(*setting.lease({1}));
  }
  EXPECT(!setting.lease({1}));  // all the leases that it may have
  for (const LeasedSet& set : held) {
    setting.release(set);
  }
  Setting beside_others(false);
  beside_others.pool.store({1});
  EXPECT(!beside_others.lease({1}));
  Setting bounded;
  bounded.pool.directory.shares().limit(1.5 / 16);
  bounded.pool.store({1});
  bounded.pool.store({2});
  EXPECT(bounded.lease({1})->lease != nullptr);
  EXPECT(!bounded.lease({1, 2}));
  EXPECT(bounded.pool.is_sound());
}

TEST(parts_of_a_set_are_held_each_and_joined_to_one_hold_on_each_rank_in_the_order_of_their_places) {
  for (const bool is_last_newest : {false, true}) {
    Pool pool(16 * CHUNK);
    Directory& directory = pool.directory;
    const NamespaceId other = directory.add_namespace();
    const HolderId holder(5);
    for (const uint64_t id : range(1, 6)) {
      pool.store({id});
      const Reservation made = directory.reserve(other, pool.small, std::nullopt, pack({100 + id}).data(), 1, ++pool.now);
      static_cast<void>(pool.commit(made, 0, 1));
      directory.end_reservation(made.id, ++pool.now);
    }
    // The keys of the set, by place: 4, 77 (nowhere), 2, 6, 1; on the other rank 2 is not there.
    const std::vector<uint8_t> keys = pack({4, 77, 2}), others = pack({104, 177, 199}), later = pack({6, 1}), others_later = pack({106, 101});
    const std::vector<uint32_t> first = places({0, 1, 2}), rest = places({3, 4});
    const auto early = directory.hold_each(std::vector{SetPart{pool.owner, later, rest}, SetPart{other, others_later, rest}}, holder, ++pool.now);
    const auto late = directory.hold_each(std::vector{SetPart{pool.owner, keys, first}, SetPart{other, others, first}}, holder, ++pool.now);
    EXPECT(late[0].places == places({0, 2}) && late[1].places == places({0}) && early[0].places == rest && early[1].places == rest);
    EXPECT(directory.stats().held == 7 && pool.is_sound());
    EXPECT(directory.drop(key_of(106), directory.place_of(key_of(106))->generation) == 1);
    const std::vector<std::vector<HeldSet>> ranks{{early[0], late[0]}, {early[1], late[1]}};
    const JoinedSet joined = directory.join_sets(ranks, 5, is_last_newest, ++pool.now);
    EXPECT(joined.places == (is_last_newest ? places({0, 4}) : places({4, 0})) && joined.holds.size() == 2);
    const auto generations = directory.columns({joined.holds[0]})->generations;
    const size_t of_four = is_last_newest ? 0 : 1;
    EXPECT(generations.size() == 2 && generations[of_four] == directory.place_of(key_of(4))->generation &&
           generations[1 - of_four] == directory.place_of(key_of(1))->generation);
    EXPECT(directory.shares().holder_of(joined.holds[0]) == holder && directory.shares().holder_of(joined.holds[1]) == holder);
    EXPECT(directory.stats().held == 4 && directory.stats().holds == 2 && pool.is_sound());
    for (const HoldId hold : joined.holds) {
      EXPECT(directory.release(hold, ++pool.now));
    }
    const JoinedSet nothing = directory.join_sets(std::vector<std::vector<HeldSet>>(2), 5, is_last_newest, ++pool.now);
    EXPECT(nothing.holds.empty() && nothing.places.empty());
    EXPECT(directory.stats().held == 0 && directory.stats().zombies == 0 && pool.is_sound());
  }
}

TEST(what_a_holder_may_not_protect_of_all_parts_is_left_out_the_last_places_first) {
  Pool pool(16 * CHUNK);
  Directory& directory = pool.directory;
  directory.shares().limit(5.5 / 16);
  const HolderId holder(5);
  for (const uint64_t id : range(1, 8)) {
    pool.store({id});
  }
  const std::vector<uint8_t> keys = pack({1, 99, 2, 3}), others = pack({5, 6, 7, 8});
  const std::vector<uint32_t> named = places({10, 11, 12, 13});
  const auto parts = std::vector{SetPart{pool.owner, keys, named}, SetPart{pool.owner, others, named}};
  const auto held = directory.hold_each(parts, holder, ++pool.now);
  EXPECT(held[0].places == places({10, 12}) && held[1].places == places({10, 11, 12}));
  EXPECT(directory.stats().held == 5 && pool.is_sound());
  const auto again = directory.hold_each(parts, holder, ++pool.now);  // what it protects anyway costs nothing
  EXPECT(again[0].places == held[0].places && again[1].places == held[1].places);
  const auto unbounded = directory.hold_each(parts, {}, ++pool.now);
  EXPECT(unbounded[0].places == places({10, 12, 13}) && unbounded[1].places == named);
  for (const auto& of : {held, again, unbounded}) {
    EXPECT(directory.release(of[0].hold, ++pool.now) && directory.release(of[1].hold, ++pool.now));
  }
  EXPECT(directory.stats().held == 0 && pool.is_sound());
}
