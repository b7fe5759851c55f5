#include "directory/demotion_order.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

// Part of the capacity for which the counts of a size class remember what was written to lower tiers and what was lost: a guess.
constexpr uint64_t WRITE_WINDOW_DIVISOR = 4;
// Chunks that one search may look at on the way from leaves to roots.
constexpr uint32_t CHAIN_STEPS = 1U << 15;
constexpr uint32_t LOOKS_PER_CHANGE = 8;
// Chunks that one search may find evicted from the lower tier with their ancestors: each goes to another list.
constexpr uint32_t EVICTED_AT_ONCE = 64;
// Chunks moved to another list in one call, each in about a hundred steps.
constexpr uint32_t MOVES_AT_ONCE = 64;

// Whether an ancestor of a chunk was evicted from the lower tier since its last use. The chunk can be written only with it.
bool follows_evicted(const ChunkRecords& records, RecordId id, uint32_t& steps) noexcept {
  for (RecordId above = records[id].parent; above.valid() && steps > 0; above = records[above].parent, --steps) {
    if (records[above].is_below || records[above].was_below) {
      return !records[above].is_below;
    }
  }
  return false;
}

}  // namespace

DemotionOrder::DemotionOrder(ChunkRecords& records, const SlotArena& arena, EvictionQueues& queues, const EvictionPolicy& policy,
                             Standings& standings, uint64_t capacity)
    : records_(records),
      arena_(arena),
      queues_(queues),
      policy_(policy),
      standings_(standings),
      shares_(capacity / WRITE_WINDOW_DIVISOR),
      unsaved_order_(queues, shares_) {}

void DemotionOrder::admit(Admitted admitted, double least_chance) noexcept {
  empty_search_.was_empty = empty_search_.was_empty && admitted == admitted_ && least_chance == least_chance_;
  admitted_ = admitted;
  least_chance_ = least_chance;
}

bool DemotionOrder::is_admitted(const ChunkRecord& record, uint64_t now_ns) const noexcept {
  switch (admitted_) {
    case Admitted::ALL:
      return true;
    case Admitted::LIKELY:
      return record.touches > 1 || policy_.chance(record.queue, record.last_access_ns, now_ns) >= least_chance_;
    case Admitted::USED_AGAIN:
      return record.touches > 1;
    case Admitted::NOTHING:
      return false;
  }
  return false;
}

void DemotionOrder::remember_evicted(uint32_t chunks) {
  KVPOOL_CHECK(!ghosts_);
  ghosts_.emplace(chunks);
}

void DemotionOrder::remember(const ChunkKey& key) noexcept {
  if (ghosts_) {
    ghosts_->add(key);
  }
}

uint32_t DemotionOrder::forget_written(uint32_t cursor, uint32_t looks) noexcept {
  const uint64_t stop = std::min<uint64_t>(uint64_t{cursor} + looks, records_.end());
  uint32_t moved = 0;
  uint64_t index = cursor;
  for (; index < stop && moved < MOVES_AT_ONCE; ++index) {
    const RecordId id(static_cast<uint32_t>(index));
    ChunkRecord& record = records_[id];
    if (record.was_below && !record.is_below) {
      standings_.set_written(record, false);
      standings_.settle_chunk(id);
      ++moved;
    }
  }
  search_anew();
  return index < records_.end() ? static_cast<uint32_t>(index) : 0;
}

Declined DemotionOrder::note_declined(const ChunkRecord& record, uint64_t now_ns) noexcept {
  if (record.was_below) {
    return Declined::WRITTEN_BEFORE;
  }
  if (is_admitted(record, now_ns)) {
    note_lost(record);
    return Declined::UNREADY;
  }
  return admitted_ == Admitted::NOTHING  ? Declined::NO_BUDGET
         : admitted_ == Admitted::LIKELY ? Declined::UNLIKELY
                                         : Declined::USED_ONCE;
}

std::vector<RecordId> DemotionOrder::unsaved_chain(RecordId leaf, uint32_t& steps) const {
  std::vector<RecordId> chain;
  for (RecordId id = leaf; id.valid() && !records_[id].is_below; id = records_[id].parent) {
    if (records_[id].state != ChunkState::READY || records_[id].pins > 0 || steps == 0) {
      return {};
    }
    --steps;
    chain.push_back(id);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

// The last chunk that follows this one and was used with it or later: by last use a chain's root comes first.
RecordId DemotionOrder::newest_of_chain(RecordId id, uint32_t& steps, uint64_t now_ns) const noexcept {
  while (steps > 0) {
    const RecordId child = records_[id].first_child;
    if (!child.valid() || !records_[child].is_listed() || !wants_place_below(records_[child], now_ns) ||
        records_[child].last_access_ns < records_[id].last_access_ns) {
      return id;
    }
    id = child;
    --steps;
  }
  return id;
}

UnsavedChain DemotionOrder::next_chain(uint32_t scan, WriteOrder order, uint64_t now_ns) {
  if (empty_search_.was_empty && empty_search_.order == order && queues_.unsaved_changes() < empty_search_.changes_until) {
    return {};
  }
  unsaved_order_.start(now_ns, order);
  uint32_t steps = CHAIN_STEPS;
  uint32_t steps_above = CHAIN_STEPS;
  uint32_t looks = 0;
  uint32_t evicted_below = 0;
  for (RecordId id; looks < scan && evicted_below < EVICTED_AT_ONCE && (id = unsaved_order_.next()).valid(); ++looks) {
    if (!wants_place_below(records_[id], now_ns)) {
      continue;
    }
    if (follows_evicted(records_, id, steps_above)) {
      standings_.set_written(records_[id], true);
      standings_.settle_chunk(id);
      ++evicted_below;
      continue;
    }
    const RecordId leaf = order == WriteOrder::COLDEST ? id : newest_of_chain(id, steps, now_ns);
    if (auto chain = unsaved_chain(leaf, steps); !chain.empty()) {
      return {std::move(chain)};
    }
  }
  empty_search_ = {evicted_below == 0, order, queues_.unsaved_changes() + looks / LOOKS_PER_CHANGE};
  return {{}, evicted_below};
}

}  // namespace kvpool
