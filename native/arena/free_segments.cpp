// The tree of free segments. See free_segments.h.
#include "arena/free_segments.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {

FreeSegments::FreeSegments(uint32_t segments)
    : leaves_(std::bit_ceil(std::max(segments, 2U))), nodes_(size_t{2} * leaves_) {}

FreeSegments::Node FreeSegments::joined(const Node& left, const Node& right, uint32_t half) const noexcept {
  return {left.begins == half ? half + right.begins : left.begins, right.ends == half ? half + left.ends : right.ends,
          std::max({left.longest, right.longest, left.ends + right.begins})};
}

void FreeSegments::mark(uint32_t segment, bool is_free) noexcept {
  KVPOOL_CHECK(segment < leaves_);
  const uint32_t length = is_free ? 1 : 0;
  size_t node = size_t{leaves_} + segment;
  nodes_[node] = {length, length, length};
  for (uint32_t half = 1; node > 1; half *= 2) {
    node /= 2;
    nodes_[node] = joined(nodes_[2 * node], nodes_[2 * node + 1], half);
  }
}

// Down from the root: into the left half, over its end, or into the right half, the first of them that has room.
std::optional<uint32_t> FreeSegments::first_window(uint32_t count) const noexcept {
  KVPOOL_CHECK(count > 0);
  if (longest() < count) {
    return std::nullopt;
  }
  size_t node = 1;
  uint32_t first = 0;
  for (uint32_t half = leaves_ / 2; half > 0; half /= 2) {
    const Node& left = nodes_[2 * node];
    const Node& right = nodes_[2 * node + 1];
    if (left.longest >= count) {
      node = 2 * node;
    } else if (left.ends + right.begins >= count) {
      return first + half - left.ends;
    } else {
      node = 2 * node + 1;
      first += half;
    }
  }
  return first;
}

bool FreeSegments::verify() const noexcept {
  uint32_t half = leaves_ / 2;
  for (size_t node = 1; node < leaves_; ++node) {
    half = std::has_single_bit(node) ? static_cast<uint32_t>(leaves_ / (2 * node)) : half;
    if (nodes_[node] != joined(nodes_[2 * node], nodes_[2 * node + 1], half)) {
      return false;
    }
  }
  return true;
}

}  // namespace kvpool
