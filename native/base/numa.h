// Which NUMA nodes the pages of a mapping come from: a policy of the region itself, which every process that maps it follows.
//
// Threads: any. Pages that are there already stay where they are.
#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"

namespace kvpool {

// New pages come from these nodes in turns, or from one node alone. Returns 0 or an errno; ENOSYS where the kernel knows no nodes.
// REQUIRES: nodes are not empty; one alone unless they are taken in turns.
[[nodiscard]] int place_on_nodes(const Mapping& mapping, const std::vector<uint32_t>& nodes, bool in_turns);

}  // namespace kvpool
