// What of the upper tier is worth a place in the lower one, and how retention goes on in both of them.
#include "tests/directory/directory_tiers.h"
#include "tests/harness.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND = 1'000'000'000;

uint64_t declined(const Tiers& tiers, Declined reason) {
  return tiers.memory.directory.stats().declined[static_cast<size_t>(reason)];
}

bool use(Tiers& tiers, const std::vector<uint64_t>& ids, uint64_t now_ns) {
  tiers.memory.now = now_ns;
  const Hold hold = tiers.memory.directory.acquire(tiers.memory.owner, pack(ids).data(), ids.size(), now_ns);
  return hold.chunks == ids.size() && tiers.memory.directory.release(hold.id, now_ns);
}

void retain(Tiers& tiers, const std::vector<uint64_t>& ids, Retention retention) {
  tiers.files.retention().ledger().cap(1.0);
  tiers.memory.directory.retention().ledger().cap(1.0);
  static_cast<void>(tiers.memory.directory.retention().retain(tiers.memory.owner, pack(ids).data(),
                                                  std::vector<Retention>(ids.size(), retention), ++tiers.memory.now));
}

// What a demotion of the daemon does beside the writing.
void keep_below(Tiers& tiers, const std::vector<uint64_t>& ids, Retention retention) {
  static_cast<void>(tiers.files.retention().retain(tiers.memory.owner, pack(ids).data(), std::vector<Retention>(ids.size(), retention),
                                       tiers.memory.now));
}

size_t demote_all(Tiers& tiers) {
  size_t written = 0;
  while (const size_t chunks = tiers.demote()) {
    written += chunks;
  }
  return written;
}

void expire(Tiers& tiers, uint64_t now_ns) {
  tiers.memory.directory.retention().expire_due(now_ns);
  tiers.files.retention().expire_due(now_ns);
}

}  // namespace

TEST(a_tier_smaller_than_memory_is_not_written_without_end) {
  Tiers tiers(32, 8);
  for (uint64_t id = 1; id <= 32; ++id) {
    EXPECT(tiers.memory.store({id}) == 1);
  }
  size_t written = 0;
  for (size_t round = 0; round < 200; ++round) {
    written += tiers.demote();
  }
  EXPECT(written == 32);
  EXPECT(tiers.files.stats().chunks == 8);
  EXPECT(tiers.memory.directory.count_unsaved() == 24);
  EXPECT(tiers.is_sound());
  // What was used since is worth a place again, once.
  EXPECT(use(tiers, {1}, ++tiers.memory.now));
  EXPECT(tiers.demote() == 1);
  EXPECT(tiers.demote() == 0);
  // What is not written again is not protected either, or nothing could ever be stored.
  tiers.memory.directory.room().protect_unsaved(true);
  EXPECT(tiers.memory.store({101}) == 1);
  tiers.memory.directory.room().protect_unsaved(false);
  EXPECT(declined(tiers, Declined::WRITTEN_BEFORE) == 1);
  // A planned stop writes each of them once more.
  EXPECT(tiers.memory.directory.demotion().forget_written(0, UINT32_MAX) == 0);
  written = 0;
  for (size_t round = 0; round < 200; ++round) {
    written += tiers.demote();
  }
  EXPECT(written >= 24 && written <= 32);
  EXPECT(tiers.is_sound());
}

TEST(each_step_admits_a_part_of_the_one_before) {
  Tiers tiers(64, 128, PolicyKind::CLASS_QUEUES);
  EXPECT(!tiers.memory.directory.demotion().knows_chances());
  // What belongs to a conversation comes again, every time; what stands alone never does.
  uint64_t now = SECOND;
  for (uint64_t round = 0; round < 600; ++round) {
    now += SECOND;
    EXPECT(tiers.memory.store({1000 + round}) == 1);
    if (round % 4 == 0) {
      EXPECT(tiers.memory.store({1, 2, 3, 4}) == 4);
      EXPECT(use(tiers, {1, 2, 3, 4}, now));
    }
    tiers.memory.now = now;
  }
  EXPECT(tiers.memory.directory.demotion().knows_chances());
  const auto writes = [&](Admitted admitted, double least_chance) {
    tiers.memory.directory.demotion().admit(admitted, least_chance);
    return demote_all(tiers);
  };
  EXPECT(writes(Admitted::NOTHING, 0) == 0);
  EXPECT(writes(Admitted::USED_AGAIN, 0) == 4);
  EXPECT(writes(Admitted::LIKELY, 0.9) == 0);
  EXPECT(tiers.memory.store({5001}) == 1);
  EXPECT(writes(Admitted::LIKELY, 0.9) == 0);
  EXPECT(writes(Admitted::LIKELY, 0) > 0);  // as unlikely as they are
  EXPECT(tiers.memory.directory.count_unsaved() == 0);
  EXPECT(tiers.is_sound());
}

TEST(chunks_refused_by_the_lower_tier_are_counted_by_reason) {
  Tiers tiers(4, 16);
  const auto lose = [&](Admitted admitted, uint64_t first) {
    tiers.memory.directory.demotion().admit(admitted, 0.5);
    EXPECT(tiers.memory.store(range(first, 4)) == 4);
  };
  EXPECT(tiers.memory.store(range(1, 4)) == 4);
  lose(Admitted::ALL, 11);
  lose(Admitted::LIKELY, 21);
  lose(Admitted::USED_AGAIN, 31);
  lose(Admitted::NOTHING, 41);
  for (const Declined reason : {Declined::UNREADY, Declined::UNLIKELY, Declined::USED_ONCE, Declined::NO_BUDGET}) {
    EXPECT(declined(tiers, reason) == 4);
  }
  EXPECT(declined(tiers, Declined::WRITTEN_BEFORE) == 0);
  EXPECT(tiers.memory.directory.stats().evicted_chunks == 16);
  EXPECT(tiers.is_sound());
}

TEST(equal_retention_in_both_tiers_expires_in_both_after_the_last_use) {
  Tiers tiers(8, 16);
  tiers.memory.now = 10 * SECOND;
  EXPECT(tiers.memory.store({1, 2}) == 2);
  retain(tiers, {1, 2}, {80, 30'000});
  tiers.memory.now = 25 * SECOND;  // to be written is no use
  EXPECT(demote_all(tiers) == 2);
  keep_below(tiers, {1, 2}, {80, 30'000});
  EXPECT(use(tiers, {1, 2}, 35 * SECOND));
  expire(tiers, 60 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(1)) == (Retention{80, 30'000}));
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == (Retention{80, 30'000}));
  const auto next = tiers.files.retention().ledger().next_ns();
  EXPECT(next && *next > 60 * SECOND && *next <= 66 * SECOND);
  tiers.memory.directory.retention().expire_due(66 * SECOND);
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.files.stats().retention.expired == 2);
  EXPECT(tiers.files.retention().ledger().take_expired().size() == 2);
  EXPECT(tiers.files.retention().ledger().take_expired().empty());
  EXPECT(!tiers.memory.directory.retention().ledger().next_ns() && !tiers.files.retention().ledger().next_ns());
  EXPECT(tiers.is_sound());
}

TEST(the_time_of_a_chunk_that_leaves_memory_runs_on_from_its_last_use) {
  Tiers tiers(4, 16);
  tiers.memory.now = 10 * SECOND;
  EXPECT(tiers.memory.store({1, 2}) == 2);
  retain(tiers, {1, 2}, {80, 30'000});
  tiers.memory.now = 20 * SECOND;
  EXPECT(demote_all(tiers) == 2);
  EXPECT(use(tiers, {1, 2}, 30 * SECOND));
  tiers.memory.now = 55 * SECOND;
  EXPECT(tiers.memory.store(range(11, 2)) == 2);
  retain(tiers, range(11, 2), {90, 0});
  EXPECT(tiers.memory.store(range(21, 2), 12) == 2);  // what was kept less goes
  EXPECT(tiers.memory.acquire({1, 2}).id == 0);
  EXPECT(tiers.files.retention().of(key_of(2)) == (Retention{80, 30'000}));
  expire(tiers, 59 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(2)) == (Retention{80, 30'000}));
  expire(tiers, 61 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(2)) == Retention{});
  EXPECT(tiers.is_sound());
}

TEST(the_retention_of_a_promoted_chunk_starts_again_at_that_use) {
  Tiers tiers(4, 16);
  tiers.memory.now = 10 * SECOND;
  EXPECT(tiers.memory.store({1}) == 1);
  retain(tiers, {1}, {80, 30'000});
  EXPECT(tiers.demote() == 1);
  keep_below(tiers, {1}, {80, 30'000});
  EXPECT(flush(tiers.memory.directory, std::nullopt, 11 * SECOND).chunks == 1);
  tiers.memory.now = 35 * SECOND;
  EXPECT(tiers.load({1}) == 1);
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == (Retention{80, 30'000}));
  expire(tiers, 64 * SECOND);
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == (Retention{80, 30'000}));
  EXPECT(tiers.files.retention().of(key_of(1)) == (Retention{80, 30'000}));
  expire(tiers, 66 * SECOND);
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.is_sound());
}

TEST(a_retention_request_for_dram_alone_does_not_change_the_lower_tier) {
  Tiers tiers(8, 16);
  tiers.memory.now = 10 * SECOND;
  EXPECT(tiers.memory.store({1}) == 1);
  EXPECT(tiers.demote() == 1);
  retain(tiers, {1}, {0, 5'000});
  keep_below(tiers, {1}, {80, 30'000});
  expire(tiers, 16 * SECOND);
  EXPECT(tiers.memory.directory.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.files.retention().of(key_of(1)) == (Retention{80, 30'000}));
  expire(tiers, 41 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.is_sound());
}

TEST(a_chunk_in_use_does_not_expire_in_the_lower_tier_however_long_dram_saw_no_use) {
  Tiers tiers(8, 16);
  tiers.memory.now = 10 * SECOND;
  EXPECT(tiers.memory.store({1}) == 1);
  retain(tiers, {1}, {80, 30'000});
  EXPECT(tiers.demote() == 1);
  keep_below(tiers, {1}, {80, 30'000});
  const Hold hold = tiers.memory.acquire({1});
  tiers.files.retention().expire_due(500 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(1)) == (Retention{80, 30'000}));
  EXPECT(tiers.memory.directory.release(hold.id, 500 * SECOND));
  expire(tiers, 529 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(1)) == (Retention{80, 30'000}));
  expire(tiers, 531 * SECOND);
  EXPECT(tiers.files.retention().of(key_of(1)) == Retention{});
  EXPECT(tiers.is_sound());
}

TEST(chunks_refused_by_the_lower_tier_keep_no_others_out) {
  Tiers tiers(8, 8);
  Pool& pool = tiers.memory;
  const ClassId unfit = *pool.directory.add_class(2 * CHUNK, EXTENTS, false);
  const auto keys = pack({1, 2});
  const Reservation made = pool.directory.reserve(pool.owner, unfit, std::nullopt, keys.data(), 2, ++pool.now);
  const std::vector<uint32_t> sums(2 * EXTENTS);
  EXPECT(all_are(pool.directory.commit(made.id, 0, 2, sums.data()), SaveState::STORED));
  EXPECT(pool.directory.end_reservation(made.id, ++pool.now));
  EXPECT(tiers.demote() == 0);
  EXPECT(pool.directory.unsaved_bytes() == 0);
  EXPECT(pool.store({11, 12, 13}) == 3);
  EXPECT(tiers.demote() == 3);
  EXPECT(tiers.demote() == 0);
  EXPECT(pool.directory.count_unsaved() == 2);
  pool.directory.room().protect_unsaved(true);
  EXPECT(pool.store({21, 22, 23}) == 3);
  EXPECT(tiers.is_sound());
}
