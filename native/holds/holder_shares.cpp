#include "holds/holder_shares.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/check.h"

namespace kvpool {
namespace {

// Holds of a holder that are compared with a chain for what they have in common: a guess that bounds the time.
constexpr size_t COMPARED_HOLDS = 256;
// A holder's chunks are counted one by one when a part of this size has changed since that was done last.
constexpr uint64_t CHANGED_PART = 4;
// The same for a holder of a chain on each of many ranks: about as many holds of each rank are among them.
constexpr size_t COMPARED_RANKS = 4;

// Whether so much has changed since an account was counted that it is worth counting again.
bool has_changed(const HolderAccounts::Account& account, uint64_t chunk_bytes) {
  return account.changed * CHANGED_PART * chunk_bytes >= account.counted.bytes &&
         account.changed * CHANGED_PART >= std::max<uint64_t>(account.holds.size(), account.counted.looks);
}

// How many leading chunks of a run are in one of these too. Holds are chains from the root on, and where two have a chunk in common
// they have all that precede it; or runs of chunks without a parent.
size_t count_common(const ChunkRecords& records, const HeldChains& chains, const std::vector<RecordId>& run) {
  size_t common = 0;
  const uint32_t root = run.empty() ? 0 : run.front().value();
  const bool is_of_chain = records.is_chain(run);
  const auto is_before = [](const HeldChains::value_type& one, uint32_t first) { return one.first < first; };
  for (auto other = std::lower_bound(chains.begin(), chains.end(), root, is_before);
       !run.empty() && other != chains.end() && other->first == root; ++other) {
    const std::vector<RecordId>& held = *other->second;
    size_t least = 1;
    size_t most = std::min(held.size(), run.size());
    if (!is_of_chain) {
      const auto end = run.begin() + static_cast<std::ptrdiff_t>(most);
      least = static_cast<size_t>(std::mismatch(run.begin(), end, held.begin()).first - run.begin());
      most = least;
    }
    while (least < most) {
      const size_t middle = (least + most + 1) / 2;
      if (held[middle - 1] == run[middle - 1]) {
        least = middle;
      } else {
        most = middle - 1;
      }
    }
    common = std::max(common, least);
  }
  return common;
}

}  // namespace

void HolderShares::limit(double share, double user_share) noexcept {
  share_ = share;
  user_share_ = user_share;
}

// What a holder may protect in all while `held` bytes are protected: its share of what the others leave. A share of 1 is no bound.
uint64_t HolderShares::share_of(HolderId holder, uint64_t held) const noexcept {
  const double share = share_ * limit_of(holder).value_or(1.0);
  if (share >= 1.0) {
    return UINT64_MAX;
  }
  const uint64_t others = held - std::min(held, accounts_.bound(holder));
  return static_cast<uint64_t>(static_cast<double>(capacity_ - std::min(capacity_, others)) * share);
}

// The share that the holder's user was given alone.
std::optional<double> HolderShares::limit_of(HolderId holder) const noexcept {
  const std::optional<uint32_t> user = accounts_.user_of(holder);
  const auto own = user ? shares_of_users_.find(*user) : shares_of_users_.end();
  return own == shares_of_users_.end() ? std::nullopt : std::optional(own->second);
}

// Of what the others leave, for the holder's user. 1 where it has none.
double HolderShares::user_share_of(HolderId holder) const noexcept {
  return accounts_.user_of(holder) ? limit_of(holder).value_or(user_share_) : 1.0;
}

// What the holder's user may protect in all. A share of 1 is no bound.
uint64_t HolderShares::user_limit_of(HolderId holder, uint64_t held) const noexcept {
  const double share = user_share_of(holder);
  if (share >= 1.0) {
    return UINT64_MAX;
  }
  const uint64_t own = HolderAccounts::bound_of(accounts_.find_user(holder));
  const uint64_t left = capacity_ - std::min(capacity_, held - std::min(held, own));
  return static_cast<uint64_t>(static_cast<double>(left) * share);
}

// Whether the holder's user may protect so much more.
bool HolderShares::has_user_share(HolderId holder, uint64_t wanted, uint64_t held) const noexcept {
  const uint64_t limit = user_limit_of(holder, held);
  return limit == UINT64_MAX || HolderAccounts::bound_of(accounts_.find_user(holder)) + wanted <= limit;
}

// Chains that a holder or a user has under a hold other than `own`, in the order of their first chunks.
HeldChains HolderShares::some_chains_of(const HolderAccounts::Account* account, HoldId own, size_t limit) const {
  HeldChains chains;
  if (account == nullptr) {
    return chains;
  }
  for (auto hold = account->holds.begin(); hold != account->holds.end() && chains.size() < limit; ++hold) {
    const std::vector<RecordId>& chain = table_.chain_of(*hold);
    if (*hold != own && !chain.empty()) {
      chains.emplace_back(chain.front().value(), &chain);
    }
  }
  std::sort(chains.begin(), chains.end());
  return chains;
}

// Counts what the holder and its user protect chunk by chunk, unless little has changed since. So for each chunk that comes or goes
// a few chunks are looked at, however many leases they are in, and a few leases. `bytes`: of a chunk, more or less.
void HolderShares::recount(HolderId holder, uint64_t bytes) {
  const HolderAccounts::Account* account = accounts_.find(holder);
  if (account != nullptr && has_changed(*account, bytes)) {
    accounts_.correct(holder, count_protected(*account));
  }
  const HolderAccounts::Account* user = accounts_.find_user(holder);
  if (user != nullptr && user_share_of(holder) < 1.0 && has_changed(*user, bytes)) {
    accounts_.correct_user(holder, count_protected(*user));
  }
}

// Leases first, each from its last chunk up to one with a parent that is counted already: what precedes that is counted as well.
// Reservations may not reach up to the root.
HolderAccounts::Counted HolderShares::count_protected(const HolderAccounts::Account& account) const {
  std::vector<bool> is_counted(records_.end());
  HolderAccounts::Counted counted;
  const auto count = [&](RecordId id) {
    const bool is_new = !is_counted[id.value()];
    is_counted[id.value()] = true;
    ++counted.looks;
    counted.bytes += is_new ? taken_bytes(records_[id].size_class) : 0;
    return is_new;
  };
  for (const HoldId hold : account.holds) {
    const HoldTable::Records* const held = table_.find_hold(hold);
    for (size_t index = held == nullptr ? 0 : held->size(); index-- > 0;) {
      if (!count((*held)[index]) && records_[(*held)[index]].parent.valid()) {
        break;
      }
    }
  }
  for (const HoldId hold : account.holds) {
    if (const ReservationState* const made = table_.find_reservation(hold)) {
      std::for_each(made->records.begin(), made->records.end(), count);
    }
  }
  return counted;
}

bool HolderShares::has_share(ShareClaim& claim, const std::vector<RecordId>& chain, uint64_t bytes) {
  if (!claim.holder.valid() || chain.size() < claim.fitting) {
    return true;
  }
  // Before how many chunks there is room for one more: nothing of what decides it changes while a request goes on.
  const auto fitting = [bytes](size_t covered, uint64_t bound, uint64_t limit) {
    const uint64_t room = limit - std::min(limit, bound);
    return room < bytes ? 0 : covered + std::min<uint64_t>(room / bytes, UINT32_MAX);
  };
  const auto fits = [&] {
    const uint64_t user = HolderAccounts::bound_of(accounts_.find_user(claim.holder));
    claim.fitting = std::min(
        fitting(claim.covered, accounts_.bound(claim.holder), share_of(claim.holder, claim.held)),
        fitting(std::max(claim.covered, claim.user_covered), user, user_limit_of(claim.holder, claim.held)));
    return chain.size() < claim.fitting;
  };
  if (fits()) {
    return true;
  }
  if (!claim.is_compared) {
    claim.is_compared = true;
    const size_t covered = count_common(records_, some_chains_of(accounts_.find(claim.holder), claim.own, COMPARED_HOLDS), chain);
    claim.user_covered = count_common(records_, some_chains_of(accounts_.find_user(claim.holder), claim.own, COMPARED_HOLDS), chain);
    if (claim.own == 0) {
      claim.covered = covered;
    } else {
      accounts_.overlap(claim.holder, std::min(covered, claim.covered) * bytes);
    }
  }
  if (!claim.is_recounted) {
    claim.is_recounted = true;
    recount(claim.holder, bytes);
  }
  return fits();
}

// Whether the holder may protect so much more, whatever of it is protected already.
bool HolderShares::has_room(HolderId holder, uint64_t bytes) const noexcept {
  return !holder.valid() || (accounts_.bound(holder) + bytes <= share_of(holder, protected_bytes_) &&
                             has_user_share(holder, bytes, protected_bytes_));
}

bool HolderShares::may_hold(HolderId holder, const std::vector<HoldTable::Records>& runs) {
  uint64_t all = 0;
  for (const HoldTable::Records& run : runs) {
    all += run.size() * taken_bytes(records_[run.front()].size_class);
  }
  if (has_room(holder, all)) {
    return true;
  }
  const auto beyond = [&](const HolderAccounts::Account* account) {
    const HeldChains chains = some_chains_of(account, 0, COMPARED_HOLDS * std::min(runs.size(), COMPARED_RANKS));
    uint64_t bytes = 0;
    for (const HoldTable::Records& run : runs) {
      bytes += (run.size() - count_common(records_, chains, run)) * taken_bytes(records_[run.front()].size_class);
    }
    return bytes;
  };
  const uint64_t own = beyond(accounts_.find(holder));
  const uint64_t of_user = beyond(accounts_.find_user(holder));
  recount(holder, taken_bytes(records_[runs.front().front()].size_class));
  return accounts_.bound(holder) + own <= share_of(holder, protected_bytes_) && has_user_share(holder, of_user, protected_bytes_);
}

HolderId HolderShares::holder_of(HoldId hold) const noexcept {
  const auto found = charged_.find(hold);
  return found == charged_.end() ? HolderId() : found->second;
}

size_t HolderShares::affordable(HolderId holder, const std::vector<HoldId>& holds, const std::vector<ClassId>& of,
                             size_t wanted) {
  KVPOOL_CHECK(holds.size() == of.size());
  uint64_t all = 0;
  for (const ClassId each : of) {
    all += wanted * taken_bytes(each);
  }
  if (has_room(holder, all)) {
    return wanted;
  }
  std::vector<uint64_t> sizes;
  std::transform(of.begin(), of.end(), std::back_inserter(sizes), [this](ClassId each) { return taken_bytes(each); });
  std::vector<size_t> covered(holds.size());
  std::vector<size_t> user_covered(holds.size());
  uint64_t held = protected_bytes_;
  const auto beyond = [&sizes](size_t chunks, const std::vector<size_t>& there) {
    uint64_t bytes = 0;
    for (size_t index = 0; index < sizes.size(); ++index) {
      bytes += (chunks - std::min(chunks, there[index])) * sizes[index];
    }
    return bytes;
  };
  const auto fits = [&](size_t chunks) {
    return accounts_.bound(holder) + beyond(chunks, covered) <= share_of(holder, held) &&
           has_user_share(holder, beyond(chunks, user_covered), held);
  };
  const size_t compared = COMPARED_HOLDS * std::min(holds.size(), COMPARED_RANKS);
  const HeldChains chains = some_chains_of(accounts_.find(holder), 0, compared);
  const HeldChains of_user = some_chains_of(accounts_.find_user(holder), 0, compared);
  for (size_t index = 0; index < holds.size(); ++index) {
    const std::vector<RecordId>& chain = table_.chain_of(holds[index]);
    covered[index] = count_common(records_, chains, chain);
    user_covered[index] = count_common(records_, of_user, chain);
    for (const RecordId id : chain) {
      held -= records_[id].holds == 1 ? std::min(held, sizes[index]) : 0;  // by what is to be judged here alone
    }
  }
  recount(holder, sizes.front());
  size_t least = 0;
  while (least < wanted) {
    const size_t middle = least + (wanted - least + 1) / 2;
    if (fits(middle)) {
      least = middle;
    } else {
      wanted = middle - 1;
    }
  }
  return least;
}

bool HolderShares::charge(const std::vector<HoldId>& holds, HolderId holder) {
  bool are_charged = holder.valid();
  std::optional<HeldChains> chains;
  for (const HoldId hold : holds) {
    const HoldTable::Records* const held = table_.find_hold(hold);
    if (held == nullptr || !holder.valid() || charged_.contains(hold)) {
      are_charged = false;
      continue;
    }
    const std::vector<RecordId>& chain = *held;
    const uint64_t bytes = taken_bytes(records_[chain.front()].size_class);
    const uint64_t leased = chain.size() * bytes;
    const bool is_small = accounts_.bound(holder) + leased <= share_of(holder, protected_bytes_);
    if (!is_small && !chains) {
      chains = some_chains_of(accounts_.find(holder), 0, COMPARED_HOLDS * std::min(holds.size(), COMPARED_RANKS));
    }
    const uint64_t twice = is_small ? 0 : count_common(records_, *chains, chain) * bytes;
    accounts_.open(holder, hold, {0, 0, leased}, twice, chain.size());
    charged_.emplace(hold, holder);
  }
  return are_charged;
}

void HolderShares::shorten(HoldId hold, ClassId size_class, size_t ended) noexcept {
  const auto found = charged_.find(hold);
  if (found != charged_.end()) {
    accounts_.shrink(found->second, {0, 0, ended * taken_bytes(size_class)}, ended);
  }
}

void HolderShares::end(HoldId hold, const std::vector<RecordId>& chain) noexcept {
  const auto found = charged_.find(hold);
  if (found != charged_.end()) {
    accounts_.close(found->second, hold, {0, 0, chain.size() * taken_bytes(records_[chain.front()].size_class)}, chain.size());
    charged_.erase(found);
  }
}

// Once a reservation has expired, all that is left of it may still be written.
HolderBytes HolderShares::bytes_of(const ReservationState& state) noexcept {
  const uint64_t all = state.records.size() * state.taken_bytes;
  const uint64_t writing = state.writing * state.taken_bytes;
  return state.expired ? HolderBytes{0, all, 0} : HolderBytes{writing, 0, all - writing};
}

void HolderShares::open(HoldId id, const ReservationState& state, const ShareClaim& claim) {
  if (state.holder.valid()) {
    accounts_.open(state.holder, id, bytes_of(state), claim.covered * state.taken_bytes, state.records.size());
  }
}

void HolderShares::grow(const ReservationState& state, size_t writing, size_t added) noexcept {
  if (state.holder.valid()) {
    accounts_.grow(state.holder, {writing * state.taken_bytes, 0, (added - writing) * state.taken_bytes}, added);
  }
}

void HolderShares::change(const ReservationState& state, HolderBytes before) noexcept {
  if (state.holder.valid()) {
    accounts_.change(state.holder, before, bytes_of(state));
  }
}

void HolderShares::note_stored(const ReservationState& state, size_t chunks) noexcept {
  if (state.holder.valid() && chunks > 0) {
    const uint64_t bytes = chunks * state.taken_bytes;
    accounts_.change(state.holder, {bytes, 0, 0}, {0, 0, bytes});
  }
}

void HolderShares::shorten(HoldId id, const ReservationState& state, HolderBytes before, size_t ended) noexcept {
  if (!state.holder.valid()) {
    return;
  }
  if (state.records.empty()) {
    accounts_.close(state.holder, id, before, ended);
    return;
  }
  const HolderBytes after = bytes_of(state);
  accounts_.shrink(state.holder, {before.reserved - after.reserved, before.zombies - after.zombies, before.leased - after.leased},
                   ended);
}

// A chunk can be evicted while nobody holds it; one with a pin can soon.
void HolderShares::verify_protected(std::vector<std::string>& broken) const {
  uint64_t taken = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    const bool is_evictable = record.holds == 0 && (record.state == ChunkState::READY || record.pins > 0);
    if (record.state != ChunkState::FREE && !is_evictable) {
      taken += record.has_slot() ? taken_bytes(record.size_class) : record_share_;
    }
  }
  if (taken != protected_bytes_) {
    broken.push_back("what nothing can evict takes " + std::to_string(taken) + " bytes, counted " + std::to_string(protected_bytes_));
  }
}

std::vector<std::string> HolderShares::verify() const {
  std::vector<std::string> broken;
  verify_protected(broken);
  size_t holds = 0;
  std::map<uint32_t, HolderBytes> of_users;
  for (const auto& [number, account] : accounts_.all()) {
    if (account.user) {
      HolderBytes& user = of_users[*account.user];
      user = {user.reserved + account.bytes.reserved, user.zombies + account.bytes.zombies, user.leased + account.bytes.leased};
    }
    HolderBytes sums;
    for (const HoldId hold : account.holds) {
      const ReservationState* const made = table_.find_reservation(hold);
      const std::vector<RecordId>& chain = table_.chain_of(hold);
      const HolderBytes bytes = made != nullptr ? bytes_of(*made)
                                                : HolderBytes{0, 0, chain.size() * taken_bytes(records_[chain.front()].size_class)};
      sums = {sums.reserved + bytes.reserved, sums.zombies + bytes.zombies, sums.leased + bytes.leased};
      ++holds;
    }
    const bool is_counted = sums.reserved == account.bytes.reserved && sums.zombies == account.bytes.zombies &&
                            sums.leased == account.bytes.leased;
    if (!is_counted || accounts_.bound(HolderId(number)) < count_protected(account).bytes) {
      broken.push_back("holder " + std::to_string(number) + " protects more than is counted, or its bytes are miscounted");
    }
  }
  for (const auto& [user, account] : accounts_.users()) {
    if (of_users[user].sum() != account.bytes.sum() || HolderAccounts::bound_of(&account) < count_protected(account).bytes) {
      broken.push_back("user " + std::to_string(user) + " protects more than is counted, or not what its holders do");
    }
  }
  size_t charged = charged_.size();
  for (const auto& [id, state] : table_.reservations()) {
    charged += state.holder.valid() ? 1U : 0U;
  }
  if (holds != charged) {
    broken.push_back("holds that count for a holder: " + std::to_string(holds) + ", charged " + std::to_string(charged));
  }
  return broken;
}

}  // namespace kvpool
