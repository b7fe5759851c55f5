// The remote index against a map: what is known of whom, what is evicted where it is full, and what ends with an owner.
#include <algorithm>
#include <map>
#include <random>

#include "tests/harness.h"
#include "tests/remote_index/remote_table.h"

using namespace kvpool;
using kvpool::testing::colliding_key;
using kvpool::testing::packed;
using kvpool::testing::remote_key;
using kvpool::testing::REMOTE_EPOCH;
using kvpool::testing::REMOTE_SEED;
using kvpool::testing::RemoteTable;

namespace {

using Model = std::map<uint64_t, std::set<RemoteOwner>>;

uint64_t pairs_of(const Model& model) {
  uint64_t count = 0;
  for (const auto& [id, owners] : model) {
    count += owners.size();
  }
  return count;
}

std::vector<uint8_t> keys_between(uint64_t first, uint64_t end) {
  std::vector<ChunkKey> keys;
  for (uint64_t id = first; id < end; ++id) {
    keys.push_back(remote_key(id));
  }
  return packed(keys);
}

}  // namespace

TEST(an_empty_index_has_nothing) {
  RemoteTable table(8);
  EXPECT(!table.has(remote_key(1)));
  EXPECT(table.index.runs(nullptr, 0).empty());
  EXPECT(table.owners(remote_key(1)).empty());
  EXPECT(table.index.count() == 0);
  EXPECT(!table.index.sweep(100));
  EXPECT(table.index.verify().empty());
}

TEST(repeated_and_absent_pairs_change_nothing) {
  RemoteTable table(8);
  const RemoteOwner one = *table.index.add_owner();
  const RemoteOwner other = *table.index.add_owner();
  table.remove(one, remote_key(1));
  table.insert(one, remote_key(1));
  table.insert(one, remote_key(1));
  table.remove(other, remote_key(1));
  EXPECT(table.index.count() == 1);
  EXPECT(table.index.count_of(one) == 1);
  EXPECT(table.index.count_of(other) == 0);
  EXPECT(table.has(remote_key(1)));
  table.remove(one, remote_key(1));
  table.remove(one, remote_key(1));
  EXPECT(!table.has(remote_key(1)));
  EXPECT(table.index.count() == 0);
  EXPECT(table.index.verify().empty());
}

TEST(random_operations_agree_with_a_map) {
  std::mt19937_64 random(kvpool::testing::seed());
  RemoteTable table(4096);
  std::vector<RemoteOwner> owners;
  for (int number = 0; number < 3; ++number) {
    owners.push_back(*table.index.add_owner());
  }
  Model model;
  for (uint64_t step = 0; step < 30'000; ++step) {
    const uint64_t id = random() % 3000;
    RemoteOwner& owner = owners[random() % owners.size()];
    const uint64_t choice = random() % 100;
    if (choice < 60) {
      table.insert(owner, remote_key(id));
      model[id].insert(owner);
    } else if (choice < 98) {
      table.remove(owner, remote_key(id));
      model[id].erase(owner);
    } else if (random() % 20 == 0) {
      table.index.retire(owner);
      for (auto& [known, of] : model) {
        of.erase(owner);
      }
      owner = *table.index.add_owner();
    } else {
      static_cast<void>(table.index.sweep(random() % 50));
    }
    const uint64_t asked = random() % 3000;
    EXPECT(table.owners(remote_key(asked)) == model[asked]);
    EXPECT(table.has(remote_key(asked)) == !model[asked].empty());
    if (step % 500 == 0) {
      EXPECT(table.index.count() == pairs_of(model));
      EXPECT(table.index.verify().empty());
    }
  }
  EXPECT(table.index.evicted() == 0);
}

TEST(the_oldest_is_evicted_from_a_full_table) {
  RemoteTable table(512);
  const RemoteOwner owner = *table.index.add_owner();
  const uint64_t capacity = table.index.capacity();
  const uint64_t first_filled = capacity / 10 * 8;
  const auto first = keys_between(0, first_filled);
  table.index.insert(owner, first.data(), first_filled);
  EXPECT(table.index.evicted() <= capacity / 1000);  // nearly nothing goes before its time
  EXPECT(table.index.count() + table.index.evicted() == first_filled);
  const auto more = keys_between(first_filled, 4 * capacity);
  table.index.insert(owner, more.data(), 4 * capacity - first_filled);
  EXPECT(table.index.count() <= capacity);
  EXPECT(table.index.count() > capacity / 100 * 97);
  EXPECT(table.index.count() + table.index.evicted() == 4 * capacity);
  uint64_t newest_lost = 0, oldest_there = 0;
  for (uint64_t id = 0; id < 4 * capacity; ++id) {
    const uint64_t behind = 4 * capacity - id;  // how many were inserted since
    newest_lost += behind <= capacity / 2 && !table.has(remote_key(id)) ? 1U : 0U;
    oldest_there += behind > 2 * capacity && table.has(remote_key(id)) ? 1U : 0U;
  }
  EXPECT(newest_lost <= capacity / 1000);
  EXPECT(oldest_there <= capacity / 1000);
  EXPECT(table.index.verify().empty());
}

TEST(who_inserts_without_end_evicts_its_own) {
  RemoteTable table(512);
  const RemoteOwner honest = *table.index.add_owner();
  const RemoteOwner endless = *table.index.add_owner();
  const uint64_t capacity = table.index.capacity();
  const auto few = keys_between(0, capacity / 3);
  table.index.insert(honest, few.data(), capacity / 3);
  const auto many = keys_between(capacity, 5 * capacity);
  table.index.insert(endless, many.data(), 4 * capacity);
  EXPECT(table.index.evicted() > 3 * capacity);
  EXPECT(table.index.count_of(honest) + capacity / 1000 >= capacity / 3);
  EXPECT(table.index.verify().empty());
}

TEST(a_pair_that_is_inserted_again_is_new) {
  RemoteTable table(64);
  const RemoteOwner owner = *table.index.add_owner();
  table.insert(owner, remote_key(0));
  for (uint64_t id = 1; id < 20 * table.index.capacity(); ++id) {
    table.insert(owner, remote_key(id));
    if (id % 64 == 0) {
      table.insert(owner, remote_key(0));
      EXPECT(table.has(remote_key(0)));
    }
  }
  EXPECT(table.has(remote_key(0)));
}

// A pair that nobody renews while others come and go for longer than an age can count is still the oldest.
TEST(ages_do_not_wrap) {
  RemoteTable table(8);
  const RemoteOwner owner = *table.index.add_owner();
  table.insert(owner, remote_key(0));
  for (uint64_t id = 1; id < 200'000; ++id) {
    table.insert(owner, remote_key(id));
    EXPECT(table.has(remote_key(0)));
    table.remove(owner, remote_key(id));
  }
  for (uint64_t id = 1; table.index.evicted() == 0; ++id) {
    table.insert(owner, remote_key(300'000 + id));
  }
  uint64_t id = 200'000;
  while (table.has(remote_key(0)) && id < 210'000) {
    table.insert(owner, remote_key(id++));
  }
  EXPECT(id < 200'100);
  EXPECT(table.index.verify().empty());
}

TEST(chunks_that_many_owners_have_are_known_of_the_same_few) {
  RemoteTable table(4096);
  std::vector<RemoteOwner> owners(12);
  for (RemoteOwner& owner : owners) {
    owner = *table.index.add_owner();
  }
  std::mt19937_64 random(3);
  constexpr uint64_t CHUNKS = 200;
  std::vector<ChunkKey> keys;
  for (uint64_t id = 0; id < CHUNKS; ++id) {
    keys.push_back(remote_key(id));
    std::shuffle(owners.begin(), owners.end(), random);
    for (const RemoteOwner owner : owners) {
      table.insert(owner, keys.back());
    }
  }
  const std::vector<RemoteRun> runs = table.index.runs(packed(keys).data(), CHUNKS);
  EXPECT(runs.size() == OWNERS_PER_CHUNK);
  EXPECT(std::all_of(runs.begin(), runs.end(), [](const RemoteRun& run) { return run.chunks == CHUNKS; }));
  EXPECT(table.index.count() == OWNERS_PER_CHUNK * CHUNKS);
  EXPECT(table.index.verify().empty());
}

TEST(tables_of_different_seeds_know_different_owners) {
  std::set<std::set<RemoteOwner>> chosen;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const auto mapping = Mapping::create("remote", remote_bytes(64), false).mapping;
    RemoteIndex index(mapping, 64, REMOTE_EPOCH, HashSeed{{seed * REMOTE_SEED.words[0], seed * REMOTE_SEED.words[1]}});
    std::set<RemoteOwner> known;
    const ChunkKey key = remote_key(1);
    for (int number = 0; number < 12; ++number) {
      index.insert(*index.add_owner(), RemoteTable::bytes_of(key), 1);
    }
    for (const RemoteRun& run : index.runs(RemoteTable::bytes_of(key), 1)) {
      known.insert(run.owner);
    }
    EXPECT(known.size() == OWNERS_PER_CHUNK);
    chosen.insert(known);
  }
  EXPECT(chosen.size() >= 4);
}

TEST(only_a_few_owners_of_a_chunk_are_known) {
  RemoteTable table(64);
  std::vector<RemoteOwner> owners;
  for (int number = 0; number < 100; ++number) {
    owners.push_back(*table.index.add_owner());
    table.insert(owners.back(), remote_key(1));
  }
  EXPECT(table.owners(remote_key(1)).size() == OWNERS_PER_CHUNK);
  EXPECT(table.index.count() == OWNERS_PER_CHUNK);
  for (const RemoteOwner owner : owners) {
    table.remove(owner, remote_key(1));
  }
  EXPECT(!table.has(remote_key(1)));
  EXPECT(table.index.verify().empty());
}

TEST(an_owner_ends_at_once_and_its_entries_in_turns) {
  RemoteTable table(1024);
  const RemoteOwner one = *table.index.add_owner();
  const RemoteOwner other = *table.index.add_owner();
  const auto keys = keys_between(0, 2000);
  table.index.insert(one, keys.data(), 2000);
  table.index.insert(other, keys.data(), 1000);
  table.index.retire(one);
  EXPECT(!table.index.is_live(one));
  EXPECT(table.index.count_of(one) == 0);
  EXPECT(table.index.count() == 1000);
  EXPECT(table.index.dead() == 2000);
  EXPECT(table.has(remote_key(999)));
  EXPECT(!table.has(remote_key(1000)));
  EXPECT(table.index.verify().empty());
  uint32_t turns = 1;
  while (table.index.sweep(64)) {
    EXPECT(table.index.verify().empty());
    ++turns;
  }
  EXPECT(turns > 8);
  EXPECT(turns <= 1024 / 64);
  EXPECT(table.index.dead() == 0);
  EXPECT(table.index.count() == 1000);
}

TEST(an_owners_number_is_given_again_only_when_its_entries_are_gone) {
  RemoteTable table(64);
  const RemoteOwner first = *table.index.add_owner();
  table.insert(first, remote_key(1));
  table.index.retire(first);
  std::set<RemoteOwner> given;
  while (const auto owner = table.index.add_owner()) {
    EXPECT(*owner != 0 && *owner < OWNER_NUMBERS);
    EXPECT(given.insert(*owner).second);
  }
  EXPECT(given.size() == OWNER_NUMBERS - 2);
  EXPECT(given.count(first) == 0);
  EXPECT(!table.index.sweep(64));
  EXPECT(table.index.add_owner() == first);
  EXPECT(!table.has(remote_key(1)));
  EXPECT(table.index.verify().empty());
}

TEST(the_room_of_an_ended_owner_is_used_before_anything_is_evicted) {
  RemoteTable table(128);
  const RemoteOwner one = *table.index.add_owner();
  const auto keys = keys_between(0, 700);
  table.index.insert(one, keys.data(), 700);
  table.index.retire(one);
  const RemoteOwner other = *table.index.add_owner();
  const auto others = keys_between(1000, 1700);
  table.index.insert(other, others.data(), 700);
  EXPECT(table.index.evicted() <= 1);
  EXPECT(table.index.count() + table.index.evicted() == 700);
  EXPECT(table.index.verify().empty());
}

// Whoever reads the seed can make keys with one fingerprint: each is taken for the others, and that is all.
TEST(keys_with_one_fingerprint_are_a_wrong_hint) {
  RemoteTable table(64);
  const RemoteOwner one = *table.index.add_owner();
  const RemoteOwner other = *table.index.add_owner();
  table.insert(one, colliding_key(1));
  EXPECT(table.has(colliding_key(2)));
  EXPECT(!table.has(remote_key(2)));
  for (uint64_t id = 0; id < 1000; ++id) {
    table.insert(one, colliding_key(id));
    table.insert(other, remote_key(id % 20));
  }
  EXPECT(table.index.count_of(one) == 1);
  EXPECT(table.index.count_of(other) == 20);
  table.remove(one, colliding_key(77));
  EXPECT(!table.has(colliding_key(1)));
  EXPECT(table.index.verify().empty());
}

TEST(runs_are_by_owner_and_the_longest_stands_first) {
  RemoteTable table(256);
  const RemoteOwner one = *table.index.add_owner();
  const RemoteOwner other = *table.index.add_owner();
  const RemoteOwner third = *table.index.add_owner();
  const auto keys = keys_between(0, 100);
  table.index.insert(one, keys.data(), 10);
  table.index.insert(other, keys.data(), 40);
  table.index.insert(third, keys.data() + KEY_BYTES, 99);
  table.remove(other, remote_key(30));
  using Runs = std::vector<RemoteRun>;
  EXPECT(table.index.runs(keys.data(), 100) == Runs{{other, 30}, {one, 10}});
  EXPECT(table.index.runs(keys.data(), 5).size() == 2);
  EXPECT(table.index.runs(keys.data(), 5)[0].chunks == 5);
  EXPECT(table.index.runs(keys.data() + 30 * KEY_BYTES, 70) == Runs{{third, 70}});
  table.index.retire(other);
  EXPECT(table.index.runs(keys.data(), 100) == Runs{{one, 10}});
}

TEST(which_of_some_keys_each_owner_has_is_answered_whatever_lies_between_them) {
  RemoteTable table(256);
  const RemoteOwner one = *table.index.add_owner();
  const RemoteOwner other = *table.index.add_owner();
  const RemoteOwner third = *table.index.add_owner();
  const auto keys = keys_between(0, 40);
  table.index.insert(one, keys.data() + 3 * KEY_BYTES, 2);
  table.insert(one, remote_key(30));
  table.insert(other, remote_key(4));
  table.insert(third, remote_key(5));
  const auto is = [](const RemoteKeys& found, RemoteOwner owner, const std::vector<uint32_t>& of) {
    return found.owner == owner && found.keys == of;
  };
  std::vector<RemoteKeys> found = table.index.keys_by_owner(keys.data(), 40);
  EXPECT(found.size() == 3 && is(found[0], one, {3, 4, 30}) && is(found[1], other, {4}) && is(found[2], third, {5}));
  table.index.retire(third);
  found = table.index.keys_by_owner(keys.data() + 4 * KEY_BYTES, 2);
  EXPECT(found.size() == 2 && is(found[0], one, {0}) && is(found[1], other, {0}));
  EXPECT(table.index.keys_by_owner(keys.data(), 3).empty());
  EXPECT(table.index.keys_by_owner(nullptr, 0).empty());
}

TEST(a_recount_in_parts_ends_and_takes_no_memory_for_what_was_never_used) {
  RemoteTable table(1 << 20);
  const RemoteOwner owner = *table.index.add_owner();
  table.insert(owner, remote_key(1));
  const auto pages_of = [&table] {
    uint64_t bytes = 0;
    for (Stretch pages = table.mapping->next_pages(0); pages.begin < pages.end; pages = table.mapping->next_pages(pages.end)) {
      bytes += pages.end - pages.begin;
    }
    return bytes;
  };
  const uint64_t before = pages_of();
  std::vector<std::string> broken;
  uint64_t position = 0;
  uint32_t parts = 0;
  do {
    position = table.index.verify_part(position, 10, broken);
    ++parts;
  } while (position != 0 && parts < 1000);
  EXPECT(position == 0);
  EXPECT(broken.empty());
  EXPECT(table.index.verify().empty());
  EXPECT(pages_of() == before);
}

TEST(sizes_are_in_range_and_hold_what_was_asked) {
  for (const uint64_t pairs : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, uint64_t{1'000'000}, UINT64_MAX}) {
    const uint64_t buckets = RemoteIndex::buckets_for(pairs);
    EXPECT(buckets >= MIN_REMOTE_BUCKETS);
    EXPECT(buckets <= MAX_REMOTE_BUCKETS);
    EXPECT(pairs > MAX_REMOTE_BUCKETS * 6 || buckets * BUCKET_ENTRIES >= pairs);
  }
  EXPECT(remote_bytes(RemoteIndex::buckets_for(1'000'000)) < 11'000'000);
}
