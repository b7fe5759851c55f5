// Room in the shared table for a key that finds all the slots within its reach occupied. See directory.h.
//
// With random keys that is rare; a client that reads the table's seed can choose such keys. An idle chunk within reach is evicted,
// here or in a lower tier, and the key takes its slot: to deny others a slot, a client has to hold the chunks that have it.
#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// Chunks evicted for one key at most. Mostly one does: another eviction may have moved its entry out of reach.
constexpr int EVICTIONS_MAX = 8;

}  // namespace

// The slots of the table within reach of a key that has none of them.
class CrowdedReach {
 public:
  CrowdedReach(Directory& directory, const ChunkKey& heir) : directory_(directory), heir_(heir) {}

  [[nodiscard]] bool clear();

 private:
  template <typename Predicate>
  [[nodiscard]] bool in_all_tiers(const ChunkKey& key, Predicate is_true) const;
  [[nodiscard]] bool is_clear() const { return directory_.table_.find(heir_) || directory_.table_.is_in_reach(heir_); }
  [[nodiscard]] std::optional<ChunkKey> find_victim() const;
  void evict_from(Directory& tier, const ChunkKey& victim) noexcept;

  Directory& directory_;
  const ChunkKey& heir_;
};

// Whether something holds for the chunk in every tier from this one down that has it.
template <typename Predicate>
bool CrowdedReach::in_all_tiers(const ChunkKey& key, Predicate is_true) const {
  const auto holds_in = [&](const Directory& tier) {
    const RecordId id = tier.find_record(key);
    return !id.valid() || is_true(tier, id);
  };
  return holds_in(directory_) && std::ranges::all_of(directory_.lower_tiers(), [&](const Directory* lower) { return holds_in(*lower); });
}

// A chunk within reach that may be evicted from every tier that has it: without followers if there is one, of the lowest
// priority, used longest ago.
std::optional<ChunkKey> CrowdedReach::find_victim() const {
  using Candidate = std::tuple<bool, uint8_t, uint64_t, ChunkKey>;  // by what they are chosen, then which it is
  std::vector<Candidate> candidates;
  for (const ChunkKey& neighbour : directory_.table_.shared().keys_in_reach(heir_)) {
    const ChunkRecord* top = nullptr;  // in the uppermost tier that has it
    const bool may_go = in_all_tiers(neighbour, [&top](const Directory& tier, RecordId id) {
      top = top == nullptr ? &tier.records_[id] : top;
      return tier.room_.may_evict(id, tier.latest_ns_);
    });
    if (may_go && top != nullptr) {
      candidates.emplace_back(top->first_child.valid(), top->level, top->last_access_ns, neighbour);
    }
  }
  const auto is_before = [](const Candidate& one, const Candidate& other) {
    return std::tie(std::get<0>(one), std::get<1>(one), std::get<2>(one)) <
           std::tie(std::get<0>(other), std::get<1>(other), std::get<2>(other));
  };
  std::sort(candidates.begin(), candidates.end(), is_before);
  for (const auto& [has_followers, level, last_access_ns, neighbour] : candidates) {
    if (in_all_tiers(neighbour, [](const Directory& tier, RecordId id) { return tier.room_.may_evict_all({id}, tier.latest_ns_); })) {
      return neighbour;
    }
  }
  return std::nullopt;
}

// Evicts a chunk of a tier with what follows it, where it is there; the heir gets its slot of the crowded table, if it stands within
// reach until then and no other tier needs the entry.
void CrowdedReach::evict_from(Directory& tier, const ChunkKey& victim) noexcept {
  const RecordId top = tier.find_record(victim);
  if (!top.valid() || is_clear()) {
    return;
  }
  for (RecordId id = tier.leftmost_leaf(top), parent; id != top; id = tier.leftmost_leaf(parent)) {
    parent = tier.records_[id].parent;
    tier.evict(id, Eviction::INDEX_FULL);
  }
  ChunkIndex& crowded = directory_.table_;
  if (crowded.is_in_reach(heir_)) {
    return;
  }
  const auto entry = crowded.find(victim);
  if (entry && (entry->tiers & ~(tier_bit(tier.tier_) | tier.copies_bit())) == 0) {
    static_cast<void>(crowded.shared().bequeath(victim, heir_));
  }
  tier.evict(top, Eviction::INDEX_FULL);
}

bool CrowdedReach::clear() {
  for (int evicted = 0; evicted < EVICTIONS_MAX && !is_clear(); ++evicted) {
    const auto victim = find_victim();
    if (!victim) {
      return false;
    }
    evict_from(directory_, *victim);
    for (Directory* lower : directory_.lower_tiers()) {
      evict_from(*lower, *victim);
    }
  }
  return is_clear();
}

// Whether the key has a slot of the table now, or one within its reach.
bool Directory::clear_reach(const ChunkKey& key) { return CrowdedReach(*this, key).clear(); }

}  // namespace kvpool
