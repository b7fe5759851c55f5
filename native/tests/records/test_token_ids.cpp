#include "records/token_ids.h"

#include <numeric>
#include <vector>

#include "tests/harness.h"

using namespace kvpool;

namespace {

std::vector<int32_t> ids_from(int32_t first, size_t count) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

bool has(const TokenIds& tokens, RecordId id, const std::vector<int32_t>& wanted) {
  const auto stored = tokens.of(id);
  return std::vector<int32_t>(stored.begin(), stored.end()) == wanted;
}

}  // namespace

TEST(token_ids_are_those_that_were_stored_last_whatever_array_they_stand_in) {
  TokenIds tokens;
  const std::vector<int32_t> long_ids = ids_from(100, 64), short_ids = ids_from(7, 16), scope = ids_from(-9, 4);
  tokens.store(RecordId(3), {packed_words(long_ids), {}});
  tokens.store(RecordId(1), {packed_words(short_ids), packed_words(scope)});
  EXPECT(tokens.bytes() == (64 + 16 + 4) * sizeof(int32_t));
  EXPECT(has(tokens, RecordId(3), long_ids));
  std::vector<int32_t> scoped = short_ids;
  scoped.insert(scoped.end(), scope.begin(), scope.end());
  EXPECT(has(tokens, RecordId(1), scoped));
  tokens.forget(RecordId(3));
  tokens.forget(RecordId(1));
  tokens.forget(RecordId(1));
  EXPECT(tokens.bytes() == 0);
  EXPECT(tokens.of(RecordId(3)).empty());
  // The spare arrays have 20 and 64 words: one of them is too short, one fits.
  const std::vector<int32_t> other = ids_from(1000, 64);
  tokens.store(RecordId(5), {packed_words(other), {}});
  tokens.store(RecordId(6), {packed_words(long_ids), {}});
  EXPECT(has(tokens, RecordId(5), other));
  EXPECT(has(tokens, RecordId(6), long_ids));
  EXPECT(tokens.of(RecordId(3)).empty());
}

TEST(token_ids_beyond_the_limit_are_left_out_and_freed_arrays_do_not_count) {
  TokenIds tokens;
  tokens.limit(3 * 64 * sizeof(int32_t));
  const std::vector<int32_t> ids = ids_from(0, 64);
  for (uint32_t id = 0; id < 4; ++id) {
    tokens.store(RecordId(id), {packed_words(ids), {}});
  }
  EXPECT(tokens.left_out() == 1);
  EXPECT(tokens.of(RecordId(3)).empty());
  tokens.forget(RecordId(0));
  tokens.store(RecordId(3), {packed_words(ids), {}});
  EXPECT(has(tokens, RecordId(3), ids));
  EXPECT(tokens.bytes() == 3 * 64 * sizeof(int32_t));
}

TEST(many_freed_arrays_are_not_kept) {
  TokenIds tokens;
  const std::vector<int32_t> ids = ids_from(0, TOKEN_IDS_MAX);
  const auto count = static_cast<uint32_t>(2 * TokenIds::SPARE_BYTES_MAX / (ids.size() * sizeof(int32_t)));
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t id = 0; id < count; ++id) {
      tokens.store(RecordId(id), {packed_words(ids), {}});
    }
    for (uint32_t id = 0; id < count; ++id) {
      EXPECT(has(tokens, RecordId(id), ids));
      tokens.forget(RecordId(id));
    }
  }
  EXPECT(tokens.bytes() == 0);
  EXPECT(tokens.spare_bytes() > 0);
  EXPECT(tokens.spare_bytes() <= TokenIds::SPARE_BYTES_MAX);
}
