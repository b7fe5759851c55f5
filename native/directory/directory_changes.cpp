// Reports of a directory about its chunks: to the change feed as they come and go, and to a caller who lists them. See directory.h.
#include <algorithm>

#include "directory/directory.h"

namespace kvpool {
namespace {

// Records without a chunk that one listing may pass for each row that it may return.
constexpr uint64_t PLACES_PER_ROW = 64;

}  // namespace

const ChunkRecord* Directory::find_ready(const ChunkKey& key) const noexcept {
  const auto entry = table_.find(key);
  const bool is_ready = entry && entry->record.valid() && records_[entry->record].state == ChunkState::READY;
  return is_ready ? &records_[entry->record] : nullptr;
}

// A chunk's priority is that of the uppermost tier that has it, but for copies.
Change Directory::describe(const ChunkRecord& record) const noexcept {
  const Directory& shared = originals_ != nullptr ? *originals_ : is_lower() ? tiers_->owner() : *this;
  const auto entry = shared.table_.find(record.key);
  Change change{};
  change.key = record.key;
  if (record.parent.valid()) {
    change.parent = records_[record.parent].key;
  }
  change.owner = record.owner.value();
  change.level = static_cast<uint8_t>(tier_);
  change.tiers = entry ? entry->tiers : uint8_t{0};
  const ChunkRecord* above = is_lower() ? TierSet::uppermost(tiers_->above(*this), record.key) : nullptr;
  const ChunkRecord* deciding = originals_ != nullptr ? originals_->find_ready(record.key) : above;
  change.priority = change.priority_before = deciding != nullptr ? deciding->priority : record.priority;
  return change;
}

// REQUIRES: an arrival has been entered in the table, and a departure has not yet been taken out of it.
void Directory::report(const ChunkRecord& record, ChangeKind kind, Cause cause) noexcept {
  if (feed_ == nullptr) {
    return;
  }
  Change change = describe(record);
  change.kind = kind;
  change.cause = cause;
  if (kind == ChangeKind::LEFT) {
    change.tiers = static_cast<uint8_t>(change.tiers & ~tier_bit(tier_));
    if ((change.tiers & lower_bits_) != 0 && (change.tiers & upper_bits_) == 0) {
      const ChunkRecord* below = TierSet::uppermost(tiers_->below(*this), record.key);
      change.priority = below != nullptr ? below->priority : change.priority;
    }
  }
  feed_->add(change);
}

void Directory::report_priority(const ChunkRecord& record, uint8_t before) noexcept {
  const bool counts = record.state == ChunkState::READY && record.priority != before;
  const bool has_above = feed_ != nullptr && counts && is_lower() && TierSet::uppermost(tiers_->above(*this), record.key) != nullptr;
  if (feed_ == nullptr || !counts || has_above || originals_ != nullptr) {
    return;
  }
  Change change = describe(record);
  change.kind = ChangeKind::PRIORITY;
  change.priority_before = before;
  feed_->add(change);
}

uint32_t Directory::list(uint32_t cursor, size_t limit, std::vector<Change>& rows) const {
  const uint64_t stop = std::min<uint64_t>(records_.end(), cursor + PLACES_PER_ROW * limit);
  uint32_t index = cursor;
  for (; index < stop && rows.size() < limit; ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (record.state == ChunkState::READY) {
      rows.push_back(describe(record));
    }
  }
  return index < records_.end() ? index : 0;
}

std::optional<Change> Directory::find(const ChunkKey& key) const noexcept {
  const ChunkRecord* ready = find_ready(key);
  return ready != nullptr ? std::optional(describe(*ready)) : std::nullopt;
}

std::optional<ChunkPlace> Directory::place_of(const ChunkKey& key) const noexcept {
  const ChunkRecord* ready = find_ready(key);
  return ready != nullptr ? std::optional(ChunkPlace{uint64_t{ready->page.value()} * PAGE_BYTES, ready->generation})
                          : std::nullopt;
}

}  // namespace kvpool
