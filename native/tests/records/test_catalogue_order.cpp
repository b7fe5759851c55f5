// Restoring order against what it promises, over random forests and over rows that say nonsense.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>

#include "tests/harness.h"
#include "records/catalogue_order.h"
#include "checksum/crc32c.h"

using namespace kvpool;

namespace {

CatalogueRow row_of(uint32_t key, uint32_t parent, uint64_t recency, uint64_t generation = 1) {
  CatalogueRow row{};
  row.generation = generation;
  std::memcpy(row.key, &key, sizeof(key));
  row.key[31] = 1;
  if (parent != 0) {
    std::memcpy(row.parent, &parent, sizeof(parent));
    row.parent[31] = 1;
  }
  row.recency = recency;
  row.crc = crc32c(0, reinterpret_cast<const uint8_t*>(&row), offsetof(CatalogueRow, crc));
  return row;
}

uint32_t name_of(const uint8_t* key) {
  uint32_t name = 0;
  std::memcpy(&name, key, sizeof(name));
  return name;
}

bool is_permutation(std::vector<uint32_t> order, size_t n) {
  std::sort(order.begin(), order.end());
  for (uint32_t number = 0; number < order.size(); ++number) {
    if (order[number] != number) {
      return false;
    }
  }
  return order.size() == n;
}

}  // namespace

TEST(ancestors_come_first_and_recent_ones_before_old) {
  std::mt19937_64 random(kvpool::testing::seed());
  for (int round = 0; round < 200; ++round) {
    const auto n = static_cast<uint32_t>(1 + random() % 200);
    std::vector<CatalogueRow> rows;
    for (uint32_t name = 1; name <= n; ++name) {
      rows.push_back(row_of(name, static_cast<uint32_t>(random() % name), random() % 50));
    }
    std::shuffle(rows.begin(), rows.end(), random);
    const std::vector<uint32_t> order = restoring_order(rows.data(), rows.size());
    EXPECT(is_permutation(order, n));
    std::vector<uint64_t> recency(n + 1);  // of a chunk or its most recent descendant, by name
    for (int pass = 0; pass < 2; ++pass) {
      for (uint32_t name = n; name >= 1; --name) {  // a parent's name is smaller than its children's
        for (const CatalogueRow& row : rows) {
          if (name_of(row.key) == name) {
            recency[name] = std::max(recency[name], row.recency);
            recency[name_of(row.parent)] = std::max(recency[name_of(row.parent)], recency[name]);
          }
        }
      }
    }
    std::vector<bool> seen(n + 1);
    seen[0] = true;
    uint64_t before = UINT64_MAX;
    for (const uint32_t number : order) {
      const CatalogueRow& row = rows[number];
      EXPECT(seen[name_of(row.parent)]);
      seen[name_of(row.key)] = true;
      EXPECT(recency[name_of(row.key)] <= before);
      before = recency[name_of(row.key)];
    }
  }
}

TEST(invalid_rows_are_ordered_once_each) {
  std::vector<CatalogueRow> rows = {row_of(1, 2, 5), row_of(2, 3, 6), row_of(3, 1, 7),  // a circle
                                    row_of(4, 4, 1),                                     // its own parent
                                    row_of(5, 77, 2),                                    // an unknown one
                                    row_of(6, 0, 3), row_of(6, 1, 9)};                   // a key twice
  EXPECT(is_permutation(restoring_order(rows.data(), rows.size()), rows.size()));
  EXPECT(restoring_order(rows.data(), 0).empty());
}

TEST(a_long_chain_needs_no_stack) {
  std::vector<CatalogueRow> rows;
  for (uint32_t name = 300000; name >= 1; --name) {
    rows.push_back(row_of(name, name - 1, name));
  }
  const std::vector<uint32_t> order = restoring_order(rows.data(), rows.size());
  for (uint32_t at = 0; at < order.size(); ++at) {
    EXPECT(name_of(rows[order[at]].key) == at + 1);
  }
}

TEST(a_row_with_any_bit_changed_is_left_out) {
  std::mt19937_64 random(kvpool::testing::seed());
  std::vector<CatalogueRow> rows;
  for (uint32_t name = 1; name <= 8 * offsetof(CatalogueRow, pad); ++name) {
    rows.push_back(row_of(name, name - 1, random()));
    reinterpret_cast<uint8_t*>(&rows.back())[(name - 1) / 8] ^= static_cast<uint8_t>(1U << ((name - 1) % 8));
  }
  rows.push_back(row_of(5, 0, 1));
  EXPECT(restoring_order(rows.data(), rows.size()) == std::vector<uint32_t>{static_cast<uint32_t>(rows.size() - 1)});
}

TEST(a_generation_that_was_never_assigned_makes_a_bad_row) {
  const std::vector<CatalogueRow> rows = {row_of(1, 0, 1, 0), row_of(2, 0, 1, UINT64_MAX), row_of(3, 0, 1, GENERATION_END),
                                          row_of(4, 0, 1, GENERATION_END - 1)};
  EXPECT(restoring_order(rows.data(), rows.size()) == std::vector<uint32_t>{3});
}
