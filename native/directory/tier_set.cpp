// The shared entry of a key, and what the tiers report to one another. See tier_set.h.
#include "directory/tier_set.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

TierSet::TierSet(std::vector<Directory*> tiers) noexcept : tiers_(std::move(tiers)) {
  KVPOOL_CHECK(why_refused(tiers_) == nullptr);
  uint8_t all = 0;
  for (const Directory* tier : tiers_) {
    all |= tier_bit(tier->tier_);
  }
  for (Directory* tier : tiers_) {
    tier->tiers_ = this;
    tier->upper_bits_ = static_cast<uint8_t>(all & (tier_bit(tier->tier_) - 1));
    tier->lower_bits_ = static_cast<uint8_t>(all & ~(tier->upper_bits_ | tier_bit(tier->tier_)));
    tier->standings_.set_has_lower(tier->lower_bits_ != 0);
  }
}

const char* TierSet::why_refused(const std::vector<Directory*>& tiers) noexcept {
  uint8_t all = 0;
  for (const Directory* tier : tiers) {
    if (tier == nullptr || tier->tiers_ != nullptr) {
      return "a tier is in another set already, or none";
    }
    if (tier->originals_ != nullptr) {
      return "a directory of copies is in no set; it belongs to the one that has what they are copied from";
    }
    if (tier->records_.alive() != 0) {
      return "a tier has chunks already; join tiers before anything is stored";
    }
    if (tier_bit(tier->tier_) <= all) {
      return "the levels do not rise; name the fastest tier first and each level once";
    }
    all |= tier_bit(tier->tier_);
  }
  return tiers.empty() ? "a set needs one tier at least" : nullptr;
}

TierSet::~TierSet() {
  for (Directory* tier : tiers_) {
    tier->tiers_ = nullptr;
    tier->upper_bits_ = tier->lower_bits_ = 0;
    tier->standings_.set_has_lower(false);
  }
}

std::span<Directory* const> TierSet::above(const Directory& tier) const noexcept {
  return std::span(tiers_).first(static_cast<size_t>(std::popcount(tier.upper_bits_)));
}

std::span<Directory* const> TierSet::below(const Directory& tier) const noexcept {
  return std::span(tiers_).last(static_cast<size_t>(std::popcount(tier.lower_bits_)));
}

Directory* TierSet::tier_at(Tier level) const noexcept {
  const auto found = std::find_if(tiers_.begin(), tiers_.end(), [level](const Directory* tier) { return tier->tier_ == level; });
  return found == tiers_.end() ? nullptr : *found;
}

uint8_t TierSet::tiers_of(const ChunkKey& key) const noexcept {
  const auto entry = owner().table_.find(key);
  return entry ? entry->tiers : uint8_t{0};
}

void TierSet::note(const Directory& tier, const ChunkKey& key, bool is_held) noexcept {
  ChunkIndex& table = owner().table_;
  const uint8_t bit = tier_bit(tier.tier_);
  const auto entry = table.find(key);
  KVPOOL_CHECK(entry ? ((entry->tiers & bit) != 0) != is_held : is_held);
  if (!entry) {
    KVPOOL_CHECK(table.enter(key, RecordId(), 1, PageIndex()).has_value());
  }
  const auto others = static_cast<uint8_t>((entry ? entry->tiers : 0) & ~bit);
  const auto after = static_cast<uint8_t>(is_held ? others | bit : others);
  table.set_tiers(key, after);
  for (Directory* upper : above(tier)) {
    const RecordId of_entry = entry ? entry->record : RecordId();
    const RecordId id = upper == tiers_.front() ? of_entry : upper->find_record(key);
    if (id.valid()) {
      upper->mark_below(id, (after & upper->lower_bits_) != 0);
    }
  }
  if (after == 0 && !entry->record.valid()) {
    table.erase(key);
  }
}

bool TierSet::can_enter(const ChunkKey& key) const noexcept {
  return owner().table_.find(key) || owner().table_.has_room(key);
}

bool TierSet::is_foreign(const Directory& tier, NamespaceId owner, const ChunkKey& key) const noexcept {
  return std::any_of(tiers_.begin(), tiers_.end(), [&](const Directory* other) {
    const RecordId id = other == &tier ? RecordId() : other->find_record(key);
    return id.valid() && other->records_[id].owner != owner;
  });
}

const ChunkRecord* TierSet::uppermost(std::span<Directory* const> tiers, const ChunkKey& key) noexcept {
  for (const Directory* tier : tiers) {
    if (const ChunkRecord* ready = tier->find_ready(key)) {
      return ready;
    }
  }
  return nullptr;
}

std::optional<uint64_t> TierSet::upper_expiry(const Directory& tier, const ChunkKey& key, Retention retention) const noexcept {
  for (const Directory* upper : above(tier)) {
    const RecordId id = upper->retention_.find_alike(key, retention);
    if (id.valid()) {
      return upper->retention_.own_expiry(upper->records_[id]);
    }
  }
  return std::nullopt;
}

}  // namespace kvpool
