#include "records/token_ids.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {

void TokenIds::store(RecordId id, PackedIds ids) {
  const size_t bytes = ids.tokens.empty() ? 0 : ids.tokens.size() + ids.scope.size();
  const size_t words = bytes / sizeof(int32_t);
  KVPOOL_CHECK(bytes % sizeof(int32_t) == 0 && words <= TOKEN_IDS_MAX);
  forget(id);
  if (words == 0) {
    return;
  }
  if (bytes_ + bytes > bytes_max_) {
    ++left_out_;
    return;
  }
  if (cells_) {
    store_cell(id, ids, static_cast<uint32_t>(words));
    return;
  }
  if (id.value() >= by_record_.size()) {
    by_record_.resize(std::max<size_t>(id.value() + size_t{1}, by_record_.size() * 2));
  }
  Stored& stored = by_record_[id.value()];
  stored = take_array(static_cast<uint32_t>(words));
  auto* const out = reinterpret_cast<uint8_t*>(stored.tokens.get());
  std::ranges::copy(ids.scope, std::ranges::copy(ids.tokens, out).out);
  bytes_ += bytes;
}

void TokenIds::store_cell(RecordId id, PackedIds ids, uint32_t words) {
  const uint32_t number = cells_->take(words);
  if (number == 0) {
    ++left_out_;
    return;
  }
  TokenCell& cell = cells_->at(number);
  cell.words = words;
  cell.generation = (*records_)[id].generation;
  std::ranges::copy(ids.scope, std::ranges::copy(ids.tokens, reinterpret_cast<uint8_t*>(cell.ids())).out);
  cell.crc = crc_of(cell);
  keep_order();
  records_->seal_at(id).tokens = number;
  bytes_ += words * sizeof(int32_t);
}

void TokenIds::forget_cell(RecordId id) noexcept {
  uint32_t& number = records_->seal_at(id).tokens;
  if (number != 0) {
    bytes_ -= cells_->at(number).words * sizeof(int32_t);
    cells_->give_back(std::exchange(number, 0));
  }
}

void TokenIds::forget(RecordId id) noexcept {
  if (cells_) {
    forget_cell(id);
    return;
  }
  if (id.value() >= by_record_.size() || by_record_[id.value()].count == 0) {
    return;
  }
  Stored freed = std::exchange(by_record_[id.value()], {});
  const uint64_t bytes = freed.count * sizeof(int32_t);
  bytes_ -= bytes;
  if (spare_bytes_ + bytes < SPARE_BYTES_MAX && spare_.size() < SPARES_MAX) {
    spare_bytes_ += bytes;
    spare_.push_back(std::move(freed));
  }
}

// A spare one, if the last one that was freed has this size: those of other sizes go one by one.
TokenIds::Stored TokenIds::take_array(uint32_t words) {
  if (!spare_.empty()) {
    Stored spare = std::move(spare_.back());
    spare_.pop_back();
    spare_bytes_ -= spare.count * sizeof(int32_t);
    if (spare.count == words) {
      return spare;
    }
  }
  return {std::make_unique_for_overwrite<int32_t[]>(words), words};
}

std::span<const int32_t> TokenIds::of(RecordId id) const noexcept {
  if (cells_) {
    const uint32_t number = records_->seal_at(id).tokens;
    return number == 0 ? std::span<const int32_t>{} : std::span<const int32_t>(cells_->at(number).ids(), cells_->at(number).words);
  }
  if (id.value() >= by_record_.size()) {
    return {};
  }
  const Stored& stored = by_record_[id.value()];
  return {stored.tokens.get(), stored.count};
}

}  // namespace kvpool
