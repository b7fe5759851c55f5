// Promotions: chunks that are read from a lower tier, and what happens when one does not land. See directory.h.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

// The chunk in the tier that it is promoted from, with the generation that was named; nullptr where it is not there.
const ChunkRecord* Directory::find_source(const ChunkKey& key, const PromotionSource& source) const noexcept {
  const Directory* lower = tiers_ == nullptr || source.is_external ? nullptr : tiers_->tier_at(source.tier);
  if (lower == nullptr || (tier_bit(source.tier) & lower_bits_) == 0) {
    return nullptr;
  }
  const ChunkRecord* ready = lower->find_ready(key);
  return ready != nullptr && (source.generation == 0 || source.generation == ready->generation) ? ready : nullptr;
}

// Whether a source names a tier outside, and no directory here has that tier.
bool Directory::is_outside(const PromotionSource& source) const noexcept {
  const auto known = lower_bits_ | upper_bits_ | tier_bit(tier_) | copies_bit();
  return source.is_external && originals_ == nullptr && (tier_bit(source.tier) & known) == 0;
}

// The bit of the tier outside that a chunk is being promoted from; 0 for any other chunk.
uint8_t Directory::outside_bit(const ChunkRecord& record) const noexcept {
  const uint8_t bit = record.state == ChunkState::PROMOTING ? tier_bit(static_cast<Tier>(record.source)) : uint8_t{0};
  return (bit & lower_bits_) == 0 ? bit : uint8_t{0};
}

// A chunk on its way from outside is found by the bit of that tier, which no directory sets: until it has landed or gone.
void Directory::mark_outside(const ChunkRecord& record, bool is_coming) noexcept {
  const uint8_t bit = outside_bit(record);
  const auto entry = bit == 0 ? std::nullopt : table_.find(record.key);
  if (entry) {
    table_.set_tiers(record.key, static_cast<uint8_t>(is_coming ? entry->tiers | bit : entry->tiers & ~bit));
  }
}

Reservation Directory::promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent,
                               const uint8_t* keys, size_t n, uint64_t now_ns, std::span<const PromotionSource> sources) {
  KVPOOL_CHECK(sources.empty() || sources.size() == n);
  Reservation answer;
  expire_retention(now_ns);
  std::vector<PromotionSource> uppermost;
  for (size_t index = 0; sources.empty() && index < n; ++index) {
    uppermost.push_back({uppermost_below(ChunkKey::from_bytes(keys + index * KEY_BYTES)).value_or(tier_)});
  }
  ShareClaim claim;
  ReservationState state;
  if (begin_chain(owner, size_class, parent, state, true)) {
    place_chain(state, keys, n, sources.empty() ? uppermost : sources, {}, claim, answer);
  } else {
    answer.states.assign(n, static_cast<uint8_t>(SaveState::NO_PARENT));
  }
  answer.offsets.resize(n);
  answer.generations.resize(n);
  answer.slots.resize(n);
  if (!state.records.empty()) {
    answer.id = holds_.open_hold(std::move(state.records)).id;
  }
  return answer;
}

// A chunk that has got its slot is retained as it is in the tier that it comes from; one from outside as any new chunk.
void Directory::begin_promotion(RecordId id, const PromotionSource& source, const ChunkRecord* lower) {
  ChunkRecord& record = records_[id];
  record.source = static_cast<uint8_t>(source.tier) & 7U;
  const uint64_t generation = lower == nullptr ? 0 : lower->generation;
  promotions_.emplace(record.generation,
                      Promotion{id, source.tier, generation, {source.checksums.begin(), source.checksums.end()}});
  mark_outside(record, true);
  if (lower != nullptr) {
    static_cast<void>(set_retention(id, {lower->priority, lower->duration_ms}));
  }
}

// Whether the extents that were announced for a slot are those that were expected, as far as that is known.
bool Directory::has_expected_extents(const ChunkRecord& record, const Promotion& promotion) const noexcept {
  for (size_t extent = 0; table_.has_words() && extent < promotion.checksums.size(); ++extent) {
    if (table_.words().checksum(table_.slot_of(record.page), static_cast<uint32_t>(extent)) != promotion.checksums[extent]) {
      return false;
    }
  }
  return true;
}

bool Directory::has_landed(const ChunkKey& key, uint64_t generation) const noexcept {
  const RecordId id = find_record(key);
  if (arena_mapping_ == nullptr || !table_.has_words() || !id.valid() || records_[id].generation != generation ||
      records_[id].state != ChunkState::PROMOTING) {
    return true;
  }
  const ChunkRecord& record = records_[id];
  return table_.words().landed(table_.slot_of(record.page)) == arena_.size_class(record.size_class).extents;
}

bool Directory::landed(const ChunkKey& key, uint64_t generation, std::span<const int32_t> tokens) {
  const auto promotion = promotions_.find(generation);
  const RecordId id = find_record(key);
  const bool is_this = id.valid() && records_[id].generation == generation && records_[id].state == ChunkState::PROMOTING;
  if (promotion == promotions_.end()) {
    return false;
  }
  if (!is_this) {  // it was dropped on its way
    const RecordId gone = promotion->second.record;
    promotions_.erase(promotion);
    end_writer(gone);
    return false;
  }
  ChunkRecord& record = records_[id];
  if (!has_expected_extents(record, promotion->second)) {
    static_cast<void>(fail_landing(key, generation, LoadFault::SOURCE));
    return false;
  }
  promotions_.erase(promotion);
  mark_outside(record, false);
  record.has_writer = false;
  --stats_.promoting;
  ++stats_.promoted_chunks;
  tokens_.store(id, tokens);
  become_ready(record);
  reports_.report(record, ChangeKind::ARRIVED, Cause::PROMOTED);
  return true;
}

NamedTokens Directory::name_tokens(NamespaceId owner, const uint8_t* keys, size_t n, std::span<const int32_t> tokens) {
  const size_t count = n == 0 ? 0 : tokens.size() / n;
  for (size_t index = 0; index < n; ++index) {
    const RecordId id = find_record(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!id.valid() || records_[id].owner != owner) {
      return {index, false};
    }
    const ChunkRecord& record = records_[id];
    if (record.state != ChunkState::READY) {
      return {index, record.state == ChunkState::PROMOTING};
    }
    if (record.parent.valid() && tokens_.of(record.parent).empty()) {
      return {index, true};  // readers would not know what it follows
    }
    if (tokens_.of(id).empty()) {
      tokens_.store(id, tokens.subspan(index * count, count));
      if (tokens_.of(id).empty()) {
        return {index, false};  // there is no room
      }
      reports_.report(record, ChangeKind::ARRIVED, Cause::PROMOTED);
    }
  }
  return {n, false};
}

FailedLanding Directory::fail_landing(const ChunkKey& key, uint64_t generation, LoadFault fault) {
  FailedLanding answer;
  const auto found = promotions_.find(generation);
  if (found == promotions_.end()) {
    return answer;
  }
  const Promotion promotion = std::move(found->second);
  promotions_.erase(found);
  ++stats_.failed_landings[static_cast<size_t>(fault)];
  end_writer(promotion.record);
  const RecordId id = find_record(key);
  if (id.valid() && records_[id].generation == generation && records_[id].state == ChunkState::PROMOTING) {
    departure_ = Cause::FAILED_LANDING;
    answer.removed = remove_subtree(id);
    stats_.dropped_chunks += answer.removed;
  }
  if (fault == LoadFault::SOURCE && promotion.generation != 0) {
    answer.dropped_in_source = tiers_->tier_at(promotion.tier)->drop(key, promotion.generation);
  }
  answer.next = uppermost_below(key);
  return answer;
}

}  // namespace kvpool
