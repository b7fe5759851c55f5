// The token ids of chunks, beside their records: routers hash them themselves, so events of a chunk need them.
//
// What it is: a column of arrays by record. What it is not: part of a chunk; one whose ids nobody gave has none.
// Bounded: one array for each record at most, none longer than TOKEN_IDS_MAX, all together within `limit`; what is beyond that
// is left out and counted.
// Threads: the control thread only. O(ids) for `store`, else O(1).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvpool {

// Of one chunk; longer ones are not stored.
inline constexpr size_t TOKEN_IDS_MAX = 4096;

// Behind the token ids of a chunk may stand its scope: a tag of four words, and up to sixty words of a name.
inline constexpr size_t SCOPE_WORDS_MIN = 4, SCOPE_WORDS_MAX = 64;

struct ScopedIds {
  std::span<const int32_t> tokens;
  std::span<const int32_t> scope;
};

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
  // At most so many bytes from now on; what is stored stays.
  void limit(uint64_t bytes) noexcept { bytes_max_ = bytes; }
  // Replaces what was stored before; nothing is stored where there are no tokens, or no room. REQUIRES: at most TOKEN_IDS_MAX in all.
  void store(RecordId id, ScopedIds ids);
  void forget(RecordId id) noexcept;
  // Empty where none were given. Good until the next change.
  [[nodiscard]] std::span<const int32_t> of(RecordId id) const noexcept;
  [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }
  // Chunks that were stored without their ids.
  [[nodiscard]] uint64_t left_out() const noexcept { return left_out_; }

 private:
  struct Stored {
    std::unique_ptr<int32_t[]> tokens;
    uint32_t count = 0;
  };

  std::vector<Stored> by_record_;  // grown on demand
  uint64_t bytes_ = 0;
  uint64_t bytes_max_ = UINT64_MAX;
  uint64_t left_out_ = 0;
};

}  // namespace kvpool
