// The order in which chunks of a former life are restored.
#include <vector>

#include "directory/former_order.h"
#include "tests/harness.h"

namespace kvpool {
namespace {

constexpr uint32_t NONE = FormerCandidate::NONE;

FormerCandidate used_at(uint64_t used_ns, uint32_t parent, uint32_t depth) {
  return {.used_ns = used_ns, .id = 0, .parent = parent, .depth = depth, .run = 0, .slot = {}};
}

using Numbers = std::vector<uint32_t>;

TEST(the_most_recent_chain_comes_first_and_each_from_its_root_on) {
  std::vector<FormerCandidate> candidates = {used_at(5, NONE, 0), used_at(5, 0, 1), used_at(9, NONE, 0), used_at(9, 2, 1)};
  EXPECT(restoring_order(candidates) == (Numbers{2, 3, 0, 1}));
}

TEST(a_chunk_counts_as_used_when_what_follows_it_was) {
  std::vector<FormerCandidate> candidates = {used_at(8, 1, 2), used_at(3, 2, 1), used_at(1, NONE, 0), used_at(5, NONE, 0)};
  EXPECT(restoring_order(candidates) == (Numbers{2, 1, 0, 3}));
  EXPECT(candidates[1].used_ns == 8 && candidates[2].used_ns == 8);
}

TEST(of_a_tree_the_branch_that_was_used_last_comes_with_its_root) {
  std::vector<FormerCandidate> candidates = {used_at(4, NONE, 0), used_at(4, 0, 1), used_at(7, 0, 1), used_at(7, 2, 2), used_at(7, 0, 1)};
  const Numbers order = restoring_order(candidates);
  EXPECT(order.size() == 5 && order.front() == 0 && order.back() == 1);
}

TEST(what_precedes_a_chunk_and_is_none_takes_all_that_follow_it_along) {
  std::vector<FormerCandidate> candidates = {used_at(9, NONE, 1), used_at(9, 0, 2), used_at(9, 1, 3), used_at(2, NONE, 0)};
  EXPECT(restoring_order(candidates) == (Numbers{3}));
}

TEST(depths_that_lie_lead_nowhere) {
  std::vector<FormerCandidate> candidates = {used_at(1, 1, 1), used_at(2, 0, 1), used_at(3, 2, 1), used_at(4, NONE, 0), used_at(5, 3, 7)};
  EXPECT(restoring_order(candidates) == (Numbers{3}));
  EXPECT(candidates[3].used_ns == 4);
}

TEST(none_and_one_are_orders_too) {
  std::vector<FormerCandidate> candidates;
  EXPECT(restoring_order(candidates).empty());
  candidates.push_back(used_at(0, NONE, 0));
  EXPECT(restoring_order(candidates) == (Numbers{0}));
}

}  // namespace
}  // namespace kvpool
