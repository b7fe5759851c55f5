// A directory that goes on with what a former life has left: what is taken, in which order it goes, what is withheld, and what is not
// believed.
#include <chrono>
#include <ctime>
#include <functional>

#include "tests/directory/random_life.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t SECOND_NS = 1'000'000'000;

DirectoryGeometry sizes(uint64_t chunks = 48) { return *DirectoryGeometry::plan(chunks * CHUNK, 4 * CHUNK, 64); }

std::unique_ptr<Pool> first_life(const DirectoryGeometry& geometry) {
  auto pool = new_life(geometry);
  make_ready(*pool);
  return pool;
}

// The order in which chunks are evicted, by making room for others.
std::vector<uint64_t> evicted_first(Pool& pool, const std::vector<uint64_t>& ids, uint64_t fresh, size_t count) {
  std::vector<uint64_t> gone;
  std::set<uint64_t> left(ids.begin(), ids.end());
  for (uint64_t id = fresh; id < fresh + count; ++id) {
    EXPECT(pool.store({id}) == 1);
    for (auto at = left.begin(); at != left.end();) {
      const bool is_here = pool.view->find(key_of(*at)).has_value();
      if (!is_here) {
        gone.push_back(*at);
      }
      at = is_here ? std::next(at) : left.erase(at);
    }
  }
  return gone;
}

}  // namespace

TEST(what_was_ready_is_found_where_it_lies) {
  const auto former = first_life(sizes());
  EXPECT(former->store(range(10, 5)) == 5);
  EXPECT(former->store(range(30, 3), 11) == 3);
  const KeptState was = state_of(*former);
  const auto pool = new_life(former->geometry, former->arena);
  const FormerCounts counts = take_over(*pool, *former);
  EXPECT(counts.taken == 8 && counts.taken_bytes == 8 * CHUNK);
  EXPECT(counts.damaged + counts.unpublished + counts.orphaned + counts.unplaced + counts.unknown + counts.withheld == 0);
  EXPECT(pool->lookup(range(10, 5)) == 5 && pool->lookup({10, 11, 30, 31, 32}) == 5);
  EXPECT(state_of(*pool).ready == was.ready);
  EXPECT(pool->is_sound());
  const Hold hold = pool->acquire(range(10, 5));
  EXPECT(hold.chunks == 5);
  EXPECT(pool->directory.release(hold.id, ++pool->now));
  make_ready(*pool);
  EXPECT(pool->store(range(10, 7)) == 7);
  EXPECT(pool->is_sound());
}

TEST(what_was_used_last_goes_last_as_before) {
  const auto former = first_life(sizes(12));
  for (const uint64_t id : range(1, 12)) {
    EXPECT(former->store({id}) == 1);
  }
  for (const uint64_t id : std::vector<uint64_t>{3, 1}) {
    const Hold hold = former->acquire({id});
    EXPECT(former->directory.release(hold.id, ++former->now));
  }
  const auto ids = range(1, 12);
  const auto pool = new_life(former->geometry, former->arena);
  EXPECT(take_over(*pool, *former).taken == 12);
  make_ready(*pool);
  EXPECT(pool->is_sound());
  EXPECT((evicted_first(*pool, ids, 100, 12) == std::vector<uint64_t>{2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 3, 1}));
}

// Prompts that come again at their own times, and many that never do: a policy that learns has something to learn.
void use_for_a_while(Pool& pool, std::mt19937_64& random, int requests) {
  for (int request = 0; request < requests; ++request) {
    pool.now += SECOND_NS / 4;
    const uint64_t prompt = random() % 3 == 0 ? 1000 + random() % 100'000 : random() % 40;
    const auto ids = range(1 + prompt * 8, 1 + prompt % 6);
    const Hold hold = pool.acquire(ids);
    EXPECT(hold.id == 0 || pool.directory.release(hold.id, ++pool.now));
    EXPECT(pool.store(ids) == ids.size());
    if (random() % 16 == 0) {
      const Retention retention{static_cast<uint8_t>(random() % 101), random() % 2 == 0 ? 0 : 60'000U};
      static_cast<void>(pool.directory.retention().retain(pool.owner, pack(ids).data(), std::vector(ids.size(), retention), ++pool.now));
    }
  }
}

// What of a pool goes when, while others are stored.
std::vector<std::pair<uint64_t, uint64_t>> removals(Pool& pool, uint64_t others) {
  std::vector<std::pair<uint64_t, uint64_t>> gone;
  auto left = state_of(pool).ready;
  for (uint64_t other = 0; other < others; ++other) {
    EXPECT(pool.store({10'000'000 + other}) == 1);
    const auto is = state_of(pool).ready;
    std::erase_if(left, [&](const auto& one) {
      const bool is_here = is.contains(one.first);
      if (!is_here) {
        gone.emplace_back(other, one.first);
      }
      return !is_here;
    });
  }
  return gone;
}

std::map<uint64_t, uint64_t> last_uses(const Pool& pool) {
  std::map<uint64_t, uint64_t> uses;
  for (uint32_t number = 0; number < pool.directory.places(); ++number) {
    const ChunkRecord& record = pool.directory.record(RecordId(number));
    if (record.state == ChunkState::READY) {
      uses[record.key.words[1]] = record.last_access_ns;
    }
  }
  return uses;
}

void expect_the_same_order(PolicyKind policy) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int trial = 0; trial < 20; ++trial) {
    const DirectoryGeometry geometry = *DirectoryGeometry::plan(48 * CHUNK, 4 * CHUNK, 64);
    const auto former = new_life(geometry, nullptr, policy);
    make_ready(*former);
    use_for_a_while(*former, random, 150 + static_cast<int>(random() % 800));
    const auto pool = new_life(geometry, former->arena, policy);
    EXPECT(take_over(*pool, *former).taken == former->directory.stats().chunks);
    make_ready(*pool);
    for (const auto& [id, kept] : state_of(*former).ready) {
      EXPECT(pool->directory.retention().of(key_of(id)) == former->directory.retention().of(key_of(id)));
    }
    EXPECT(last_uses(*pool) == last_uses(*former));
    EXPECT(pool->directory.stats().policy.is_by_age == former->directory.stats().policy.is_by_age);
    EXPECT(removals(*pool, 60) == removals(*former, 60));
    EXPECT(pool->is_sound());
  }
}

TEST(by_age_chunks_go_in_the_order_in_which_they_would_have_gone) { expect_the_same_order(PolicyKind::LRU); }

TEST(by_what_was_learned_they_do_too) { expect_the_same_order(PolicyKind::CLASS_QUEUES); }

TEST(what_was_held_counts_as_used_until_the_end) {
  const auto former = first_life(sizes(3));
  EXPECT(former->store({1}) == 1 && former->store({2}) == 1 && former->store({3}) == 1);
  EXPECT(former->acquire({1}).chunks == 1);
  const auto pool = new_life(former->geometry, former->arena);
  EXPECT(take_over(*pool, *former).taken == 3);
  make_ready(*pool);
  EXPECT(pool->directory.stats().held == 0);
  EXPECT((evicted_first(*pool, {1, 2, 3}, 100, 3) == std::vector<uint64_t>{2, 3, 1}));
}

TEST(a_priority_has_the_time_that_it_had_left) {
  const auto former = first_life(sizes());
  former->now = 100 * SECOND_NS;
  EXPECT(former->store(range(1, 2)) == 2 && former->store({9}) == 1);
  const std::vector<Retention> ten_seconds(2, Retention{80, 10'000});
  static_cast<void>(former->directory.retention().retain(former->owner, pack(range(1, 2)).data(), ten_seconds, former->now));
  const auto pool = new_life(former->geometry, former->arena);
  EXPECT(take_over(*pool, former->index, former->records, 106 * SECOND_NS).taken == 3);
  EXPECT(pool->directory.retention().of(key_of(2)) == (Retention{80, 10'000}));
  EXPECT(pool->directory.retention().of(key_of(9)) == Retention{});
  EXPECT(pool->directory.stats().retention.chunks == 2);
  EXPECT(pool->is_sound());
  pool->directory.retention().expire_due(109 * SECOND_NS);
  EXPECT(pool->directory.stats().retention.chunks == 2);
  pool->directory.retention().expire_due(111 * SECOND_NS);
  pool->directory.retention().expire_due(112 * SECOND_NS);
  EXPECT(pool->directory.stats().retention.chunks == 0);
  EXPECT(pool->is_sound());
}

TEST(what_somebody_may_still_write_to_is_given_to_nobody) {
  const auto former = first_life(sizes(6));
  const auto reserve = [&](Pool& pool, uint64_t id, uint32_t holder, ReserveBounds bounds = {}) {
    const auto keys = pack({id});
    return pool.directory.reserve(pool.owner, pool.small, std::nullopt, keys.data(), 1, ++pool.now, HolderId(holder), bounds);
  };
  const Reservation writing = reserve(*former, 1, 7);
  const Reservation expired = reserve(*former, 2, 8);
  EXPECT(former->directory.expire_part(expired.id, SIZE_MAX, ++former->now));
  const Reservation joint = reserve(*former, 3, 7, {.is_joint = true});
  EXPECT(former->store({4}) == 1);
  const Reservation ended = reserve(*former, 5, 7);
  EXPECT(former->directory.end_reservation(ended.id, ++former->now));
  const std::set<uint64_t> pages{writing.offsets[0], expired.offsets[0], joint.offsets[0]};

  auto pool = new_life(former->geometry, former->arena);
  FormerCounts counts = take_over(*pool, *former);
  EXPECT(counts.taken == 1 && counts.withheld == 3 && counts.withheld_bytes == 3 * CHUNK && counts.damaged == 0);
  pool->directory.rename_withheld(HolderId(), HolderId(50));
  EXPECT(pool->directory.stats().withheld == 3 && pool->is_sound());
  // The next life dies too, before any of them is known to have ended.
  const auto next = new_life(pool->geometry, pool->arena);
  counts = take_over(*next, *pool);
  EXPECT(counts.taken == 1 && counts.withheld == 3);
  EXPECT(next->is_sound());
  const auto& withheld = next->directory.withheld().by_holder();
  EXPECT(withheld.size() == 3 && withheld.at(7).records.size() == 1 && withheld.at(8).bytes == CHUNK);
  EXPECT(withheld.at(50).records.size() == 1);
  make_ready(*next);
  for (uint64_t id = 100; id < 120; ++id) {
    const Reservation made = next->reserve({id});
    EXPECT(made.states[0] == static_cast<uint8_t>(SaveState::RESERVED) && !pages.contains(made.offsets[0]));
    static_cast<void>(next->commit(made, 0, 1));
    EXPECT(next->directory.end_reservation(made.id, ++next->now));
  }
  EXPECT(next->directory.stats().withheld == 3 && next->is_sound());
  EXPECT(next->directory.release_withheld(HolderId(9)) == 0);
  EXPECT(next->directory.release_withheld(HolderId(7)) == 1 && next->directory.release_withheld(HolderId(7)) == 0);
  EXPECT(next->directory.release_withheld(HolderId()) == 0 && next->directory.release_withheld(HolderId(50)) == 1);
  EXPECT(next->directory.release_withheld(HolderId(8)) == 1);
  EXPECT(next->directory.stats().withheld == 0 && next->directory.stats().withheld_bytes == 0 && next->directory.stats().zombies == 0);
  EXPECT(next->is_sound());
  EXPECT(next->store(range(200, 6)) == 6);
}

TEST(generations_go_on) {
  const auto former = first_life(sizes());
  const Reservation last = former->reserve({1});
  EXPECT(former->directory.end_reservation(last.id, ++former->now));
  const auto pool = new_life(former->geometry, former->arena);
  EXPECT(take_over(*pool, *former).taken == 0);
  make_ready(*pool);
  EXPECT(pool->reserve({2}).generations[0] > last.generations[0]);
  EXPECT(pool->is_sound());
}

TEST(a_life_of_other_sizes_or_format_is_refused) {
  const auto former = first_life(sizes());
  EXPECT(former->store({1}) == 1);
  const auto refusal = [&](const DirectoryGeometry& geometry) { return FormerLife::why_refused(former->index, former->records, geometry); };
  EXPECT(refusal(sizes()) == nullptr);
  EXPECT(refusal(sizes(49)) != nullptr);
  EXPECT(refusal(*DirectoryGeometry::plan(48 * CHUNK, 4 * CHUNK, 65)) != nullptr);
  EXPECT(refusal(*DirectoryGeometry::plan(48 * CHUNK, 8 * CHUNK, 64)) != nullptr);
  EXPECT(FormerLife::why_refused(nullptr, former->records, sizes()) != nullptr);
  EXPECT(FormerLife::why_refused(former->index, nullptr, sizes()) != nullptr);
  EXPECT(FormerLife::why_refused(former->records, former->index, sizes()) != nullptr);
  reinterpret_cast<KeptHead*>(former->records->data())->version += 1;
  EXPECT(refusal(sizes()) != nullptr);
}

TEST(a_namespace_that_is_not_known_takes_its_chunks_along) {
  const auto former = first_life(sizes());
  EXPECT(former->store(range(1, 3)) == 3);
  const auto pool = new_life(former->geometry, former->arena);
  const FormerCounts counts =
      pool->directory.restore_former(FormerLife(former->index, former->records, former->geometry), std::vector{NamespaceId()}, 10);
  EXPECT(counts.taken == 0 && counts.unknown == 3);
  EXPECT(pool->is_sound());
}

// Sealed as they should be, and yet at odds with one another: somebody made them, or a checksum has been met by chance.
TEST(records_at_odds_with_one_another_are_left_out) {
  const auto former = first_life(sizes());
  EXPECT(former->store(range(1, 4)) == 4 && former->store({20}) == 1);
  const KeptState was = state_of(*former);
  const auto records_in = [](const Mapping& mapping) { return reinterpret_cast<ChunkRecord*>(mapping.data() + PAGE_BYTES); };
  const auto seals_in = [&](const Mapping& mapping) {
    return reinterpret_cast<RecordSeal*>(mapping.data() + PAGE_BYTES + 64 * sizeof(ChunkRecord));
  };
  const auto reseal = [&](const Mapping& mapping, uint32_t id) {
    const uint32_t parent = seals_in(mapping)[id].parent;
    const uint64_t above = parent < 64 ? records_in(mapping)[parent].generation : 0;
    seals_in(mapping)[id].crc = seal_of(records_in(mapping)[id], RecordId(id), above);
  };
  const auto taken_after = [&](const std::function<void(Mapping&)>& change, std::vector<uint32_t> resealed) {
    const auto copy = copy_of(*former->records);
    change(*copy);
    for (const uint32_t id : resealed) {
      reseal(*copy, id);
    }
    const auto pool = new_life(former->geometry, former->arena);
    const FormerCounts counts = take_over(*pool, former->index, copy, former->now);
    EXPECT(pool->is_sound());
    for (const auto& [id, kept] : state_of(*pool).ready) {
      EXPECT(std::ranges::any_of(was.ready, [&kept](const auto& one) { return one.second == kept; }));
    }
    return counts.taken;
  };
  EXPECT(taken_after([](Mapping&) {}, {0, 1, 2, 3, 4}) == 5);  // they are records 0 to 4, and the seals are where this test believes
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].page = records_in(m)[3].page; }, {4}) == 4);          // two of one slot
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].page = PageIndex(records_in(m)[3].page.value() + 1); }, {4}) == 4);  // amid it
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].page = PageIndex(uint64_t{1} << 40); }, {4}) == 4);   // outside of the arena
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].owner = NamespaceId(5); }, {4}) == 4);
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].key = records_in(m)[3].key; }, {4}) == 4);            // two of one key
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].generation += uint64_t{1} << 30; }, {4}) == 4);       // never given
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[3].depth = 2; }, {3}) == 4);
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[3].depth = UINT32_MAX - 1; }, {3}) == 4);
  EXPECT(taken_after([&](Mapping& m) { seals_in(m)[3].parent = 63; }, {3}) == 4);                             // there is none
  EXPECT(taken_after([&](Mapping& m) { seals_in(m)[3].parent = 1U << 31; }, {3}) == 4);
  EXPECT(taken_after([&](Mapping& m) { seals_in(m)[3].parent = 3; }, {3}) == 4);                              // its own
  const auto make_cycle = [&](Mapping& m) { seals_in(m)[1].parent = 3; };
  EXPECT(taken_after(make_cycle, {1}) == 2);
  EXPECT(taken_after([&](Mapping& m) { records_in(m)[4].touches = 255, records_in(m)[4].queue = 255, records_in(m)[4].priority = 255,
                                       records_in(m)[4].chain_kind = 255, records_in(m)[4].last_access_ns = UINT64_MAX; }, {}) == 5);
}

TEST(flipped_bits_are_a_miss_and_never_another_chunk) {
  const uint64_t seed = kvpool::testing::seed();
  std::mt19937_64 random(seed);
  const auto former = first_life(sizes());
  RandomLife life(*former, seed);
  for (int step = 0; step < 400; ++step) {
    life.step();
  }
  while (state_of(*former).ready.empty()) {  // it may just have flushed everything
    life.step();
  }
  const KeptState was = state_of(*former);
  uint64_t missing = 0;
  const int before = failures();
  for (int trial = 0; trial < 1000 && failures() == before; ++trial) {
    const auto index = copy_of(*former->index);
    const auto records = copy_of(*former->records);
    for (uint64_t flips = 1 + random() % 8; flips > 0; --flips) {
      Mapping& hit = random() % 4 == 0 ? *index : *records;
      hit.data()[random() % hit.size()] ^= static_cast<uint8_t>(1U << random() % 8);
    }
    if (FormerLife::why_refused(index, records, former->geometry) != nullptr) {
      ++missing;
      continue;
    }
    const auto pool = new_life(former->geometry, former->arena);
    static_cast<void>(take_over(*pool, index, records, former->now));
    EXPECT(pool->is_sound());
    const KeptState is = state_of(*pool);
    missing += was.ready.size() - is.ready.size();
    for (const auto& [id, kept] : is.ready) {
      const auto found = was.ready.find(id);
      EXPECT(found != was.ready.end() && found->second.page == kept.page && found->second.generation == kept.generation);
      const auto tokens = pool->directory.tokens_of(key_of(id));
      EXPECT(tokens.empty() || std::ranges::equal(tokens, RandomLife::tokens_of(id)));
    }
    while (!pool->directory.withheld().by_holder().empty()) {
      EXPECT(pool->directory.release_withheld(HolderId(pool->directory.withheld().by_holder().begin()->first)) > 0);
    }
    make_ready(*pool);
    RandomLife next(*pool, random());
    for (int step = 0; step < 30; ++step) {
      next.step();
    }
    EXPECT(pool->is_sound());
  }
  EXPECT(missing > 0);
}

TEST(a_chunk_that_files_have_too_is_known_in_both) {
  const auto former = first_life(sizes());
  EXPECT(former->store(range(1, 4)) == 4);
  const auto pool = new_life(former->geometry, former->arena);
  const auto in_files = *DirectoryGeometry::plan_files(8 * CHUNK, 2, 100);
  Directory files(nullptr, nullptr, in_files, nullptr, Tier::SSD);
  TierSet set({&pool->directory, &files});
  EXPECT(files.add_namespace() == pool->owner);
  const ClassId size_class = *files.add_class(CHUNK, EXTENTS);
  files.mark_segment_ready(0);
  EXPECT(take_over(*pool, *former).taken == 4);
  EXPECT(pool->directory.count_unsaved() == 4);
  for (const uint64_t id : range(1, 2)) {
    const std::optional<ChunkKey> parent = id == 1 ? std::nullopt : std::optional(key_of(id - 1));
    EXPECT(files.restore(pool->owner, size_class, parent, key_of(id), PageIndex(2 * id), id));
  }
  files.finish_restore(2);
  EXPECT(pool->directory.count_unsaved() == 2);
  EXPECT(set.tiers_of(key_of(2)) == (tier_bit(Tier::DRAM) | tier_bit(Tier::SSD)) && set.tiers_of(key_of(3)) == tier_bit(Tier::DRAM));
  EXPECT(pool->is_sound() && files.verify().empty());
}

TIMED_TEST(a_million_chunks_are_taken_over_in_well_under_a_second) {
  constexpr uint64_t CHUNKS = 1'000'000;
  const DirectoryGeometry geometry = *DirectoryGeometry::plan(CHUNKS * PAGE_BYTES, 64 << 20, CHUNKS);
  const auto former = new_life(geometry);
  make_ready(*former);
  const ClassId tiny = *former->directory.add_class(PAGE_BYTES, 1);
  const std::vector<uint32_t> sums(100, 1);
  const std::vector<int32_t> tokens(100 * 16, 1);
  for (uint64_t first = 1; first <= CHUNKS; first += 100) {
    const auto keys = pack(range(first, 100));
    const Reservation made = former->directory.reserve(former->owner, tiny, std::nullopt, keys.data(), 100, ++former->now);
    static_cast<void>(former->directory.commit(made.id, 0, 100, sums.data(), former->now, {packed_words(tokens), {}}));
    EXPECT(former->directory.end_reservation(made.id, former->now));
  }
  const auto pool = new_life(geometry, former->arena);
  const auto begun = std::chrono::steady_clock::now();
  const std::clock_t begun_cpu = std::clock();
  EXPECT(take_over(*pool, *former).taken == CHUNKS);
  const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::printf("  %.2f s, %.2f s of CPU\n", took_s, static_cast<double>(std::clock() - begun_cpu) / CLOCKS_PER_SEC);
  EXPECT_TIME(took_s < 0.8);
}
