#include "kvpool/holder_accounts.h"

#include <algorithm>

#include "kvpool/check.h"

namespace kvpool {
namespace {

void add(HolderBytes& to, const HolderBytes& bytes) noexcept {
  to.reserved += bytes.reserved;
  to.zombies += bytes.zombies;
  to.leased += bytes.leased;
}

}  // namespace

void HolderAccounts::subtract(HolderBytes& from, const HolderBytes& bytes) noexcept {
  KVPOOL_CHECK(from.reserved >= bytes.reserved);
  KVPOOL_CHECK(from.zombies >= bytes.zombies);
  KVPOOL_CHECK(from.leased >= bytes.leased);
  from.reserved -= bytes.reserved;
  from.zombies -= bytes.zombies;
  from.leased -= bytes.leased;
}

void HolderAccounts::open(HolderId holder, HoldId hold, HolderBytes bytes, uint64_t twice, size_t chunks) {
  Account& account = accounts_[holder.value()];
  account.holds.insert(hold);
  add(account.bytes, bytes);
  account.twice += std::min(twice, bytes.sum());
  account.changed += chunks;
}

void HolderAccounts::close(HolderId holder, HoldId hold, HolderBytes bytes, size_t chunks) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  Account& account = found->second;
  KVPOOL_CHECK(account.holds.erase(hold) == 1);
  if (account.holds.empty()) {
    accounts_.erase(found);
    return;
  }
  subtract(account.bytes, bytes);
  // What was in it twice may now be there once.
  account.twice -= std::min(account.twice, bytes.sum());
  account.changed += chunks;
}

void HolderAccounts::grow(HolderId holder, HolderBytes bytes, size_t chunks) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  add(found->second.bytes, bytes);
  found->second.changed += chunks;
}

void HolderAccounts::shrink(HolderId holder, HolderBytes bytes, size_t chunks) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  subtract(found->second.bytes, bytes);
  found->second.twice -= std::min(found->second.twice, bytes.sum());
  found->second.changed += chunks;
}

void HolderAccounts::overlap(HolderId holder, uint64_t bytes) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  found->second.twice = std::min(found->second.twice + bytes, found->second.bytes.sum());
}

void HolderAccounts::change(HolderId holder, HolderBytes from, HolderBytes to) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  subtract(found->second.bytes, from);
  add(found->second.bytes, to);
  const uint64_t less = from.sum() - std::min(from.sum(), to.sum());
  found->second.twice -= std::min(found->second.twice, less);
}

void HolderAccounts::correct(HolderId holder, uint64_t bytes) noexcept {
  const auto found = accounts_.find(holder.value());
  if (found != accounts_.end()) {
    found->second.twice = found->second.bytes.sum() - std::min(found->second.bytes.sum(), bytes);
    found->second.changed = 0;
    found->second.kept = bytes;
  }
}

uint64_t HolderAccounts::bound(HolderId holder) const noexcept {
  const Account* account = find(holder);
  return account == nullptr ? 0 : account->bytes.sum() - account->twice;
}

const HolderAccounts::Account* HolderAccounts::find(HolderId holder) const noexcept {
  const auto found = accounts_.find(holder.value());
  return found == accounts_.end() ? nullptr : &found->second;
}

}  // namespace kvpool
