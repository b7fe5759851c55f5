// The token ids of chunks, beside their records: routers hash them themselves, so events of a chunk need them.
//
// What it is: a column of arrays by record, or of cells in the region of records that are kept. What it is not: part of a chunk; one
// whose ids nobody gave has none.
// Bounded: one array for each record at most, none longer than TOKEN_IDS_MAX, all together within `limit`; what is beyond that
// is left out and counted. Some arrays that are free again wait for the next chunks, mostly of the save that has evicted theirs: less
// than SPARE_BYTES_MAX beyond the limit.
// Threads: the control thread only. O(ids) for `store`, else O(1).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"
#include "records/chunk_records.h"
#include "records/kept_tokens.h"

namespace kvpool {

// Of one chunk; longer ones are not stored.
inline constexpr size_t TOKEN_IDS_MAX = 4096;

// Behind the token ids of a chunk may stand its scope: a tag of four words, and up to sixty words of a name.
inline constexpr size_t SCOPE_WORDS_MIN = 4, SCOPE_WORDS_MAX = 64;

struct ScopedIds {
  std::span<const int32_t> tokens;
  std::span<const int32_t> scope;
};

// The same as bytes at any address, as they stand in a request.
struct PackedIds {
  std::span<const uint8_t> tokens;
  std::span<const uint8_t> scope;
};

[[nodiscard]] inline std::span<const uint8_t> packed_words(std::span<const int32_t> words) noexcept {
  return {reinterpret_cast<const uint8_t*>(words.data()), words.size_bytes()};
}

// What is stored of a chunk of so many tokens, separated. Both empty where that is neither its token ids nor these and a scope.
[[nodiscard]] inline ScopedIds split_scope(std::span<const int32_t> words, size_t chunk_tokens) noexcept {
  if (words.size() == chunk_tokens) {
    return {words, {}};
  }
  const bool is_whole =
      words.size() >= chunk_tokens + SCOPE_WORDS_MIN && words.size() <= chunk_tokens + SCOPE_WORDS_MAX;
  return is_whole ? ScopedIds{words.first(chunk_tokens), words.subspan(chunk_tokens)} : ScopedIds{};
}

class TokenIds {
 public:
  static constexpr uint64_t SPARE_BYTES_MAX = uint64_t{4} << 20;
  static constexpr size_t SPARES_MAX = 4096;

  // Where these are kept, their token ids are kept with them. REQUIRES: they live as long; nullptr: there are none.
  explicit TokenIds(ChunkRecords* records = nullptr) {
    spare_.reserve(SPARES_MAX);  // `forget` allocates nothing
    if (records != nullptr && records->are_kept()) {
      records_ = records;
      cells_.emplace(records->region().tokens(), records->region().shape().token_bytes);
    }
  }

  // At most so many bytes from now on; what is stored stays.
  void limit(uint64_t bytes) noexcept { bytes_max_ = bytes; }
  // Replaces what was stored before; nothing is stored where there are no tokens, or no room. REQUIRES: whole words, at most
  // TOKEN_IDS_MAX in all.
  void store(RecordId id, PackedIds ids);
  void forget(RecordId id) noexcept;
  // Asks the cache for where `store` and `forget` begin.
  void prefetch(RecordId id) const noexcept {
    if (cells_) {
      __builtin_prefetch(&records_->seal_at(id), 1);
    } else if (id.value() < by_record_.size()) {
      __builtin_prefetch(&by_record_[id.value()], 1);
    }
  }
  // Empty where none were given. Good until the next change.
  [[nodiscard]] std::span<const int32_t> of(RecordId id) const noexcept;
  [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] uint64_t spare_bytes() const noexcept { return spare_bytes_; }  // of arrays that wait for the next chunks
  // Chunks that were stored without their ids.
  [[nodiscard]] uint64_t left_out() const noexcept { return left_out_; }

 private:
  struct Stored {
    std::unique_ptr<int32_t[]> tokens;
    uint32_t count = 0;
  };

  [[nodiscard]] Stored take_array(uint32_t words);
  void store_cell(RecordId id, PackedIds ids, uint32_t words);
  void forget_cell(RecordId id) noexcept;

  ChunkRecords* records_ = nullptr;
  std::optional<KeptTokens> cells_;
  std::vector<Stored> by_record_;  // grown on demand
  std::vector<Stored> spare_;      // the one that was freed last at the end
  uint64_t spare_bytes_ = 0;
  uint64_t bytes_ = 0;
  uint64_t bytes_max_ = UINT64_MAX;
  uint64_t left_out_ = 0;
};

}  // namespace kvpool
