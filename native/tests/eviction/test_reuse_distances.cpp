// Sampled reuse distances against a list that is searched, and their books under random use.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <list>
#include <random>

#include "tests/harness.h"
#include "eviction/reuse_distances.h"

using namespace kvpool;

namespace {

constexpr uint64_t CHUNK = 1 << 20;
constexpr uint64_t FOREVER_NS = uint64_t{1} << 62;

ChunkKey key_of(uint64_t number) {
  std::mt19937_64 hash(number);
  return ChunkKey{{hash(), hash(), hash(), hash()}};
}

// The share of single uses that hit in a list of `blocks`, the newest first.
double exact_share(const std::vector<uint64_t>& uses, size_t blocks) {
  std::list<uint64_t> recent;
  size_t hits = 0;
  for (const uint64_t number : uses) {
    const auto found = std::find(recent.begin(), recent.end(), number);
    if (found != recent.end()) {
      hits += static_cast<size_t>(std::distance(recent.begin(), found)) < blocks ? 1U : 0U;
      recent.erase(found);
    }
    recent.push_front(number);
  }
  return static_cast<double>(hits) / static_cast<double>(uses.size());
}

}  // namespace

TEST(everything_sampled_is_exact) {
  std::mt19937_64 random(kvpool::testing::seed());
  std::geometric_distribution<uint64_t> skewed(0.01);
  std::vector<uint64_t> uses(20000);
  std::generate(uses.begin(), uses.end(), [&] { return skewed(random); });
  ReuseDistances distances(4096, uint64_t{1} << 50, 1.0, FOREVER_NS);
  for (const uint64_t number : uses) {
    distances.observe({key_of(number)}, 1, CHUNK, 1);
  }
  EXPECT(distances.verify().empty());
  for (const size_t blocks : {20U, 50U, 100U, 300U}) {
    // Blocks of one size fall on few points of the curve: the bin's width is the error.
    const double low = distances.hit_share(static_cast<uint64_t>(static_cast<double>(blocks * CHUNK) / 1.05));
    const double high = distances.hit_share(static_cast<uint64_t>(static_cast<double>(blocks * CHUNK) * 1.05));
    const double exact = exact_share(uses, blocks);
    EXPECT(low <= exact && exact <= high);
  }
}

TEST(books_are_right_under_random_use) {
  std::mt19937_64 random(kvpool::testing::seed());
  ReuseDistances distances(64, 300 * CHUNK, 0.5, 1 << 20);
  for (uint64_t step = 1; step < 4000; ++step) {
    std::vector<ChunkKey> chain;
    const size_t length = random() % 20;
    for (size_t index = 0; index < length; ++index) {
      chain.push_back(key_of(random() % 500));
    }
    distances.observe(chain, length, CHUNK * (1 + random() % 3), step * 1000);
    if (step % 100 == 0) {
      EXPECT(distances.verify().empty());
    }
  }
  EXPECT(distances.sampled() <= 64);
  EXPECT(distances.rate() <= 0.5);
  EXPECT(distances.hit_share(UINT64_MAX) <= 1.0);
}
