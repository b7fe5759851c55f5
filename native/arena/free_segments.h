// Free segments of an arena, and where so many of them lie side by side.
//
// What it is: a binary tree over the segments whose nodes have the longest stretch of free segments in their range. What it is
// not: an owner of segments (SlotArena).
//
//                longest 3
//               /         \            Each node: how many free segments its range begins with, how many it ends with,
//        begins 0           begins 2   and the longest stretch inside. Two halves make a whole without a look at the leaves.
//        ends   1           ends   0
//        . . . F             F F . .   (F: free)
//
// Invariant: a leaf describes its segment, every other node its two halves. Leaves behind the last segment are never free.
// Threads: the control thread only. `mark` and `first_window` are O(log segments), `longest` is O(1).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvpool {

class FreeSegments {
 public:
  // None of them is free.
  explicit FreeSegments(uint32_t segments);

  void mark(uint32_t segment, bool is_free) noexcept;
  [[nodiscard]] bool is_free(uint32_t segment) const noexcept { return nodes_[leaves_ + segment].longest != 0; }
  // Length of the longest stretch of free segments.
  [[nodiscard]] uint32_t longest() const noexcept { return nodes_[1].longest; }
  // The first segment of the first `count` free ones side by side. REQUIRES: count > 0.
  [[nodiscard]] std::optional<uint32_t> first_window(uint32_t count) const noexcept;

  // Whether every node agrees with its halves.
  [[nodiscard]] bool verify() const noexcept;

 private:
  struct Node {
    uint32_t begins = 0;
    uint32_t ends = 0;
    uint32_t longest = 0;
    bool operator==(const Node&) const = default;
  };

  [[nodiscard]] Node joined(const Node& left, const Node& right, uint32_t half) const noexcept;

  uint32_t leaves_ = 1;  // a power of two; node 1 is the root, the leaf of segment s is node leaves_ + s
  std::vector<Node> nodes_;
};

}  // namespace kvpool
