// The remote index: which other node has which chunk, in a memfd, written by the daemon alone and read by every client.
//
// What it is: a set of pairs (fingerprint of a chunk, owner), bounded from the start. What it is not: the truth: a pair
// is what an owner has announced, two keys may have one fingerprint (remote_format.h), and whoever believes a pair asks the owner.
//
// A chunk has two buckets of eight entries. A new pair goes into the emptier one; where both are full its owner's oldest of the
// sixteen is evicted, or, where it has none there, the oldest: who announces much evicts its own.
//
// Of one chunk OWNERS_PER_CHUNK owners are known at most: a prompt that every node has would else fill its buckets. They are those that
// this table likes best, in an order of all owners that it draws for itself: so the chunks of a prompt have the same ones, and all
// of it is pulled from one of them, while other nodes like others.
//
// Inserting a pair again renews its age. Entries never move, and each is one word that is stored whole, so that readers
// need no sequence counters.
//
// An owner is one life of one node. It ends at once, by a bit that readers look at; its entries are emptied later, by a hand that
// passes over one bucket with each insert, or more on request (`sweep`), and only then is the owner's number given again.
//
// Ages are 16 bits of a clock that ticks AGE_TICKS times while the table is filled once, and do not wrap: the hand holds back
// those that would. Measured with a million entries: a table filled to 0.8 has lost 0.02 % of its pairs before their time, one filled
// to 0.9 0.7 %. Filled to 0.8, as `buckets_for` plans, it takes 10 bytes for a pair, and 52 KiB besides.
//
// Invariants: `count_of_[owner]` is the number of entries with this owner, `count_` that of all, `dead_` that of owners that are not
// live; no bucket has a pair twice.
// Threads: the daemon's control thread.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/shared_words.h"
#include "remote_index/remote_format.h"

namespace kvpool {

inline constexpr uint32_t OWNERS_PER_CHUNK = 4;
inline constexpr uint64_t AGE_TICKS = 4096;
// The largest age that differs from larger ones.
inline constexpr uint16_t AGE_MAX = 0x8000;

// The number of an owner, 1 to OWNER_NUMBERS - 1.
using RemoteOwner = uint32_t;

// A run of consecutive chunks that one owner has.
struct RemoteRun {
  RemoteOwner owner;
  uint64_t chunks;
  friend bool operator==(const RemoteRun&, const RemoteRun&) noexcept = default;
};

// Which of some keys one owner has, by their indexes.
struct RemoteKeys {
  RemoteOwner owner;
  std::vector<uint32_t> keys;
};

class RemoteIndex {
 public:
  // Formats a zeroed writable region. `seed` places the keys. REQUIRES: buckets in range; the region has remote_bytes(buckets).
  RemoteIndex(std::shared_ptr<const Mapping> mapping, uint64_t buckets, const uint8_t epoch[16],
              const HashSeed& seed = HashSeed::random());
  RemoteIndex(const RemoteIndex&) = delete;
  RemoteIndex& operator=(const RemoteIndex&) = delete;

  // The number of buckets that holds so many pairs without losing one to a full bucket before its time, or so. In range.
  [[nodiscard]] static uint64_t buckets_for(uint64_t pairs) noexcept;

  // A number for a new owner; nothing where all are in use, or their entries not emptied yet.
  [[nodiscard]] std::optional<RemoteOwner> add_owner() noexcept;
  // Nobody finds a chunk of this owner any more. REQUIRES: the owner is live.
  void retire(RemoteOwner owner) noexcept;
  [[nodiscard]] bool is_live(RemoteOwner owner) const noexcept { return owner < OWNER_NUMBERS && is_live_[owner]; }

  // Readers see how long an owner's chunks take. REQUIRES: the owner is live; ns_per_mib is not 0.
  void set_pace(RemoteOwner owner, RemotePace pace) noexcept;

  // `keys` are n packed keys. REQUIRES: the owner is live. `remove` ignores pairs that are not there.
  void insert(RemoteOwner owner, const uint8_t* keys, size_t n) noexcept;
  void remove(RemoteOwner owner, const uint8_t* keys, size_t n) noexcept;

  // For each live owner of the first key: how many leading keys it has. Longest run first; none: nobody has the first key.
  [[nodiscard]] std::vector<RemoteRun> runs(const uint8_t* keys, size_t n) const;

  // For each live owner of any of these keys, by the first one that it has: which of them it has.
  [[nodiscard]] std::vector<RemoteKeys> keys_by_owner(const uint8_t* keys, size_t n) const;

  // Passes over `buckets` of them. Whether entries of ended owners are left.
  bool sweep(uint64_t buckets) noexcept;

  [[nodiscard]] uint64_t count() const noexcept { return count_ - dead_; }  // pairs of live owners
  [[nodiscard]] uint64_t dead() const noexcept { return dead_; }
  [[nodiscard]] uint64_t count_of(RemoteOwner owner) const noexcept { return is_live(owner) ? count_of_[owner] : 0; }
  [[nodiscard]] uint64_t capacity() const noexcept { return bucket_count_ * BUCKET_ENTRIES; }
  [[nodiscard]] uint64_t evicted() const noexcept { return evicted_; }  // pairs of live owners that were evicted

  // Recounts everything; one line per broken invariant. Takes no memory for parts of the table that were never used.
  [[nodiscard]] std::vector<std::string> verify() const;
  // The same of each entry by itself, in `limit` buckets from `position` on. Returns where to go on, 0 at the end.
  [[nodiscard]] uint64_t verify_part(uint64_t position, uint64_t limit, std::vector<std::string>& broken) const;

 private:
  using Owners = std::array<RemoteOwner, 2 * BUCKET_ENTRIES>;

  void insert_one(RemoteOwner owner, const RemotePlace& place) noexcept;
  void remove_one(RemoteOwner owner, const RemotePlace& place) noexcept;
  [[nodiscard]] uint64_t* find(RemoteOwner owner, const RemotePlace& place) const noexcept;
  [[nodiscard]] uint64_t* place_for(RemoteOwner owner, const RemotePlace& place) const noexcept;
  [[nodiscard]] uint64_t rank_of(RemoteOwner owner) const noexcept;
  // Fills in the live owners of a chunk; returns how many.
  size_t owners_at(const RemotePlace& place, Owners& owners) const noexcept;
  void store(uint64_t& entry, uint64_t word) noexcept;
  void sweep_bucket(RemoteBucket& bucket) noexcept;
  [[nodiscard]] uint16_t now() const noexcept { return static_cast<uint16_t>(inserts_ / tick_); }
  [[nodiscard]] uint16_t age_of(uint64_t entry) const noexcept {
    return static_cast<uint16_t>(now() - static_cast<uint16_t>(entry));
  }
  [[nodiscard]] RemotePlace prefetched(const uint8_t* key) const noexcept;
  [[nodiscard]] uint64_t count_part(uint64_t position, uint64_t limit, std::vector<uint32_t>& counts,
                                    std::vector<std::string>& broken) const;
  void verify_bucket(const RemoteBucket& bucket, uint64_t number, std::vector<uint32_t>& counts,
                     std::vector<std::string>& broken) const;

  const std::shared_ptr<const Mapping> mapping_;
  const uint64_t bucket_count_;
  const uint64_t tick_;  // inserts
  const HashSeed seed_;
  RemoteHeader* const header_;
  RemoteBucket* const buckets_;
  uint64_t* const paces_;
  std::array<bool, OWNER_NUMBERS> is_live_{};
  std::array<uint32_t, OWNER_NUMBERS> count_of_{};
  uint64_t count_ = 0;
  uint64_t dead_ = 0;
  uint64_t evicted_ = 0;
  uint64_t inserts_ = 0;
  uint64_t hand_ = 0;
  RemoteOwner last_given_ = 0;
};

}  // namespace kvpool
