#include "saves/plain_saves.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace kvpool {

uint64_t PlainSaves::add(PlainSave save, uint64_t now_ns) {
  KVPOOL_CHECK(save.committed < save.chunks && save.holders.size() == (save.is_chain ? 1 : save.chunks));
  save.id = new_id();
  save.deadline_ns = now_ns + ttl_ns_;
  owners_[save.owner].saves.insert(save.id);
  order_.insert({save.deadline_ns, save.id});
  const uint64_t id = save.id;
  saves_.emplace(id, std::move(save));
  return id;
}

const PlainSave* PlainSaves::find(uint64_t id, uint32_t owner) const noexcept {
  const auto found = saves_.find(id);
  return found != saves_.end() && found->second.owner == owner ? &found->second : nullptr;
}

void PlainSaves::note_committed(uint64_t id, uint64_t chunks) {
  const auto found = saves_.find(id);
  KVPOOL_CHECK(found != saves_.end() && chunks <= found->second.chunks - found->second.committed);
  found->second.committed += chunks;
  if (found->second.committed == found->second.chunks) {
    take(found);
  }
}

std::optional<PlainSave> PlainSaves::take(uint64_t id, uint32_t owner) {
  const auto found = saves_.find(id);
  return found != saves_.end() && found->second.owner == owner ? std::optional(take(found)) : std::nullopt;
}

std::vector<PlainSave> PlainSaves::take_owner(uint32_t owner) {
  const auto found = owners_.find(owner);
  std::vector<uint64_t> ids;
  if (found != owners_.end()) {
    ids.assign(found->second.saves.begin(), found->second.saves.end());
  }
  std::sort(ids.begin(), ids.end());
  std::vector<PlainSave> taken;
  std::transform(ids.begin(), ids.end(), std::back_inserter(taken), [this](uint64_t id) { return take(saves_.find(id)); });
  return taken;
}

std::vector<PlainSave> PlainSaves::take_expired(uint64_t now_ns) {
  std::vector<PlainSave> taken;
  while (!order_.empty() && order_.begin()->first <= now_ns) {
    taken.push_back(take(saves_.find(order_.begin()->second)));
  }
  return taken;
}

PlainSave PlainSaves::take(Saves::iterator save) {
  KVPOOL_CHECK(save != saves_.end());
  const PlainSave taken = std::move(save->second);
  saves_.erase(save);
  order_.erase({taken.deadline_ns, taken.id});
  const auto owner = owners_.find(taken.owner);
  KVPOOL_CHECK(owner != owners_.end());
  owner->second.saves.erase(taken.id);
  forget_idle(owner);
  return taken;
}

void PlainSaves::forget_idle(std::unordered_map<uint32_t, Owner>::iterator owner) {
  if (owner->second.saves.empty() && owner->second.others == 0) {
    owners_.erase(owner);
  }
}

void PlainSaves::count_others(uint32_t owner, int64_t saves) {
  const auto found = owners_.try_emplace(owner).first;
  KVPOOL_CHECK(saves >= 0 || found->second.others >= static_cast<size_t>(-saves));
  found->second.others += static_cast<size_t>(saves);
  forget_idle(found);
}

size_t PlainSaves::count_of(uint32_t owner) const noexcept {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? 0 : found->second.saves.size() + found->second.others;
}

std::vector<std::pair<uint32_t, size_t>> PlainSaves::owners() const {
  std::vector<std::pair<uint32_t, size_t>> counts;
  std::transform(owners_.begin(), owners_.end(), std::back_inserter(counts),
                 [](const auto& owner) { return std::pair(owner.first, owner.second.saves.size() + owner.second.others); });
  return counts;
}

std::vector<HoldId> PlainSaves::holders() const {
  std::vector<HoldId> holders;
  for (const auto& [id, save] : saves_) {
    holders.insert(holders.end(), save.holders.begin(), save.holders.end());
  }
  return holders;
}

std::vector<std::string> PlainSaves::verify() const {
  std::vector<std::string> broken;
  size_t owned = 0;
  for (const auto& [number, owner] : owners_) {
    owned += owner.saves.size();
    if (owner.saves.empty() && owner.others == 0) {
      broken.push_back("plain saves: owner " + std::to_string(number) + " has none");
    }
  }
  for (const auto& [id, save] : saves_) {
    const auto owner = owners_.find(save.owner);
    if (owner == owners_.end() || !owner->second.saves.contains(id) || !order_.contains({save.deadline_ns, id})) {
      broken.push_back("plain saves: " + std::to_string(id) + " is not among its owner's, or has no deadline");
    }
    if (save.holders.size() != (save.is_chain ? 1 : save.chunks)) {
      broken.push_back("plain saves: " + std::to_string(id) + " has not a holder for each chunk, or one for its chain");
    }
    if (save.committed >= save.chunks) {
      broken.push_back("plain saves: " + std::to_string(id) + " is committed whole");
    }
  }
  if (owned != saves_.size() || order_.size() != saves_.size()) {
    broken.push_back("plain saves: owners name " + std::to_string(owned) + ", " + std::to_string(order_.size()) + " have deadlines, " +
                     std::to_string(saves_.size()) + " exist");
  }
  return broken;
}

}  // namespace kvpool
