#include "directory/former_order.h"

#include <algorithm>
#include <compare>
#include <ranges>

namespace kvpool {
namespace {

constexpr uint32_t NONE = FormerCandidate::NONE;

// The first of chunks that follow one another and were used at the same time.
struct Head {
  uint64_t age;  // the most recent has the least
  uint32_t depth;
  uint32_t number;

  friend auto operator<=>(const Head&, const Head&) = default;
};

// Descendants before what precedes them, each chain from its end up: side by side in memory, mostly. On the way up a chunk learns when
// what follows it was used.
std::vector<uint32_t> ends_first(std::span<FormerCandidate> candidates) {
  for (FormerCandidate& one : candidates) {
    // Depths rise along a chain, so that none leads back to itself.
    one.is_whole = one.parent == NONE ? one.depth == 0 : candidates[one.parent].depth + 1 == one.depth;
    if (one.is_whole && one.parent != NONE) {
      ++candidates[one.parent].children;
    }
  }
  std::vector<uint32_t> order;
  order.reserve(candidates.size());
  for (uint32_t end = 0; end < candidates.size(); ++end) {
    for (uint32_t at = end; candidates[at].children == 0;) {
      FormerCandidate& one = candidates[at];
      one.children = NONE;  // it is in the order
      order.push_back(at);
      if (!one.is_whole || one.parent == NONE) {
        break;
      }
      at = one.parent;
      candidates[at].used_ns = std::max(candidates[at].used_ns, one.used_ns);
      --candidates[at].children;
    }
  }
  return order;
}

}  // namespace

std::vector<uint32_t> restoring_order(std::span<FormerCandidate> candidates) {
  std::vector<uint32_t> order = ends_first(candidates);
  std::vector<Head> heads;
  for (const uint32_t number : std::views::reverse(order)) {
    FormerCandidate& one = candidates[number];
    FormerCandidate* const above = one.parent == NONE ? nullptr : &candidates[one.parent];
    one.is_whole = one.is_whole && (above == nullptr || above->is_whole);
    if (!one.is_whole) {
      continue;
    }
    if (above != nullptr && above->follower == NONE && above->used_ns == one.used_ns) {
      above->follower = number;
    } else {
      heads.push_back({UINT64_MAX - one.used_ns, one.depth, number});
    }
  }
  std::sort(heads.begin(), heads.end());
  order.clear();
  for (const Head& head : heads) {
    for (uint32_t number = head.number; number != NONE; number = candidates[number].follower) {
      order.push_back(number);
    }
  }
  return order;
}

}  // namespace kvpool
