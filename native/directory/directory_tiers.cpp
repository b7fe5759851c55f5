// A directory as one tier of several: entries in the shared table, promotion, demotion, restoring. See directory.h and tier_set.h.
#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"
#include "hash/sampling.h"

namespace kvpool {

// Some lower tier has the chunk, or none does any more.
void Directory::mark_below(RecordId id, bool is_below) noexcept {
  ChunkRecord& record = records_[id];
  if (record.is_below == is_below) {
    return;
  }
  record.is_below = is_below;
  standings_.set_written(record, record.was_below || is_below);
  if (record.state == ChunkState::READY) {
    stats_.unsaved_chunks += is_below ? UINT64_MAX : 1U;
    if (is_below) {
      demotion_.note_written(record);
    }
  }
  standings_.settle_chunk(id);
}

// Whether another tier has it too, and not merely a copy that leaves with it.
bool Directory::is_elsewhere(const ChunkKey& key) const noexcept {
  return originals_ != nullptr || (tiers_ != nullptr && (tiers_->tiers_of(key) & ~(tier_bit(tier_) | copies_bit())) != 0);
}

std::span<Directory* const> Directory::lower_tiers() const noexcept {
  return tiers_ == nullptr ? std::span<Directory* const>() : tiers_->below(*this);
}

// The uppermost lower tier that has a chunk.
std::optional<Tier> Directory::uppermost_below(const ChunkKey& key) const noexcept {
  const unsigned below = lower_bits_ == 0 ? 0U : static_cast<unsigned>(tiers_->tiers_of(key) & lower_bits_);
  return below == 0 ? std::nullopt : std::optional(static_cast<Tier>(std::countr_zero(below)));
}

// The key's entry names this record from now on; it is new, or a lower tier's.
void Directory::enter(const ChunkKey& key, RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  const auto before = table_.enter(key, id, record.generation, record.page);
  KVPOOL_CHECK(before.has_value());
  if (lower_bits_ != 0) {
    record.is_below = ((is_lower() ? tiers_->tiers_of(key) : *before) & lower_bits_) != 0;
  }
}

void Directory::leave(const ChunkKey& key) noexcept {
  const auto entry = table_.find(key);
  KVPOOL_CHECK(entry.has_value());
  const auto others = static_cast<uint8_t>(entry->tiers & ~tier_bit(tier_));
  if (others == 0) {
    table_.erase(key);
    return;
  }
  table_.set_tiers(key, others);
  table_.move(key, RecordId(), entry->generation, PageIndex());
}

void Directory::count_departure(const ChunkRecord& record) {
  if (is_elsewhere(record.key)) {
    ++stats_.shed_chunks;
    return;
  }
  ++stats_.evicted_chunks;
  if (lower_bits_ != 0) {
    ++stats_.declined[static_cast<size_t>(demotion_.note_declined(record, latest_ns_))];
  }
  demotion_.remember(record.key);
}

// Why a written chunk may not become visible in this lower tier: its source was removed meanwhile, or the shared table has no
// entry left for it. Clients choose keys: 256 of one home leave none once the chunk's own entry is gone.
// `source`: the chunk's generation in the tier that it was copied from, or 0.
std::optional<SaveState> Directory::why_unpublishable(const ChunkRecord& record, Tier from, uint64_t source) const noexcept {
  if (originals_ != nullptr) {
    return originals_->is_copied_from(record.key, from, source) ? std::nullopt : std::optional(SaveState::EXPIRED);
  }
  if (!is_lower()) {
    return std::nullopt;
  }
  if (source != 0) {
    const Directory* upper = tiers_->tier_at(from);
    const ChunkRecord* above = upper == nullptr ? nullptr : upper->find_ready(record.key);
    if (above == nullptr || above->generation != source) {
      return SaveState::EXPIRED;
    }
  }
  return tiers_->can_enter(record.key) ? std::nullopt : std::optional(SaveState::FULL);
}

// REQUIRES, in a lower tier: the shared table has the key's entry, or room for it.
void Directory::become_ready(ChunkRecord& record) noexcept {
  table_.add_tiers(record.key, tier_bit(tier_));
  record.state = ChunkState::READY;
  record.stored_tick = tick_of(latest_ns_);
  record.touches = std::max(record.touches, uint8_t{1});
  NamespaceCounts& counts = namespaces_[record.owner.value()];
  ++counts.chunks;
  counts.held += record.holds > 0 ? 1U : 0U;
  counts.bytes += chunk_bytes(record);
  ++stats_.chunks;
  counted_ += record.generation > counted_from_ ? 1U : 0U;
  stats_.unsaved_chunks += record.is_below ? 0U : 1U;
  if (is_lower()) {
    tiers_->note(*this, record.key, true);
  }
}

// Whether a chunk of an earlier life may follow its parent, and the shared table has room for its entry.
bool Directory::is_restorable(NamespaceId owner, ClassId size_class, RecordId above, const ChunkKey& key) const noexcept {
  if (above.valid()) {
    const ChunkRecord& parent = records_[above];
    if (parent.state != ChunkState::READY || parent.owner != owner || parent.size_class != size_class ||
        parent.depth + 1 >= max_chain_) {
      return false;
    }
  }
  return originals_ == nullptr && (!is_lower() || (tiers_->can_enter(key) && !tiers_->is_foreign(*this, owner, key)));
}

bool Directory::restore(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                        const ChunkKey& key, PageIndex page, uint64_t generation, Retention request, uint64_t now_ns) {
  const RecordId above = parent ? find_record(*parent) : RecordId();
  if (parent.has_value() != above.valid()) {
    return false;
  }
  const RecordId id = begin_restore(owner, size_class, above, key, generation);
  if (!id.valid()) {
    return false;
  }
  if (!arena_.claim(size_class, page, id)) {
    records_.release(id);
    return false;
  }
  records_[id].page = page;
  latest_ns_ = std::max(latest_ns_, now_ns);
  enter_restored(id, above);
  if (request != Retention{}) {
    retention_.ledger().begin_request();
    static_cast<void>(retention_.set_retention(id, request));
  }
  list_restored(id);
  return true;
}

// A record of a chunk of an earlier life, without a slot; unset where there can be none.
RecordId Directory::begin_restore(NamespaceId owner, ClassId size_class, RecordId above, const ChunkKey& key, uint64_t generation) {
  const bool is_possible = is_restorable(owner, size_class, above, key) && generation != 0 && generation < GENERATION_END;
  if (!is_possible || records_.is_full() || !table_.may_insert(key)) {
    return RecordId();
  }
  const RecordId id = records_.allocate();
  ChunkRecord& record = records_[id];
  record.key = key;
  record.is_sampled = is_in_sample(key);
  record.owner = owner;
  record.size_class = size_class;
  record.generation = generation;
  return id;
}

// The record has its slot, and becomes READY.
void Directory::enter_restored(RecordId id, RecordId above) noexcept {
  ChunkRecord& record = records_[id];
  last_generation_ = std::max(last_generation_, record.generation);
  enter(record.key, id);
  table_.set_generation(record.page, record.generation);
  if (above.valid()) {
    records_.attach_child(above, id);
  }
  stats_.used_bytes += chunk_bytes(record);
  ++stats_.promoted_chunks;
  become_ready(record);
}

// Chunks come from the newest to the oldest: each goes to the older side of the one restored before it, children behind parents.
void Directory::list_restored(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  record.standing = standings_.of(record);
  queues_.add_oldest(id);
  arena_.set_idle(record.page, record.last_access_ns);
  stats_.idle_bytes += chunk_bytes(record);
}

void Directory::finish_restore(uint64_t generation) noexcept {
  last_generation_ = std::max(last_generation_, std::min(generation, GENERATION_END));
  if (stats_.chunks > 0) {
    reports_.report_gap();
  }
}

std::vector<ChunkKey> Directory::take_departed() noexcept { return std::exchange(departed_, {}); }

}  // namespace kvpool
