#include "base/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr uint32_t WORD_BITS = 8 * sizeof(unsigned long);
constexpr uint32_t NODES_MAX = 1024;  // as many as Linux can be built for

}  // namespace

int place_on_nodes(const Mapping& mapping, const std::vector<uint32_t>& nodes, bool in_turns) {
  KVPOOL_CHECK(!nodes.empty());
  KVPOOL_CHECK(in_turns || nodes.size() == 1);
  if (*std::max_element(nodes.begin(), nodes.end()) >= NODES_MAX) {
    return EINVAL;
  }
  std::vector<unsigned long> mask(NODES_MAX / WORD_BITS);
  for (const uint32_t node : nodes) {
    mask[node / WORD_BITS] |= 1UL << (node % WORD_BITS);
  }
  const int mode = in_turns ? MPOL_INTERLEAVE : MPOL_BIND;
  // The kernel takes one bit less than the caller passes.
  const long answer = syscall(SYS_mbind, mapping.data(), mapping.size(), mode, mask.data(), NODES_MAX + 1UL, 0U);
  return answer == 0 ? 0 : errno;
}

}  // namespace kvpool
