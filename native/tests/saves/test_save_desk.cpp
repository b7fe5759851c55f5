// The save desk: what a plain save is, what is left to others, and that nothing stays held then.
#include <cstring>

#include "saves/save_desk.h"
#include "tests/directory_pool.h"
#include "tests/harness.h"

namespace {

using namespace kvpool;
using namespace kvpool::testing;

constexpr uint64_t TTL = 1000;
constexpr uint32_t TOKENS = 8;

std::vector<uint8_t> run_of(uint32_t form, uint32_t chunks, uint32_t group = 0, uint32_t layers = 0) {
  const uint32_t words[7] = {group, form, chunks, 0, layers, 0, 0};
  std::vector<uint8_t> run(sizeof(words));
  std::memcpy(run.data(), words, sizeof(words));
  return run;
}

std::vector<uint8_t> sums_of(size_t chunks) { return std::vector<uint8_t>(chunks * EXTENTS * sizeof(uint32_t), 3); }

struct Desk {
  explicit Desk(uint64_t capacity = 64 * CHUNK, bool keeps_tokens = true)
      : pool(capacity), desk(pool.directory, saves, nullptr, {2, 6}, keeps_tokens) {
    writer.groups.push_back({true, pool.owner, pool.small, EXTENTS, TOKENS, CHUNK});
    writer.groups.push_back({false, pool.owner, pool.small, EXTENTS, TOKENS, CHUNK});
  }
  std::optional<MadeSave> reserve(const std::vector<uint8_t>& runs, const std::vector<uint64_t>& ids) {
    return desk.reserve(writer, runs, pack(ids), ++pool.now);
  }
  std::optional<CommittedChunks> commit(uint64_t save, size_t chunks, size_t tokens = 0, size_t scope = 0) {
    return desk.commit(writer, save, sums_of(chunks), std::vector<uint8_t>(tokens * sizeof(int32_t), 1), std::vector<uint8_t>(scope, 2), ++pool.now);
  }
  bool is_idle() const {
    return saves.size() == 0 && pool.directory.stats().reservations == 0 && pool.directory.stats().held == 0 && pool.directory.verify().empty() &&
           saves.verify().empty();
  }
  Pool pool;
  PlainSaves saves{TTL};
  SaveDesk desk;
  SaveWriter writer{5, {}};
};

std::vector<uint8_t> all(SaveState state, size_t count) { return std::vector<uint8_t>(count, static_cast<uint8_t>(state)); }

}  // namespace

TEST(a_chain_is_reserved_and_committed_in_parts_with_its_token_ids) {
  Desk desk;
  const auto made = desk.reserve(run_of(1, 3), {1, 2, 3});
  EXPECT(made && made->save != 0 && made->slots.states == all(SaveState::RESERVED, 3) && made->slots.generations.size() == 3);
  EXPECT(desk.saves.count_of(5) == 1);
  EXPECT(desk.commit(made->save, 2, 2 * TOKENS, 16)->states == all(SaveState::STORED, 2));
  EXPECT(desk.pool.lookup({1, 2, 3}) == 2);
  EXPECT(desk.pool.directory.tokens_of(key_of(1)).size() == TOKENS + 4);
  EXPECT(desk.commit(made->save, 1)->states == all(SaveState::STORED, 1));
  EXPECT(desk.pool.directory.tokens_of(key_of(3)).empty());
  EXPECT(!desk.commit(made->save, 1));
  const auto behind = desk.reserve(run_of(2, 2), {3, 4, 5});  // behind chunk 3
  EXPECT(desk.commit(behind->save, 2)->states == all(SaveState::STORED, 2));
  EXPECT(desk.pool.lookup({1, 2, 3, 4, 5}) == 5);
  const auto again = desk.reserve(run_of(1, 3), {1, 2, 3});
  EXPECT(again && again->save == 0 && again->slots.states == all(SaveState::PRESENT, 3));
  const auto lost = desk.reserve(run_of(2, 1), {77, 78});
  EXPECT(lost && lost->save == 0 && lost->slots.states == all(SaveState::NO_PARENT, 1));
  EXPECT(desk.is_idle());
}

TEST(chunks_that_are_each_alone_are_one_save_with_a_state_for_each) {
  Desk desk(6 * CHUNK);
  for (const uint32_t group : {0U, 1U}) {
    const uint64_t first = 10 * group;
    const auto made = desk.reserve(run_of(0, 4, group), {first + 1, first + 2, first + 3, first + 2});
    EXPECT(made && made->save != 0 && made->group == group && made->slots.generations.size() == 4);
    auto states = all(SaveState::RESERVED, 4);
    states[3] = static_cast<uint8_t>(SaveState::PENDING);  // it is named twice
    EXPECT(made->slots.states == states);
    EXPECT(desk.saves.count_of(5) == 1 && desk.saves.holders().size() == 3);
    EXPECT(!desk.commit(made->save, 3, 3 * TOKENS));  // no token ids: nobody would know what comes before
    EXPECT(desk.commit(made->save, 1)->states == all(SaveState::STORED, 1));
    EXPECT(desk.pool.lookup({first + 1}) == 1 && desk.pool.lookup({first + 2}) == 0);
    EXPECT(desk.commit(made->save, 2)->states == all(SaveState::STORED, 2));
    EXPECT(!desk.commit(made->save, 1));
    EXPECT(desk.is_idle());
  }
  // Of a chain's group the first key is used last, of others the last one: chunks go from the other end on.
  EXPECT(desk.reserve(run_of(0, 3), {1, 2, 3})->slots.states == all(SaveState::PRESENT, 3));
  EXPECT(desk.reserve(run_of(0, 3, 1), {11, 12, 13})->slots.states == all(SaveState::PRESENT, 3));
  EXPECT(desk.pool.store({100}) == 1 && desk.pool.lookup({3}) == 0 && desk.pool.lookup({2}) == 1);
  EXPECT(desk.pool.store({101}) == 1 && desk.pool.lookup({2}) == 0 && desk.pool.lookup({1}) == 1);
  EXPECT(desk.pool.store({102}) == 1 && desk.pool.lookup({1}) == 0 && desk.pool.lookup({11}) == 1);
  EXPECT(desk.pool.store({103}) == 1 && desk.pool.lookup({11}) == 0 && desk.pool.lookup({12}) == 1);
  EXPECT(desk.is_idle());
}

TEST(what_is_present_of_a_set_is_evicted_for_no_other_chunk_of_it) {
  for (const uint32_t group : {0U, 1U}) {
    Desk desk(6 * CHUNK);
    EXPECT(desk.commit(desk.reserve(run_of(0, 3, group), {1, 2, 3})->save, 3)->states == all(SaveState::STORED, 3));
    EXPECT(desk.pool.store({100, 101}) == 2);
    const Hold held = desk.pool.acquire({100, 101});
    EXPECT(held.chunks == 2);
    const auto made = desk.reserve(run_of(0, 5, group), {1, 2, 3, 4, 5});  // room for one more
    auto states = all(SaveState::PRESENT, 5);
    states[3] = static_cast<uint8_t>(SaveState::RESERVED);
    states[4] = static_cast<uint8_t>(SaveState::FULL);
    EXPECT(made && made->slots.states == states);
    EXPECT(desk.commit(made->save, 1)->states == all(SaveState::STORED, 1));
    for (const uint64_t id : std::vector<uint64_t>{1, 2, 3, 4}) {
      EXPECT(desk.pool.lookup({id}) == 1);
    }
    EXPECT(desk.pool.directory.release(held.id, ++desk.pool.now));
    EXPECT(desk.is_idle());
  }
}

TEST(other_requests_are_left_and_change_nothing) {
  Desk desk;
  EXPECT(!desk.reserve(run_of(3, 1), {1}));        // no form
  EXPECT(!desk.reserve(run_of(1, 1, 1), {1}));     // a group of chunks alone
  EXPECT(!desk.reserve(run_of(1, 1, 2), {1}));     // no such group
  EXPECT(!desk.reserve(run_of(1, 1, 0, 1), {1}));  // a share
  EXPECT(!desk.reserve(run_of(1, 0), {}));
  EXPECT(!desk.reserve(run_of(1, 2), {1}));
  EXPECT(!desk.reserve(run_of(2, 1), {1}));
  EXPECT(!desk.reserve(run_of(1, UINT32_MAX), {1}));
  EXPECT(!desk.reserve(run_of(1, 7), {1, 2, 3, 4, 5, 6, 7}));  // longer than is served at once
  EXPECT(!desk.reserve({}, {1}));
  std::vector<uint8_t> two = run_of(1, 1);
  two.insert(two.end(), two.begin(), two.end());
  EXPECT(!desk.reserve(two, {1, 2}));
  EXPECT(desk.is_idle());
  const auto made = desk.reserve(run_of(1, 3), {1, 2, 3});
  EXPECT(!desk.commit(made->save + 1, 1));
  EXPECT(!desk.commit(made->save, 0));
  EXPECT(!desk.commit(made->save, 4));                // more than are reserved
  EXPECT(!desk.commit(made->save, 1, TOKENS - 1));    // tokens of no whole chunk
  EXPECT(!desk.commit(made->save, 1, TOKENS, 12));    // no scope is so short
  EXPECT(!desk.commit(made->save, 1, TOKENS, 260));   // nor so long
  EXPECT(!desk.desk.commit(desk.writer, made->save, std::vector<uint8_t>(7), {}, {}, ++desk.pool.now));
  desk.writer.connection = 6;
  EXPECT(!desk.commit(made->save, 1));
  desk.writer.connection = 5;
  desk.pool.now = desk.saves.find(made->save, 5)->deadline_ns - 1;
  EXPECT(!desk.commit(made->save, 1));  // its time is over
  EXPECT(desk.saves.size() == 1 && desk.pool.lookup({1}) == 0);
  for (const PlainSave& save : desk.saves.take_owner(5)) {
    desk.pool.directory.end_reservation(save.holders.front(), ++desk.pool.now);
  }
  EXPECT(desk.is_idle());
}

TEST(a_connection_has_as_many_saves_as_it_may) {
  Desk desk;
  EXPECT(desk.reserve(run_of(1, 1), {1}));
  desk.saves.count_others(5, 1);
  EXPECT(!desk.reserve(run_of(1, 1), {2}));
  desk.saves.count_others(5, -1);
  EXPECT(desk.reserve(run_of(1, 1), {2}));
  EXPECT(!desk.reserve(run_of(1, 1), {3}));
  EXPECT(desk.pool.directory.verify().empty() && desk.saves.verify().empty());
}

TEST(who_must_wait_for_room_has_nothing_meanwhile) {
  Desk desk;
  Pool& pool = desk.pool;
  std::vector<uint64_t> all_ids(64);
  for (uint64_t id = 0; id < 64; ++id) {
    all_ids[id] = 100 + id;
  }
  EXPECT(pool.store(all_ids) == 64);
  const auto pin = pool.directory.pin_key(pool.owner, key_of(163));  // the leaf: nothing can be evicted, but soon
  EXPECT(pin.has_value());
  EXPECT(!desk.reserve(run_of(1, 2), {1, 2}));
  EXPECT(pool.directory.stats().reservations == 0 && desk.saves.size() == 0);
  EXPECT(pool.directory.unpin(*pin));
  const auto made = desk.reserve(run_of(1, 2), {1, 2});
  EXPECT(made && made->slots.states == all(SaveState::RESERVED, 2) && pool.directory.evicted_chunks() == 2);
  EXPECT(pool.directory.verify().empty());
}

TEST(token_ids_are_left_out_where_they_are_not_kept) {
  Desk desk(64 * CHUNK, false);
  const auto made = desk.reserve(run_of(1, 1), {1});
  EXPECT(desk.commit(made->save, 1, 3)->states == all(SaveState::STORED, 1));
  EXPECT(desk.pool.directory.tokens_of(key_of(1)).empty());
  EXPECT(desk.is_idle());
}
