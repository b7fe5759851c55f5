#include "records/catalogue_order.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <compare>
#include <cstddef>
#include <numeric>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

constexpr uint32_t NONE = UINT32_MAX;

// Row numbers by key: open addressing, at most half full. Keys are hashes, so their first bytes place them; somebody
// who makes keys that collide slows his own restart down, no more than quadratically in the rows that he wrote.
class RowsByKey {
 public:
  RowsByKey(const CatalogueRow* rows, const std::vector<uint32_t>& numbers)
      : rows_(rows), slots_(std::bit_ceil(2 * numbers.size() + 1), NONE) {
    for (const uint32_t number : numbers) {
      uint32_t& slot = slots_[place_of(rows[number].key)];
      slot = slot == NONE ? number : slot;
    }
  }

  [[nodiscard]] uint32_t find(const uint8_t* key) const noexcept { return slots_[place_of(key)]; }

 private:
  [[nodiscard]] size_t place_of(const uint8_t* key) const noexcept {
    uint64_t word = 0;
    std::memcpy(&word, key, sizeof(word));
    size_t place = (word * 0x9E3779B97F4A7C15U >> 20U) & (slots_.size() - 1);
    while (slots_[place] != NONE && std::memcmp(rows_[slots_[place]].key, key, KEY_BYTES) != 0) {
      place = (place + 1) & (slots_.size() - 1);
    }
    return place;
  }

  const CatalogueRow* const rows_;
  std::vector<uint32_t> slots_;
};

std::vector<uint32_t> parents_of(const CatalogueRow* rows, size_t n, const std::vector<uint32_t>& good) {
  static constexpr uint8_t ROOT[KEY_BYTES] = {};
  const RowsByKey by_key(rows, good);
  std::vector<uint32_t> parents(n, NONE);
  for (const uint32_t number : good) {
    if (std::memcmp(rows[number].parent, ROOT, KEY_BYTES) != 0) {
      parents[number] = by_key.find(rows[number].parent);
    }
  }
  return parents;
}

// How far below its root each row stands. A row of a cycle becomes a root, so that every walk upwards ends.
std::vector<uint32_t> depths_of(std::vector<uint32_t>& parents) {
  constexpr uint32_t BEING_WALKED = NONE - 1;
  std::vector<uint32_t> depths(parents.size(), NONE);
  std::vector<uint32_t> path;
  for (uint32_t number = 0; number < parents.size(); ++number) {
    uint32_t at = number;
    while (at != NONE && depths[at] == NONE) {
      depths[at] = BEING_WALKED;
      path.push_back(at);
      at = parents[at];
    }
    if (at != NONE && depths[at] == BEING_WALKED) {
      parents[path.back()] = NONE;
      at = NONE;
    }
    uint32_t depth = at == NONE ? 0 : depths[at] + 1;
    for (; !path.empty(); path.pop_back()) {
      depths[path.back()] = depth++;
    }
  }
  return depths;
}

// By counting: depths are small numbers.
std::vector<uint32_t> deepest_first(const std::vector<uint32_t>& numbers, const std::vector<uint32_t>& depths) {
  uint32_t deepest = 0;
  for (const uint32_t number : numbers) {
    deepest = std::max(deepest, depths[number]);
  }
  std::vector<uint32_t> starts(size_t{deepest} + 2);
  for (const uint32_t number : numbers) {
    ++starts[deepest - depths[number] + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<uint32_t> sorted(numbers.size());
  for (const uint32_t number : numbers) {
    sorted[starts[deepest - depths[number]]++] = number;
  }
  return sorted;
}

// What a row is sorted by, kept together: looking it up in three arrays for each comparison takes three times as long.
struct Place {
  uint64_t age;  // the most recent has the least
  uint32_t depth;
  uint32_t number;

  friend auto operator<=>(const Place&, const Place&) = default;
};

}  // namespace

bool is_good(const CatalogueRow& row) noexcept {
  return row.generation > 0 && row.generation < GENERATION_END &&
         row.crc == crc32c(0, reinterpret_cast<const uint8_t*>(&row), offsetof(CatalogueRow, crc));
}

std::vector<uint32_t> restoring_order(const CatalogueRow* rows, size_t n) {
  KVPOOL_CHECK(n < NONE - 1);
  std::vector<uint32_t> order;
  order.reserve(n);
  for (uint32_t number = 0; number < n; ++number) {
    if (is_good(rows[number])) {
      order.push_back(number);
    }
  }
  std::vector<uint32_t> parents = parents_of(rows, n, order);
  const std::vector<uint32_t> depths = depths_of(parents);
  std::vector<uint64_t> recency(n);
  for (size_t number = 0; number < n; ++number) {
    recency[number] = rows[number].recency;
  }
  for (const uint32_t number : deepest_first(order, depths)) {
    if (parents[number] != NONE) {
      recency[parents[number]] = std::max(recency[parents[number]], recency[number]);
    }
  }
  std::vector<Place> places(order.size());
  std::transform(order.begin(), order.end(), places.begin(),
                 [&](uint32_t number) { return Place{UINT64_MAX - recency[number], depths[number], number}; });
  std::sort(places.begin(), places.end());
  std::transform(places.begin(), places.end(), order.begin(), [](const Place& place) { return place.number; });
  return order;
}

}  // namespace kvpool
