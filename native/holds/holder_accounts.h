// Holder accounts: how many bytes each holder protects from eviction: slots that it writes, slots that it may still write though its
// time is over, and chunks that it has leased.
//
// What it is: numbers by holder. What it is not: the judge of how much is too much (HolderShares), or a table of holds.
//
// A holder is a client's connection. What it holds by several leases counts once, but to know that takes a look at all of
// them. So an account has the sum over its holds, less what is known to be in it twice: `bound` is never less than what the holder
// really protects. `correct` takes it down to that.
//
// The holds of a holder that has joined a user count for that user too, in an account of the same kind over all its holders.
// What these hold more than once is known there from `correct_user` alone: an overlap within one holder may be counted already.
//
// Invariant: an account exists while it names a hold; `leased`, `reserved` and `zombies` are the sums over its holds.
// Threads: the control thread only. Every operation is O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/types.h"

namespace kvpool {

struct HolderBytes {
  uint64_t reserved = 0;
  uint64_t zombies = 0;
  uint64_t leased = 0;
  [[nodiscard]] uint64_t sum() const noexcept { return reserved + zombies + leased; }
};

class HolderAccounts {
 public:
  // What a holder really protects, and how many chunks of its holds were looked at to know that.
  struct Counted {
    uint64_t bytes = 0;
    uint64_t looks = 0;
  };
  struct Account {
    HolderBytes bytes;
    uint64_t twice = 0;    // of the sum: known to be counted by another hold as well
    uint64_t changed = 0;  // chunks of holds that came or went since `correct`
    Counted counted;       // then
    uint64_t counts = 0;   // how often it was corrected
    std::unordered_set<HoldId> holds;
    std::optional<uint32_t> user;  // of a holder: who it is counted for as well
  };

  // The holder's holds count for a user too, from now on; or further ones no more. REQUIRES: it has none when it joins.
  void join(HolderId holder, uint32_t user) { users_of_.insert_or_assign(holder.value(), user); }
  void leave(HolderId holder) noexcept { users_of_.erase(holder.value()); }

  // A hold begins, or ends. REQUIRES: the holder is valid; what ends is part of what began.
  void open(HolderId holder, HoldId hold, HolderBytes bytes, uint64_t twice, size_t chunks);
  void close(HolderId holder, HoldId hold, HolderBytes bytes, size_t chunks) noexcept;
  // A hold gets further chunks, or loses some.
  void grow(HolderId holder, HolderBytes bytes, size_t chunks) noexcept;
  void shrink(HolderId holder, HolderBytes bytes, size_t chunks) noexcept;
  // So many of the bytes are counted by another hold as well.
  void overlap(HolderId holder, uint64_t bytes) noexcept;
  // Bytes of a hold that goes on change their kind.
  void change(HolderId holder, HolderBytes from, HolderBytes to) noexcept;
  // The holder really protects this much.
  void correct(HolderId holder, Counted counted) noexcept;

  // The same of the holder's user, where it has one.
  [[nodiscard]] const Account* find_user(HolderId holder) const noexcept;
  [[nodiscard]] std::optional<uint32_t> user_of(HolderId holder) const noexcept;
  void correct_user(HolderId holder, Counted counted) noexcept;
  [[nodiscard]] const std::map<uint32_t, Account>& users() const noexcept { return users_; }
  [[nodiscard]] static uint64_t bound_of(const Account* account) noexcept {
    return account == nullptr ? 0 : account->bytes.sum() - account->twice;
  }

  // At least what the holder protects.
  [[nodiscard]] uint64_t bound(HolderId holder) const noexcept;
  // How often its account was corrected. What was there then counts rightly, whatever it has in common.
  [[nodiscard]] uint64_t counts(HolderId holder) const noexcept;
  [[nodiscard]] const Account* find(HolderId holder) const noexcept;
  [[nodiscard]] const std::map<uint32_t, Account>& all() const noexcept { return accounts_; }

 private:
  static void subtract(HolderBytes& from, const HolderBytes& bytes) noexcept;
  static void correct(Account& account, Counted counted) noexcept;
  // Calls `change` with the holder's account and, where there is one, its user's.
  template <typename Change>
  void change_both(HolderId holder, Change change) noexcept;

  std::map<uint32_t, Account> accounts_;
  std::map<uint32_t, Account> users_;
  std::unordered_map<uint32_t, uint32_t> users_of_;
};

}  // namespace kvpool
