// The lease table against a plain list of leases, and its bounds.
#include <algorithm>
#include <map>
#include <random>

#include "leases/lease_table.h"
#include "tests/harness.h"

namespace {

using namespace kvpool;

constexpr uint64_t TTL = 1000;

Lease lease_of(uint32_t owner, uint64_t chunks, std::vector<HoldId> holds, uint64_t least_ttl = 0) {
  Lease lease;
  lease.owner = owner;
  lease.chunks = chunks;
  lease.rows = chunks;
  lease.least_ttl_ns = least_ttl;
  lease.ranks = {0};
  lease.holds = std::move(holds);
  return lease;
}

}  // namespace

TEST(a_lease_is_its_owners_alone_and_ends_once) {
  LeaseTable table(TTL);
  const uint64_t id = table.grant(lease_of(1, 3, {7, 8}), 5).id;
  EXPECT(table.find(id, 1)->chunks == 3 && table.find(id, 2) == nullptr);
  EXPECT(!table.renew(id, 2, 6) && table.end_lease(id, 2).empty());
  EXPECT(table.count_of(1) == 1 && table.chunks_of(1) == 3 && table.verify().empty());
  EXPECT(table.end_lease(id, 1) == std::vector<HoldId>({7, 8}));
  EXPECT(table.end_lease(id, 1).empty() && table.size() == 0 && table.all_chunks() == 0);
  EXPECT(table.verify().empty());
}

TEST(the_time_that_its_owner_was_given_is_not_shortened) {
  LeaseTable table(TTL);
  table.grant(lease_of(1, 1, {1}), 0);
  const uint64_t longer = table.grant(lease_of(1, 1, {2}, 3 * TTL), 0).id;
  table.change_ttl(TTL / 2);
  int64_t left = 100;
  EXPECT(table.expire(TTL - 1, left, 1).empty() && left == 100);
  EXPECT(table.expire(TTL, left, 1) == std::vector<HoldId>({1}) && left == 98);
  EXPECT(table.renew(longer, 1, 2 * TTL));
  EXPECT(table.expire(5 * TTL - 1, left, 1).empty());
  EXPECT(table.expire(5 * TTL, left, 1) == std::vector<HoldId>({2}) && table.expired() == 2);
}

TEST(what_expires_is_bounded_and_owners_that_leave_come_first) {
  LeaseTable table(TTL);
  for (HoldId hold = 1; hold <= 10; ++hold) {
    table.grant(lease_of(hold <= 5 ? 1 : 2, 10, {hold}), hold);
  }
  table.end_owner(2);
  table.end_owner(3);  // has none
  int64_t left = 25;
  const auto first = table.expire(TTL + 10, left, 1);
  EXPECT(first.size() == 3 && left <= 0 && *std::min_element(first.begin(), first.end()) > 5);
  left = 1000;
  EXPECT(table.expire(TTL + 1, left, 1).size() == 3);  // the others of 2, and what was due then
  EXPECT(table.expired() == 1 && table.verify().empty());
}

TEST(whatever_is_done_leaves_what_a_plain_list_has) {
  const uint64_t seed = std::random_device()();
  std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  LeaseTable table(TTL);
  std::map<uint64_t, Lease> plain;
  std::map<uint32_t, uint64_t> counted;
  uint64_t now = 0;
  for (int step = 0; step < 20'000; ++step) {
    now += random() % 20;
    const auto owner = static_cast<uint32_t>(random() % 4);
    const uint64_t id = plain.empty() ? 1 : std::next(plain.begin(), static_cast<std::ptrdiff_t>(random() % plain.size()))->first;
    switch (random() % 6) {
      case 0:
      case 1: {
        const Lease& made = table.grant(lease_of(owner, 1 + random() % 50, {static_cast<HoldId>(step + 1)}, random() % 3 * TTL), now);
        plain[made.id] = made;
        break;
      }
      case 2: {
        const bool is_own = plain.contains(id) && plain[id].owner == owner;
        EXPECT(table.renew(id, owner, now) == is_own);
        if (is_own) {
          plain[id].deadline_ns = now + std::max(TTL, plain[id].least_ttl_ns);
        }
        break;
      }
      case 3: {
        const bool is_own = plain.contains(id) && plain[id].owner == owner;
        EXPECT(table.end_lease(id, owner) == (is_own ? plain[id].holds : std::vector<HoldId>()));
        if (is_own) {
          plain.erase(id);
        }
        break;
      }
      case 4: {
        const int64_t more = random() % 2 == 0 ? 5 : -static_cast<int64_t>(std::min<uint64_t>(counted[owner], 5));
        table.count_chunks(owner, more);
        counted[owner] += static_cast<uint64_t>(more);
        break;
      }
      default: {
        int64_t left = INT64_MAX;
        auto ended = table.expire(now, left, 1);
        std::vector<HoldId> expected;
        for (auto entry = plain.begin(); entry != plain.end();) {
          const bool is_over = entry->second.deadline_ns <= now;
          if (is_over) {
            expected.push_back(entry->second.holds.front());
          }
          entry = is_over ? plain.erase(entry) : std::next(entry);
        }
        std::sort(ended.begin(), ended.end());
        EXPECT(ended == expected);
      }
    }
    uint64_t chunks = counted[owner];
    for (const auto& [number, lease] : plain) {
      chunks += lease.owner == owner ? lease.held() : 0;
    }
    EXPECT(table.size() == plain.size() && table.chunks_of(owner) == chunks);
  }
  EXPECT(table.verify().empty());
}
