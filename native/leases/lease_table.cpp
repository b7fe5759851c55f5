#include "leases/lease_table.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {

const Lease& LeaseTable::grant(Lease lease, uint64_t now_ns) {
  KVPOOL_CHECK(lease.chunks > 0 && !lease.ranks.empty() && !lease.holds.empty());
  KVPOOL_CHECK(lease.holds.size() % lease.ranks.size() == 0);
  lease.id = ++last_id_;
  Owner& owner = owners_[lease.owner];
  owner.leases.insert(lease.id);
  owner.chunks += lease.held();
  const auto [entry, is_new] = leases_.emplace(lease.id, std::move(lease));
  KVPOOL_CHECK(is_new);
  set_deadline(entry->second, now_ns);
  return entry->second;
}

void LeaseTable::set_deadline(Lease& lease, uint64_t now_ns) {
  const uint64_t deadline_ns = now_ns + std::max(ttl_ns_, lease.least_ttl_ns);
  order_.insert({deadline_ns, lease.id});
  lease.deadline_ns = deadline_ns;
}

const Lease* LeaseTable::find(uint64_t id, uint32_t owner) const noexcept {
  const auto found = leases_.find(id);
  return found != leases_.end() && found->second.owner == owner ? &found->second : nullptr;
}

bool LeaseTable::renew(uint64_t id, uint32_t owner, uint64_t now_ns) {
  const auto found = leases_.find(id);
  if (found == leases_.end() || found->second.owner != owner) {
    return false;
  }
  order_.erase({found->second.deadline_ns, id});
  set_deadline(found->second, now_ns);
  return true;
}

std::vector<HoldId> LeaseTable::end_lease(uint64_t id, uint32_t owner) {
  const auto found = leases_.find(id);
  return found != leases_.end() && found->second.owner == owner ? end_found(found) : std::vector<HoldId>();
}

std::vector<HoldId> LeaseTable::end_found(Leases::iterator lease) {
  const auto owner = owners_.find(lease->second.owner);
  KVPOOL_CHECK(owner != owners_.end() && owner->second.chunks >= lease->second.held());
  owner->second.chunks -= lease->second.held();
  owner->second.leases.erase(lease->first);
  if (owner->second.leases.empty() && owner->second.chunks == 0) {
    owners_.erase(owner);
  }
  order_.erase({lease->second.deadline_ns, lease->first});
  std::vector<HoldId> holds = std::move(lease->second.holds);
  leases_.erase(lease);
  return holds;
}

void LeaseTable::end_owner(uint32_t owner) {
  if (count_of(owner) > 0) {
    leaving_.push_back(owner);
  }
}

std::vector<HoldId> LeaseTable::expire(uint64_t now_ns, int64_t& left, uint64_t lease_cost) {
  std::vector<HoldId> holds;
  const auto end_one = [&](uint64_t id) {
    const auto lease = leases_.find(id);
    left -= static_cast<int64_t>(lease->second.held() + lease_cost);
    const std::vector<HoldId> ended = end_found(lease);
    holds.insert(holds.end(), ended.begin(), ended.end());
  };
  while (left > 0 && !leaving_.empty()) {
    const auto owner = owners_.find(leaving_.front());
    if (owner == owners_.end() || owner->second.leases.empty()) {
      leaving_.pop_front();
    } else {
      end_one(*owner->second.leases.begin());
    }
  }
  while (left > 0 && !order_.empty() && order_.begin()->first <= now_ns) {
    ++expired_;
    end_one(order_.begin()->second);
  }
  return holds;
}

size_t LeaseTable::count_of(uint32_t owner) const noexcept {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? 0 : found->second.leases.size();
}

uint64_t LeaseTable::chunks_of(uint32_t owner) const noexcept {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? 0 : found->second.chunks;
}

void LeaseTable::count_chunks(uint32_t owner, int64_t chunks) {
  Owner& counted = owners_[owner];
  KVPOOL_CHECK(chunks >= 0 || counted.chunks >= static_cast<uint64_t>(-chunks));
  counted.chunks += static_cast<uint64_t>(chunks);
  if (counted.leases.empty() && counted.chunks == 0) {
    owners_.erase(owner);
  }
}

std::vector<std::pair<uint32_t, size_t>> LeaseTable::owners() const {
  std::vector<std::pair<uint32_t, size_t>> found;
  for (const auto& [id, owner] : owners_) {
    if (!owner.leases.empty()) {
      found.emplace_back(id, owner.leases.size());
    }
  }
  return found;
}

uint64_t LeaseTable::all_chunks() const noexcept {
  uint64_t chunks = 0;
  for (const auto& [id, owner] : owners_) {
    chunks += owner.chunks;
  }
  return chunks;
}

std::vector<const Lease*> LeaseTable::all() const {
  std::vector<const Lease*> found;
  for (const auto& [id, lease] : leases_) {
    found.push_back(&lease);
  }
  std::sort(found.begin(), found.end(), [](const Lease* one, const Lease* other) { return one->id < other->id; });
  return found;
}

std::vector<std::string> LeaseTable::verify() const {
  std::vector<std::string> broken;
  std::unordered_map<uint32_t, uint64_t> chunks;
  for (const auto& [id, lease] : leases_) {
    const std::string name = "lease " + std::to_string(id);
    const auto owner = owners_.find(lease.owner);
    chunks[lease.owner] += lease.held();
    if (owner == owners_.end() || !owner->second.leases.contains(id)) {
      broken.push_back(name + " is not among those of its owner");
    }
    if (!order_.contains({lease.deadline_ns, id})) {
      broken.push_back(name + " is not in the order of deadlines");
    }
  }
  size_t owned = 0;
  for (const auto& [id, owner] : owners_) {
    owned += owner.leases.size();
    if (owner.chunks < chunks[id] || (owner.leases.empty() && owner.chunks == 0)) {
      broken.push_back("leases: owner " + std::to_string(id) + " is miscounted");
    }
  }
  if (owned != leases_.size() || order_.size() != leases_.size()) {
    broken.push_back("leases: " + std::to_string(owned) + " are owned, " + std::to_string(order_.size()) + " have deadlines, " +
                     std::to_string(leases_.size()) + " exist");
  }
  return broken;
}

}  // namespace kvpool
