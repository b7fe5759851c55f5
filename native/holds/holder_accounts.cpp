#include "holds/holder_accounts.h"

#include <algorithm>

#include "base/check.h"

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

template <typename Change>
void HolderAccounts::change_both(HolderId holder, Change change) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  change(found->second);
  if (found->second.user) {
    const auto user = users_.find(*found->second.user);
    KVPOOL_CHECK(user != users_.end());
    change(user->second);
  }
}

void HolderAccounts::open(HolderId holder, HoldId hold, HolderBytes bytes, uint64_t twice, size_t chunks) {
  const auto [own, is_new] = accounts_.try_emplace(holder.value());
  const auto joined = users_of_.find(holder.value());
  if (is_new && joined != users_of_.end()) {
    own->second.user = joined->second;
  }
  if (own->second.user) {
    users_.try_emplace(*own->second.user);
  }
  change_both(holder, [&](Account& account) {
    account.holds.insert(hold);
    add(account.bytes, bytes);
    account.changed += chunks;
  });
  own->second.twice += std::min(twice, bytes.sum());
}

void HolderAccounts::close(HolderId holder, HoldId hold, HolderBytes bytes, size_t chunks) noexcept {
  change_both(holder, [&](Account& account) {
    KVPOOL_CHECK(account.holds.erase(hold) == 1);
    subtract(account.bytes, bytes);
    // What was in it twice may now be there once.
    account.twice -= std::min(account.twice, bytes.sum());
    account.changed += chunks;
  });
  const auto own = accounts_.find(holder.value());
  const std::optional<uint32_t> user = own->second.user;
  if (own->second.holds.empty()) {
    accounts_.erase(own);
  }
  if (user && users_.at(*user).holds.empty()) {
    users_.erase(*user);
  }
}

void HolderAccounts::grow(HolderId holder, HolderBytes bytes, size_t chunks) noexcept {
  change_both(holder, [&](Account& account) {
    add(account.bytes, bytes);
    account.changed += chunks;
  });
}

void HolderAccounts::shrink(HolderId holder, HolderBytes bytes, size_t chunks) noexcept {
  change_both(holder, [&](Account& account) {
    subtract(account.bytes, bytes);
    account.twice -= std::min(account.twice, bytes.sum());
    account.changed += chunks;
  });
}

void HolderAccounts::overlap(HolderId holder, uint64_t bytes) noexcept {
  const auto found = accounts_.find(holder.value());
  KVPOOL_CHECK(found != accounts_.end());
  found->second.twice = std::min(found->second.twice + bytes, found->second.bytes.sum());
}

void HolderAccounts::change(HolderId holder, HolderBytes from, HolderBytes to) noexcept {
  change_both(holder, [&](Account& account) {
    subtract(account.bytes, from);
    add(account.bytes, to);
    const uint64_t less = from.sum() - std::min(from.sum(), to.sum());
    account.twice -= std::min(account.twice, less);
  });
}

void HolderAccounts::correct(Account& account, Counted counted) noexcept {
  account.twice = account.bytes.sum() - std::min(account.bytes.sum(), counted.bytes);
  account.changed = 0;
  account.counted = counted;
  ++account.counts;
}

void HolderAccounts::correct(HolderId holder, Counted counted) noexcept {
  const auto found = accounts_.find(holder.value());
  if (found != accounts_.end()) {
    correct(found->second, counted);
  }
}

void HolderAccounts::correct_user(HolderId holder, Counted counted) noexcept {
  const auto joined = users_of_.find(holder.value());
  const auto found = joined == users_of_.end() ? users_.end() : users_.find(joined->second);
  if (found != users_.end()) {
    correct(found->second, counted);
  }
}

std::optional<uint32_t> HolderAccounts::user_of(HolderId holder) const noexcept {
  const auto joined = users_of_.find(holder.value());
  return joined == users_of_.end() ? std::nullopt : std::optional(joined->second);
}

uint64_t HolderAccounts::bound(HolderId holder) const noexcept { return bound_of(find(holder)); }

uint64_t HolderAccounts::counts(HolderId holder) const noexcept {
  const Account* const account = find(holder);
  return account == nullptr ? 0 : account->counts;
}

const HolderAccounts::Account* HolderAccounts::find(HolderId holder) const noexcept {
  const auto found = accounts_.find(holder.value());
  return found == accounts_.end() ? nullptr : &found->second;
}

const HolderAccounts::Account* HolderAccounts::find_user(HolderId holder) const noexcept {
  const auto joined = users_of_.find(holder.value());
  const auto found = joined == users_of_.end() ? users_.end() : users_.find(joined->second);
  return found == users_.end() ? nullptr : &found->second;
}

}  // namespace kvpool
