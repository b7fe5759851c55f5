#include "directory/promotions.h"

#include <utility>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

const ChunkRecord* Promotions::find_source(const ChunkKey& key, const PromotionSource& source) const noexcept {
  const Directory* lower = of_.tiers_ == nullptr || source.is_external ? nullptr : of_.tiers_->tier_at(source.tier);
  if (lower == nullptr || (tier_bit(source.tier) & of_.lower_bits_) == 0) {
    return nullptr;
  }
  const ChunkRecord* ready = lower->find_ready(key);
  return ready != nullptr && (source.generation == 0 || source.generation == ready->generation) ? ready : nullptr;
}

bool Promotions::is_outside(const PromotionSource& source) const noexcept {
  const auto known = of_.lower_bits_ | of_.upper_bits_ | tier_bit(of_.tier_) | of_.copies_bit();
  return source.is_external && of_.originals_ == nullptr && (tier_bit(source.tier) & known) == 0;
}

uint8_t Promotions::outside_bit(const ChunkRecord& record) const noexcept {
  const uint8_t bit = record.state == ChunkState::PROMOTING ? tier_bit(static_cast<Tier>(record.source)) : uint8_t{0};
  return (bit & of_.lower_bits_) == 0 ? bit : uint8_t{0};
}

void Promotions::mark_outside(const ChunkRecord& record, bool is_coming) noexcept {
  const uint8_t bit = outside_bit(record);
  const auto entry = bit == 0 ? std::nullopt : of_.table_.find(record.key);
  if (entry) {
    of_.table_.set_tiers(record.key, static_cast<uint8_t>(is_coming ? entry->tiers | bit : entry->tiers & ~bit));
  }
}

Reservation Promotions::promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent, const uint8_t* keys,
                                size_t n, uint64_t now_ns, std::span<const PromotionSource> sources, bool are_alone) {
  KVPOOL_CHECK(sources.empty() || sources.size() == n);
  KVPOOL_CHECK(!are_alone || !parent);
  of_.retention_.expire_due(now_ns);
  std::vector<PromotionSource> uppermost;
  for (size_t index = 0; sources.empty() && index < n; ++index) {
    uppermost.push_back({of_.uppermost_below(ChunkKey::from_bytes(keys + index * KEY_BYTES)).value_or(of_.tier_)});
  }
  const std::span<const PromotionSource> from = sources.empty() ? uppermost : sources;
  ShareClaim claim;
  Reservation answer;
  HoldTable::Records placed;
  const size_t together = are_alone ? 1 : n;
  for (size_t first = 0; first < n; first += together) {
    ReservationState state;
    Reservation some;
    if (of_.begin_chain(owner, size_class, parent, state, true)) {
      of_.place_chain(state, keys + first * KEY_BYTES, together, from.subspan(first, together), {}, claim, some);
    } else {
      some.states.assign(together, static_cast<uint8_t>(SaveState::NO_PARENT));
    }
    some.offsets.resize(together);
    some.generations.resize(together);
    some.slots.resize(together);
    answer.append(some);
    placed.insert(placed.end(), state.records.begin(), state.records.end());
  }
  if (!placed.empty()) {
    answer.id = of_.holds_.open_hold(std::move(placed)).id;
  }
  return answer;
}

void Promotions::begin_promotion(RecordId id, const PromotionSource& source, const ChunkRecord* lower) {
  ChunkRecord& record = of_.records_[id];
  record.source = static_cast<uint8_t>(source.tier) & 7U;
  const uint64_t generation = lower == nullptr ? 0 : lower->generation;
  under_way_.emplace(record.generation,
                     Promotion{id, source.tier, generation, {source.checksums.begin(), source.checksums.end()}});
  mark_outside(record, true);
  if (lower != nullptr) {
    static_cast<void>(of_.retention_.set_retention(id, {lower->priority, lower->duration_ms}));
  }
}

// Whether the extents that were announced for a slot are those that were expected, as far as that is known.
bool Promotions::has_expected_extents(const ChunkRecord& record, const Promotion& promotion) const noexcept {
  for (size_t extent = 0; of_.table_.has_words() && extent < promotion.checksums.size(); ++extent) {
    if (of_.table_.words().checksum(of_.table_.slot_of(record.page), static_cast<uint32_t>(extent)) != promotion.checksums[extent]) {
      return false;
    }
  }
  return true;
}

bool Promotions::has_landed(const ChunkKey& key, uint64_t generation) const noexcept {
  const RecordId id = of_.find_record(key);
  if (of_.arena_mapping_ == nullptr || !of_.table_.has_words() || !id.valid() || of_.records_[id].generation != generation ||
      of_.records_[id].state != ChunkState::PROMOTING) {
    return true;
  }
  const ChunkRecord& record = of_.records_[id];
  return of_.table_.words().landed(of_.table_.slot_of(record.page)) == of_.arena_.size_class(record.size_class).extents;
}

bool Promotions::landed(const ChunkKey& key, uint64_t generation, std::span<const int32_t> tokens) {
  const auto promotion = under_way_.find(generation);
  const RecordId id = of_.find_record(key);
  const bool is_this = id.valid() && of_.records_[id].generation == generation && of_.records_[id].state == ChunkState::PROMOTING;
  if (promotion == under_way_.end()) {
    return false;
  }
  if (!is_this) {  // it was dropped on its way
    const RecordId gone = promotion->second.record;
    under_way_.erase(promotion);
    of_.end_writer(gone);
    return false;
  }
  ChunkRecord& record = of_.records_[id];
  if (!has_expected_extents(record, promotion->second)) {
    static_cast<void>(fail_landing(key, generation, LoadFault::SOURCE));
    return false;
  }
  under_way_.erase(promotion);
  mark_outside(record, false);
  record.has_writer = false;
  --of_.stats_.promoting;
  ++of_.stats_.promoted_chunks;
  of_.tokens_.store(id, {packed_words(tokens), {}});
  of_.become_ready(record);
  of_.reports_.report(record, ChangeKind::ARRIVED, Cause::PROMOTED);
  return true;
}

NamedTokens Promotions::name_tokens(NamespaceId owner, const uint8_t* keys, size_t n, std::span<const int32_t> tokens) {
  const size_t count = n == 0 ? 0 : tokens.size() / n;
  for (size_t index = 0; index < n; ++index) {
    const RecordId id = of_.find_record(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!id.valid() || of_.records_[id].owner != owner) {
      return {index, false};
    }
    const ChunkRecord& record = of_.records_[id];
    if (record.state != ChunkState::READY) {
      return {index, record.state == ChunkState::PROMOTING};
    }
    if (record.parent.valid() && of_.tokens_.of(record.parent).empty()) {
      return {index, true};  // readers would not know what it follows
    }
    if (of_.tokens_.of(id).empty()) {
      of_.tokens_.store(id, {packed_words(tokens.subspan(index * count, count)), {}});
      if (of_.tokens_.of(id).empty()) {
        return {index, false};  // there is no room
      }
      of_.reports_.report(record, ChangeKind::ARRIVED, Cause::PROMOTED);
    }
  }
  return {n, false};
}

FailedLanding Promotions::fail_landing(const ChunkKey& key, uint64_t generation, LoadFault fault) {
  FailedLanding answer;
  const auto found = under_way_.find(generation);
  if (found == under_way_.end()) {
    return answer;
  }
  const Promotion promotion = std::move(found->second);
  under_way_.erase(found);
  ++of_.stats_.failed_landings[static_cast<size_t>(fault)];
  of_.end_writer(promotion.record);
  const RecordId id = of_.find_record(key);
  if (id.valid() && of_.records_[id].generation == generation && of_.records_[id].state == ChunkState::PROMOTING) {
    of_.departure_ = Cause::FAILED_LANDING;
    answer.removed = of_.remove_subtree(id);
    of_.stats_.dropped_chunks += answer.removed;
  }
  if (fault == LoadFault::SOURCE && promotion.generation != 0) {
    answer.dropped_in_source = of_.tiers_->tier_at(promotion.tier)->drop(key, promotion.generation);
  }
  answer.next = of_.uppermost_below(key);
  return answer;
}

}  // namespace kvpool
