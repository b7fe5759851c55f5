// Lease desk: leases of hits that are in DRAM as a whole, each granted in one call, whatever the layout: chains and chunks without a
// parent, of several groups and ranks.
//
// What it is: the path of an ordinary acquire and release. What it is not: who brings chunks from other tiers or nodes, which is done
// part by part; where a hit is not here as a whole, or not allowed, the desk does nothing, and says so.
//
// Threads: the control thread only. O(1) for a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "directory/directory.h"
#include "eviction/reuse_distances.h"
#include "leases/ending_holds.h"
#include "leases/lease_table.h"

namespace kvpool {

// A group's chunks as a session reads them.
struct ReaderGroup {
  bool is_chain = true;
  uint64_t chunks_max = UINT64_MAX;     // that a hit needs of it: the last ones
  std::vector<NamespaceId> namespaces;  // of each rank
  std::vector<uint64_t> chunk_bytes;    // as many
};

// An engine's session, as the desk knows it.
struct Reader {
  uint32_t connection = 0;
  HolderId holder;  // for whom its leases count
  uint64_t least_ttl_ns = 0;
  std::vector<uint32_t> ranks;
  bool is_scheduler = false;  // reads no bytes
  bool has_groups = false;
  std::vector<ReaderGroup> groups;  // one where it has no groups
};

// Holds on all that a hit needs: of each rank those of every group.
struct HeldHit {
  uint64_t chunks = 0;
  uint64_t rows = 0;  // chunks of one rank's holds together
  std::vector<HoldId> holds;
};

// The lease of what is here of a set; nullptr: nothing is. `places`: of its rows, which of the keys each is.
struct LeasedSet {
  const Lease* lease = nullptr;
  std::vector<uint32_t> places;
};

class LeaseDesk {
 public:
  struct Bounds {
    uint64_t leases_max;  // of one connection
    uint64_t held_max;    // chunks that one connection holds
    uint64_t rows_max;    // chunks of one request, of all groups and ranks: they bound its time
    uint64_t named_max;   // the same where every chunk is named: more are looked at part by part
    bool is_alone;        // there are no other nodes, and no store
  };

  // `reuse`: counts what was leased; may be absent. REQUIRES: all live as long as the desk.
  LeaseDesk(Directory& directory, LeaseTable& leases, EndingHolds& ending, ReuseDistances* reuse, Bounds bounds)
      : directory_(directory), leases_(leases), ending_(ending), reuse_(reuse), bounds_(bounds) {}
  LeaseDesk(const LeaseDesk&) = delete;
  LeaseDesk& operator=(const LeaseDesk&) = delete;

  // Holds on all chunks of a hit, which count for a holder. `keys`: packed, of one group after the other, rank by rank; all of a chain, or
  // its last one alone on each rank. `chunks` 0: as many as there are keys, without groups. Nothing where it is not all here, or not
  // allowed, or the keys are not so.
  [[nodiscard]] std::optional<HeldHit> hold_hit(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, HolderId holder,
                                                uint64_t now_ns);
  // The lease of such a hit; nullptr too where the connection has all the leases that it may. Valid until the next call.
  [[nodiscard]] const Lease* lease_hit(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, uint64_t now_ns);
  // The lease of what is here of chunks of a group, each alone. Nothing where the rest may be in another tier or on another node, or as
  // above; nor for a scheduler.
  [[nodiscard]] std::optional<LeasedSet> lease_set(const Reader& reader, std::span<const uint8_t> keys, uint64_t group, uint64_t now_ns);
  // Where the leased chunks lie, row by row; a scheduler's has the levels alone, the slowest of each chunk among the ranks'.
  [[nodiscard]] Columns columns_of(const Reader& reader, const Lease& lease) const;
  // The same with a row for each of so many keys that were named: `places` are those of the lease's rows, and the others' rows say that the
  // lease has none. nullptr: a lease of nothing. REQUIRES: a place for each row, less than `named`.
  [[nodiscard]] Columns rows_by_key(const Reader& reader, const Lease* lease, std::span<const uint32_t> places, size_t named) const;
  // Ends leases of the reader. Whether some of their holds are left to be released later.
  bool release_leases(const Reader& reader, std::span<const uint64_t> ids, uint64_t now_ns);

  [[nodiscard]] Directory& directory() noexcept { return directory_; }
  [[nodiscard]] LeaseTable& leases() noexcept { return leases_; }

 private:
  [[nodiscard]] bool find_runs(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, HeldHit& hit);
  [[nodiscard]] bool may_lease(const Reader& reader) const noexcept;
  [[nodiscard]] const Lease& grant(const Reader& reader, HeldHit hit, std::optional<uint32_t> set_group, uint64_t now_ns);
  void note_hold(HoldId hold, uint64_t chunk_bytes, uint64_t now_ns);

  Directory& directory_;
  LeaseTable& leases_;
  EndingHolds& ending_;
  ReuseDistances* const reuse_;
  const Bounds bounds_;
  std::vector<HitRun> runs_;  // of the request that is served
};

}  // namespace kvpool
