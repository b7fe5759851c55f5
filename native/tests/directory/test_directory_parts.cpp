// Requests in parts: what a chain gets must not depend on how many parts it is reserved, held, ended or expired in.
#include <random>

#include "tests/directory_pool.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t CHUNKS = 64;
const HolderId ONE(1);

std::optional<ChunkKey> key_before(const std::vector<uint64_t>& ids, size_t index) {
  return index == 0 ? std::nullopt : std::optional(key_of(ids[index - 1]));
}

// Reserves the chain in parts of up to `limit` chunks.
Reservation reserve_in_parts(Pool& pool, const std::vector<uint64_t>& ids, size_t limit, HolderId holder = {}) {
  const std::vector<uint8_t> keys = pack(ids);
  Reservation all;
  ++pool.now;
  while (all.states.size() < ids.size()) {
    const size_t first = all.states.size();
    const uint8_t* rest = keys.data() + first * KEY_BYTES;
    const size_t count = ids.size() - first;
    const Reservation part = all.id != 0 ? pool.directory.reserve_more(all.id, rest, count, pool.now, {limit, false})
                                         : pool.directory.reserve(pool.owner, pool.small, key_before(ids, first), rest, count,
                                                                  pool.now, holder, {limit, false});
    EXPECT(!part.states.empty());
    all.id = part.id;
    all.states.insert(all.states.end(), part.states.begin(), part.states.end());
    all.offsets.insert(all.offsets.end(), part.offsets.begin(), part.offsets.end());
    all.generations.insert(all.generations.end(), part.generations.begin(), part.generations.end());
    EXPECT(pool.is_sound());
  }
  return all;
}

}  // namespace

TEST(a_chain_gets_the_same_in_parts_as_at_once) {
  std::mt19937_64 random(seed());
  for (int round = 0; round < 60; ++round) {
    Pool whole(CHUNKS * CHUNK);
    Pool parts(CHUNKS * CHUNK);
    for (Pool* pool : {&whole, &parts}) {
      pool->directory.bound_chains(48);
      pool->directory.shares().limit(round % 3 == 0 ? 0.5 : 1.0);
    }
    for (int step = 0; step < 30; ++step) {
      const uint64_t prompt = random() % 6;
      std::vector<uint64_t> ids = range(1000 * prompt, 1 + random() % 60);
      const size_t limit = 1 + random() % 9;
      const Reservation one = whole.directory.reserve(whole.owner, whole.small, std::nullopt, pack(ids).data(), ids.size(),
                                                      ++whole.now, ONE);
      const Reservation other = reserve_in_parts(parts, ids, limit, ONE);
      EXPECT(one.states == other.states);
      const auto reserved = static_cast<size_t>(std::count(one.states.begin(), one.states.end(), 1));
      const size_t stored = reserved == 0 ? 0 : random() % (reserved + 1);
      if (one.id != 0) {
        EXPECT(whole.commit(one, 0, stored) == parts.commit(other, 0, stored));
        EXPECT(whole.directory.end_reservation(one.id, ++whole.now));
      }
      whole.now = parts.now = whole.now + 1;
      while (!parts.directory.end_part(other.id, limit, parts.now)) {
        EXPECT(parts.is_sound());
      }
      EXPECT(whole.directory.stats().answers == parts.directory.stats().answers);
      EXPECT(whole.directory.stats().used_bytes == parts.directory.stats().used_bytes);
      EXPECT(whole.is_sound() && parts.is_sound());
    }
  }
}

TEST(a_reservation_that_waits_for_room_keeps_its_slots) {
  Pool pool(CHUNKS * CHUNK, 1000, false, CHUNK * 16);
  pool.directory.mark_segment_ready(0);
  const std::vector<uint8_t> keys = pack(range(0, CHUNKS / 2));
  const size_t n = CHUNKS / 2;
  const Reservation first =
      pool.directory.reserve(pool.owner, pool.small, std::nullopt, keys.data(), n, ++pool.now, {}, {SIZE_MAX, true});
  const size_t had = first.states.size();
  EXPECT(had > 0 && had < n && all_are(first.states, SaveState::RESERVED));
  const uint8_t* const further = &keys[had * KEY_BYTES];
  EXPECT(pool.directory.reserve_more(first.id, further, n - had, pool.now, {SIZE_MAX, true}).states.empty());
  EXPECT(pool.directory.stats().answers[static_cast<size_t>(SaveState::NOT_READY)] == 0);  // no chunk got this answer
  for (uint32_t segment = 1; segment < pool.geometry.arena.segments; ++segment) {
    pool.directory.mark_segment_ready(segment);
  }
  const Reservation rest = pool.directory.reserve_more(first.id, further, n - had, pool.now, {SIZE_MAX, true});
  EXPECT(rest.id == first.id && rest.states.size() == n - had && all_are(rest.states, SaveState::RESERVED));
  EXPECT(pool.commit(first, 0, n) == std::vector<uint8_t>(n, static_cast<uint8_t>(SaveState::STORED)));
  EXPECT(pool.directory.end_reservation(first.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(a_reservation_expires_in_parts) {
  Pool pool(CHUNKS * CHUNK);
  pool.directory.shares().limit(0.5);
  EXPECT(pool.store(range(0, 8)) == 8);
  const Reservation made = reserve_in_parts(pool, range(0, 24), 5, ONE);
  EXPECT(pool.commit(made, 0, 3).size() == 3);
  size_t parts = 0;
  while (!pool.directory.expire_part(made.id, 4, ++pool.now)) {
    ++parts;
    EXPECT(pool.is_sound());
    EXPECT(all_are(pool.commit(made, 3, 13), SaveState::EXPIRED));
    EXPECT(all_are(pool.directory.reserve_more(made.id, pack({90}).data(), 1, pool.now).states, SaveState::NO_PARENT));
  }
  EXPECT(parts == 5);
  EXPECT(pool.directory.expire_part(made.id, 4, ++pool.now));
  EXPECT(pool.directory.stats().zombies == 13);
  EXPECT(pool.directory.shares().accounts().find(ONE)->bytes.zombies == 13 * CHUNK);
  EXPECT(pool.lookup(range(0, 24)) == 11);
  EXPECT(pool.is_sound());
  EXPECT(!pool.directory.end_part(made.id, 6, ++pool.now));
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.end_part(made.id, 7, ++pool.now));
  EXPECT(pool.directory.stats().zombies == 0);
  EXPECT(pool.directory.shares().accounts().find(ONE) == nullptr);
  EXPECT(pool.is_sound());
}

TEST(a_hold_covers_more_and_less_of_its_chain) {
  Pool pool(CHUNKS * CHUNK);
  EXPECT(pool.store(range(0, 20)) == 20);
  const Hold hold = pool.acquire(range(0, 4));
  EXPECT(pool.directory.extend(hold.id, pack(range(4, 8)).data(), 8, ++pool.now) == 8);
  EXPECT(pool.directory.extend(hold.id, pack({500}).data(), 1, ++pool.now) == 0);
  EXPECT(pool.directory.extend(hold.id, pack(range(0, 4)).data(), 4, ++pool.now) == 0);  // they do not follow its last
  EXPECT(pool.directory.columns({hold.id})->generations.size() == 12);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.shorten(hold.id, 5, ++pool.now));
  EXPECT(pool.directory.columns({hold.id})->generations.size() == 5);
  EXPECT(pool.directory.stats().held == 5);
  EXPECT(pool.directory.holds().count_whole({hold.id}) == std::vector<size_t>{5});
  EXPECT(!pool.directory.shorten(hold.id, 0, ++pool.now));
  EXPECT(pool.directory.shares().charge({hold.id}, ONE));
  EXPECT(pool.directory.extend(hold.id, pack(range(5, 2)).data(), 2, ++pool.now) == 0);  // it counts already
  EXPECT(!pool.directory.shorten(hold.id, 2, ++pool.now));
  EXPECT(pool.directory.extend(hold.id + 999, pack({5}).data(), 1, ++pool.now) == 0);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.release(hold.id, ++pool.now));
  EXPECT(pool.is_sound());
}

TEST(a_hold_ends_in_parts) {
  Pool pool(CHUNKS * CHUNK);
  pool.directory.shares().limit(0.5);
  EXPECT(pool.store(range(0, 20)) == 20);
  const Hold hold = pool.acquire(range(0, 20));
  EXPECT(pool.directory.shares().charge({hold.id}, ONE));
  EXPECT(pool.directory.release_part(hold.id, 8, ++pool.now) == 8);
  EXPECT(pool.directory.stats().held == 12);
  EXPECT(pool.directory.shares().accounts().find(ONE)->bytes.leased == 12 * CHUNK);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.release_part(hold.id, 8, ++pool.now) == 8);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.release_part(hold.id, 8, ++pool.now) == 4);
  EXPECT(pool.directory.release_part(hold.id, 8, ++pool.now) == 0);
  EXPECT(pool.directory.shares().accounts().find(ONE) == nullptr);
  EXPECT(pool.directory.stats().held == 0);
  EXPECT(pool.is_sound());
}

TEST(descendants_can_be_held_without_their_chunk) {
  Pool pool(CHUNKS * CHUNK);
  EXPECT(pool.store(range(0, 10)) == 10);
  const auto parent = std::optional(key_of(3));
  const Hold behind = pool.directory.acquire(pool.owner, pack(range(4, 20)).data(), 20, ++pool.now, parent);
  EXPECT(behind.chunks == 6);
  EXPECT(pool.directory.stats().held == 6);
  EXPECT(pool.directory.acquire(pool.owner, pack(range(5, 2)).data(), 2, ++pool.now, parent).id == 0);
  EXPECT(pool.directory.acquire(pool.owner, pack(range(4, 2)).data(), 2, ++pool.now, key_of(77)).id == 0);
  EXPECT(pool.is_sound());
  EXPECT(pool.directory.release(behind.id, ++pool.now));
  EXPECT(pool.is_sound());
  // Others come: leaves go first, whatever was used last.
  EXPECT(pool.store(range(100, CHUNKS - 3)) == CHUNKS - 3);
  EXPECT(pool.lookup(range(0, 10)) == 3);
  EXPECT(pool.is_sound());
}
