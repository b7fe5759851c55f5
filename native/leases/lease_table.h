// Lease table: time-limited protection of chunks, by number, owner and deadline.
//
// What it is: the record of which holds exist for whom and until when. What it is not: the holds themselves, which the directory has
// and the caller releases; tickets, whose chunks it counts with those of leases; or a clock.
//
// Invariants (recounted by `verify`):
//   1. Each lease is in the order of deadlines once, and among those of its owner.
//   2. An owner exists while it has a lease or counted chunks; `chunks` counts those of its leases and what `count_chunks` added.
// Threads: the control thread only. O(log leases) for each call, O(1) for a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/types.h"

namespace kvpool {

// A right to read leading chunks of a hit: on each rank it covers as many holds, in the order of the rows of its answer. Or one to read
// chunks of one group, each alone: a set, of which it has one hold on each rank.
struct Lease {
  uint64_t id = 0;
  uint32_t owner = 0;
  uint64_t chunks = 0;  // of the hit
  uint64_t rows = 0;    // chunks of the holds of one rank together
  uint64_t least_ttl_ns = 0;
  std::vector<uint32_t> ranks;
  std::vector<HoldId> holds;  // those of one rank after those of another
  std::optional<uint32_t> set_group;  // of a set
  uint64_t deadline_ns = 0;

  [[nodiscard]] uint64_t held() const noexcept { return ranks.size() * rows; }
};

class LeaseTable {
 public:
  // REQUIRES: `ttl_ns` is positive.
  explicit LeaseTable(uint64_t ttl_ns) : ttl_ns_(ttl_ns) {}
  LeaseTable(const LeaseTable&) = delete;
  LeaseTable& operator=(const LeaseTable&) = delete;

  // The time to live of leases from their next use on.
  void change_ttl(uint64_t ttl_ns) noexcept { ttl_ns_ = ttl_ns; }
  // Takes the lease in, numbers it and sets its deadline. REQUIRES: chunks, ranks and holds; as many holds on each rank.
  const Lease& grant(Lease lease, uint64_t now_ns);
  // The lease, where it lives and is the owner's; nullptr otherwise.
  [[nodiscard]] const Lease* find(uint64_t id, uint32_t owner) const noexcept;
  // Counts the lease as used now. False where it has ended or is another's.
  bool renew(uint64_t id, uint32_t owner, uint64_t now_ns);
  // Ends a lease: its holds are the caller's to release. None where it had ended before or is another's.
  [[nodiscard]] std::vector<HoldId> end_lease(uint64_t id, uint32_t owner);
  // The leases of this owner are to be ended, with or before those that expire.
  void end_owner(uint32_t owner);
  // Ends leases that have expired or lost their owner, while `left` is positive: what each costs is taken off. Their holds.
  [[nodiscard]] std::vector<HoldId> expire(uint64_t now_ns, int64_t& left, uint64_t lease_cost);

  [[nodiscard]] size_t size() const noexcept { return leases_.size(); }
  [[nodiscard]] uint64_t expired() const noexcept { return expired_; }
  [[nodiscard]] size_t count_of(uint32_t owner) const noexcept;
  // Chunks of its leases, and what else was counted.
  [[nodiscard]] uint64_t chunks_of(uint32_t owner) const noexcept;
  // So many chunks more or less of an owner's are held by something else than leases. REQUIRES: no less than none is left.
  void count_chunks(uint32_t owner, int64_t chunks);
  // Those that have leases, and how many.
  [[nodiscard]] std::vector<std::pair<uint32_t, size_t>> owners() const;
  [[nodiscard]] uint64_t all_chunks() const noexcept;  // of every owner
  [[nodiscard]] std::vector<const Lease*> all() const;  // the oldest first
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  struct Owner {
    std::unordered_set<uint64_t> leases;
    uint64_t chunks = 0;
  };
  using Leases = std::unordered_map<uint64_t, Lease>;

  void set_deadline(Lease& lease, uint64_t now_ns);
  [[nodiscard]] std::vector<HoldId> end_found(Leases::iterator lease);

  uint64_t ttl_ns_;
  uint64_t last_id_ = 0;
  Leases leases_;
  std::set<std::pair<uint64_t, uint64_t>> order_;  // by deadline
  std::unordered_map<uint32_t, Owner> owners_;
  std::deque<uint32_t> leaving_;  // their leases are being ended
  uint64_t expired_ = 0;
};

}  // namespace kvpool
