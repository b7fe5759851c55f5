// Hit needs: what a hit needs of each column of a prompt's keys, and the longest hit that an index has of them all.
//
// What it is: the search behind an engine's lookup, whatever the layout: of chains, of windows and states beside them, of several ranks; a
// plain layout is one chain. What it is not: who asks a shared store, or leases. The search begins at the end of the shortest chain, and has
// each other column lower it to the last end that it can serve, until none does: the greatest end that suits all, because each answer is the
// greatest one below.
//
// Immutable; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shared_index/chunk_table.h"

namespace kvpool {

// The longest hit. `levels`: of each chunk, the slowest among the columns that need it; DRAM where none does. `chained`: how far the chains
// alone reach.
struct FoundHit {
  std::vector<uint8_t> levels;
  size_t chained = 0;
};

class HitNeeds {
 public:
  using Columns = std::span<const std::span<const uint8_t>>;  // packed keys

  // `runs`: of each column how many chunks before its end a hit needs; 0 is all of them, as a chain. `elsewhere_max`: so many chunks of
  // columns that are no chains may be on other nodes; a hit with more of them is sought among this node's chunks.
  HitNeeds(std::vector<size_t> runs, size_t elsewhere_max) : runs_(std::move(runs)), elsewhere_max_(elsewhere_max) {}

  // The longest hit of `end` chunks at most. `here`: of this node's chunks alone. REQUIRES: as many columns as runs, of `end` keys at least.
  [[nodiscard]] FoundHit find(const IndexView& index, Columns columns, size_t end, bool here) const;
  // The keys that a hit of `end` chunks needs of each column, one column's behind another's; `leaves`: of a chain the last one alone.
  // REQUIRES: as of `find`.
  [[nodiscard]] std::string keys_of(Columns columns, size_t end, bool leaves) const;

  [[nodiscard]] const std::vector<size_t>& runs() const noexcept { return runs_; }

 private:
  [[nodiscard]] FoundHit find_chains(const IndexView& index, Columns columns, size_t end, bool here) const;
  [[nodiscard]] bool add_runs(const IndexView& index, Columns columns, bool here, std::vector<uint8_t>& levels) const;

  const std::vector<size_t> runs_;
  const size_t elsewhere_max_;
};

}  // namespace kvpool
