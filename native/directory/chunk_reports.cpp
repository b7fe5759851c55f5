#include "directory/chunk_reports.h"

#include <algorithm>

#include "directory/directory.h"

namespace kvpool {
namespace {

// Records without a chunk that one listing may pass for each row that it may return.
constexpr uint64_t PLACES_PER_ROW = 64;

}  // namespace

Change ChunkReports::describe(const ChunkRecord& record) const noexcept {
  const Directory* const originals = directory_.originals_ != nullptr ? &directory_.originals_->originals() : nullptr;
  const bool is_lower = directory_.is_lower();
  const Directory& shared = originals != nullptr ? *originals : is_lower ? directory_.tiers_->owner() : directory_;
  const auto entry = shared.table_.find(record.key);
  Change change{};
  change.key = record.key;
  if (record.parent.valid()) {
    change.parent = directory_.records_[record.parent].key;
  }
  change.owner = record.owner.value();
  change.record = (entry ? entry->record : RecordId()).value();
  change.level = static_cast<uint8_t>(directory_.tier_);
  change.tiers = entry ? entry->tiers : uint8_t{0};
  const ChunkRecord* above = is_lower ? TierSet::uppermost(directory_.tiers_->above(directory_), record.key) : nullptr;
  const ChunkRecord* deciding = originals != nullptr ? originals->find_ready(record.key) : above;
  change.priority = change.priority_before = deciding != nullptr ? deciding->priority : record.priority;
  return change;
}

void ChunkReports::report(const ChunkRecord& record, ChangeKind kind, Cause cause) noexcept {
  if (feed_ == nullptr) {
    return;
  }
  Change change = describe(record);
  change.kind = kind;
  change.cause = cause;
  if (kind == ChangeKind::LEFT) {
    change.tiers = static_cast<uint8_t>(change.tiers & ~tier_bit(directory_.tier_));
    if ((change.tiers & directory_.lower_bits_) != 0 && (change.tiers & directory_.upper_bits_) == 0) {
      const ChunkRecord* below = TierSet::uppermost(directory_.tiers_->below(directory_), record.key);
      change.priority = below != nullptr ? below->priority : change.priority;
    }
  }
  feed_->add(change);
}

void ChunkReports::report_priority(const ChunkRecord& record, uint8_t before) noexcept {
  if (feed_ == nullptr || record.state != ChunkState::READY || record.priority == before || directory_.originals_ != nullptr ||
      (directory_.is_lower() && TierSet::uppermost(directory_.tiers_->above(directory_), record.key) != nullptr)) {
    return;
  }
  Change change = describe(record);
  change.kind = ChangeKind::PRIORITY;
  change.priority_before = before;
  feed_->add(change);
}

void ChunkReports::report_gap() noexcept {
  if (feed_ != nullptr) {
    feed_->mark_gap();
  }
}

uint32_t ChunkReports::list(uint32_t cursor, size_t limit, std::vector<Change>& rows) const {
  const ChunkRecords& records = directory_.records_;
  const uint64_t stop = std::min<uint64_t>(records.end(), cursor + PLACES_PER_ROW * limit);
  uint32_t index = cursor;
  for (; index < stop && rows.size() < limit; ++index) {
    const ChunkRecord& record = records[RecordId(index)];
    if (record.state == ChunkState::READY) {
      rows.push_back(describe(record));
    }
  }
  return index < records.end() ? index : 0;
}

std::optional<Change> ChunkReports::find(const ChunkKey& key) const noexcept {
  const ChunkRecord* ready = directory_.find_ready(key);
  return ready != nullptr ? std::optional(describe(*ready)) : std::nullopt;
}

}  // namespace kvpool
