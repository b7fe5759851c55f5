// Holder shares: how many bytes each holder protects from eviction, and how many it may.
//
// What it is: the judge of a share, with an account for each holder and its user (holder_accounts.h). What it is not: the table of
// holds, which it reads, or the one who evicts.
//
// A holder, and a user with all its holders, protects at most a share of what the others leave of the capacity. What several holds
// of a holder have in common counts once; to know that takes a look at all of them, so an account has an upper bound, which is
// corrected when it would refuse something and enough has changed.
//
// A chunk takes its slot, which may be far more than its bytes, and its part of the records there may be.
//
// Invariants (recounted by `verify`):
//   1. `protected_bytes` is what the slots take that nothing can evict, whoever holds them.
//   2. Each hold that is charged and each reservation of a holder is in that holder's account, with its bytes by kind.
//   3. The bound of an account is no less than what its holder really protects.
// Threads: the control thread only. O(1) for a chunk, but for `affordable`, `has_share` and `charge` where a share is nearly used up:
// those compare a bounded number of chains, or recount the holder's chunks once a fourth of them has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena/slot_arena.h"
#include "holds/hold_table.h"
#include "holds/holder_accounts.h"
#include "records/chunk_records.h"

namespace kvpool {

// Chains of records by their first one.
using HeldChains = std::vector<std::pair<uint32_t, const std::vector<RecordId>*>>;

// What a reservation may add to what its holder protects.
struct ShareClaim {
  HolderId holder;
  uint64_t held = 0;         // protected bytes when it began
  size_t covered = 0;        // leading chunks that the holder protects anyway, or that count already
  bool is_compared = false;  // whether that is known
  HoldId own = 0;            // the reservation that goes on, and counts
  bool is_recounted = false;
  size_t fitting = 0;        // a chain of fewer chunks is within the share: known since it was last compared
  size_t user_covered = 0;   // leading chunks that the holder's user protects anyway
};

class HolderShares {
 public:
  // REQUIRES: what it refers to lives as long as this.
  HolderShares(const HoldTable& table, const ChunkRecords& records, const SlotArena& arena, uint64_t capacity, uint32_t max_chunks)
      : table_(table), records_(records), arena_(arena), capacity_(capacity), record_share_(capacity / max_chunks) {}
  HolderShares(const HolderShares&) = delete;
  HolderShares& operator=(const HolderShares&) = delete;

  // A holder, and a user with all its holders, protects at most this share of what the others leave. 1: all of it.
  void limit(double share, double user_share = 1.0) noexcept;
  // This user with all its holders: at most this share instead, and of that each holder its own.
  void limit_user(uint32_t user, double share) { shares_of_users_.insert_or_assign(user, share); }
  // What a chunk takes from others.
  [[nodiscard]] uint64_t taken_bytes(ClassId size_class) const noexcept {
    return std::max(arena_.size_class(size_class).slot_bytes, record_share_);
  }
  // Chunks of this class cannot be evicted from now on, or can again.
  void protect(ClassId size_class, uint64_t chunks = 1) noexcept { protected_bytes_ += chunks * taken_bytes(size_class); }
  void unprotect(ClassId size_class, uint64_t chunks = 1) noexcept { protected_bytes_ -= chunks * taken_bytes(size_class); }
  // A chunk that cannot be evicted has lost its slot: its record alone is taken from now on, until `release_record`.
  void vacate(ClassId size_class) noexcept { protected_bytes_ -= taken_bytes(size_class) - record_share_; }
  void release_record() noexcept { protected_bytes_ -= record_share_; }
  [[nodiscard]] uint64_t protected_bytes() const noexcept { return protected_bytes_; }

  // How many of `wanted` leading chunks of these chains the holder may protect. `holds`: what of each is here, or 0.
  [[nodiscard]] size_t affordable(HolderId holder, const std::vector<HoldId>& holds, const std::vector<ClassId>& of, size_t wanted);
  // Whether it may protect all of these runs, each of chunks of one class, which are not held for it yet. No holder may all.
  [[nodiscard]] bool may_hold(HolderId holder, const std::vector<HoldTable::Records>& runs);
  // Whether one more chunk of `bytes` behind this chain is within the share.
  [[nodiscard]] bool has_share(ShareClaim& claim, const std::vector<RecordId>& chain, uint64_t bytes);

  // Counts holds for a holder until they end. False where one is unknown, or counts already; that one does as before.
  bool charge(const std::vector<HoldId>& holds, HolderId holder);
  [[nodiscard]] bool is_charged(HoldId hold) const noexcept { return charged_.contains(hold); }
  [[nodiscard]] HolderId holder_of(HoldId hold) const noexcept;  // for whom it counts; unset: for nobody
  // A hold, charged or not, loses its last `ended` chunks of this class, or ends with this chain.
  void shorten(HoldId hold, ClassId size_class, size_t ended) noexcept;
  void end(HoldId hold, const std::vector<RecordId>& chain) noexcept;

  // The same of reservations; nothing where one counts for nobody. `before`: its bytes before the change.
  [[nodiscard]] static HolderBytes bytes_of(const ReservationState& state) noexcept;
  void open(HoldId id, const ReservationState& state, const ShareClaim& claim);
  void grow(const ReservationState& state, size_t writing, size_t added) noexcept;
  void change(const ReservationState& state, HolderBytes before) noexcept;
  void note_stored(const ReservationState& state, size_t chunks) noexcept;  // of its chunks: leased from now on, not reserved
  void shorten(HoldId id, const ReservationState& state, HolderBytes before, size_t ended) noexcept;

  [[nodiscard]] HolderAccounts& accounts() noexcept { return accounts_; }
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  [[nodiscard]] uint64_t share_of(HolderId holder, uint64_t held) const noexcept;
  [[nodiscard]] std::optional<double> limit_of(HolderId holder) const noexcept;
  [[nodiscard]] double user_share_of(HolderId holder) const noexcept;
  [[nodiscard]] uint64_t user_limit_of(HolderId holder, uint64_t held) const noexcept;
  [[nodiscard]] bool has_user_share(HolderId holder, uint64_t wanted, uint64_t held) const noexcept;
  [[nodiscard]] bool has_room(HolderId holder, uint64_t bytes) const noexcept;
  [[nodiscard]] HeldChains some_chains_of(const HolderAccounts::Account* account, HoldId own, size_t limit) const;
  [[nodiscard]] HolderAccounts::Counted count_protected(const HolderAccounts::Account& account) const;
  void recount(HolderId holder, uint64_t bytes);
  void verify_protected(std::vector<std::string>& broken) const;

  const HoldTable& table_;
  const ChunkRecords& records_;
  const SlotArena& arena_;
  const uint64_t capacity_;
  const uint64_t record_share_;  // of the capacity, by each record
  double share_ = 1.0, user_share_ = 1.0;
  std::unordered_map<uint32_t, double> shares_of_users_;
  uint64_t protected_bytes_ = 0;
  HolderAccounts accounts_;
  std::unordered_map<HoldId, HolderId> charged_;
};

}  // namespace kvpool
