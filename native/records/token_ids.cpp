#include "records/token_ids.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {

void TokenIds::store(RecordId id, std::span<const int32_t> tokens) {
  KVPOOL_CHECK(tokens.size() <= TOKEN_IDS_MAX);
  forget(id);
  if (tokens.empty()) {
    return;
  }
  if (bytes_ + tokens.size_bytes() > bytes_max_) {
    ++left_out_;
    return;
  }
  if (id.value() >= by_record_.size()) {
    by_record_.resize(std::max<size_t>(id.value() + size_t{1}, by_record_.size() * 2));
  }
  Stored& stored = by_record_[id.value()];
  stored.tokens = std::make_unique_for_overwrite<int32_t[]>(tokens.size());
  stored.count = static_cast<uint32_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), stored.tokens.get());
  bytes_ += tokens.size_bytes();
}

void TokenIds::forget(RecordId id) noexcept {
  if (id.value() >= by_record_.size() || by_record_[id.value()].count == 0) {
    return;
  }
  bytes_ -= by_record_[id.value()].count * sizeof(int32_t);
  by_record_[id.value()] = Stored{};
}

std::span<const int32_t> TokenIds::of(RecordId id) const noexcept {
  if (id.value() >= by_record_.size()) {
    return {};
  }
  const Stored& stored = by_record_[id.value()];
  return {stored.tokens.get(), stored.count};
}

}  // namespace kvpool
