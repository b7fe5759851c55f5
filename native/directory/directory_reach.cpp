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

// Whether something holds for the chunk in every tier from this one down that has it.
template <typename Predicate>
bool Directory::in_all_tiers(const ChunkKey& key, Predicate is_true) const {
  const RecordId here = find_record(key);
  if (here.valid() && !is_true(*this, here)) {
    return false;
  }
  return std::ranges::all_of(lower_tiers(), [&](const Directory* lower) {
    const RecordId below = lower->find_record(key);
    return !below.valid() || is_true(*lower, below);
  });
}

// A chunk within reach that may be evicted from every tier that has it: without followers if there is one, of the lowest
// priority, used longest ago.
std::optional<ChunkKey> Directory::victim_in_reach(const ChunkKey& key) const {
  using Candidate = std::tuple<bool, uint8_t, uint64_t, ChunkKey>;  // by what they are chosen, then which it is
  std::vector<Candidate> candidates;
  for (const ChunkKey& neighbour : table_.shared().keys_in_reach(key)) {
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

// Evicts a chunk of this tier with what follows it; `heir` gets its slot of the crowded table, this tier's own or the first one's,
// if it stands within reach until then and no other tier needs the entry.
void Directory::evict_for(ChunkIndex& crowded, const ChunkKey& heir, RecordId top) noexcept {
  for (RecordId id = leftmost_leaf(top), parent; id != top; id = leftmost_leaf(parent)) {
    parent = records_[id].parent;
    evict(id, Eviction::INDEX_FULL);
  }
  if (crowded.is_in_reach(heir)) {
    return;
  }
  const ChunkKey gone = records_[top].key;
  const auto entry = crowded.find(gone);
  if (entry && (entry->tiers & ~(tier_bit(tier_) | copies_bit())) == 0) {
    static_cast<void>(crowded.shared().bequeath(gone, heir));
  }
  evict(top, Eviction::INDEX_FULL);
}

// Whether the key has a slot of the table now, or one within its reach.
bool Directory::clear_reach(const ChunkKey& key) {
  const auto is_clear = [&] { return table_.find(key) || table_.is_in_reach(key); };
  for (int evicted = 0; evicted < EVICTIONS_MAX && !is_clear(); ++evicted) {
    const auto victim = victim_in_reach(key);
    if (!victim) {
      return false;
    }
    const RecordId here = find_record(*victim);
    if (here.valid()) {
      evict_for(table_, key, here);
    }
    for (Directory* lower : lower_tiers()) {
      const RecordId below = lower->find_record(*victim);
      if (below.valid() && !is_clear()) {
        lower->evict_for(table_, key, below);
      }
    }
  }
  return is_clear();
}

}  // namespace kvpool
