// Holds that end in bounded parts: each leaves the queue when the directory has it no more, however many chunks it had.
#include "leases/ending_holds.h"
#include "tests/directory_pool.h"
#include "tests/harness.h"

namespace {

using namespace kvpool;
using namespace kvpool::testing;

constexpr size_t AT_ONCE = 16, COST = 3;

struct Ending : Pool {
  Ending() : Pool(200 * CHUNK) {}
  std::vector<HoldId> hold(uint64_t first, uint64_t chunks, size_t times = 1) {
    EXPECT(store(range(first, chunks)) == chunks);
    std::vector<HoldId> holds;
    for (size_t number = 0; number < times; ++number) {
      holds.push_back(acquire(range(first, chunks)).id);
    }
    return holds;
  }
};

}  // namespace

TEST(a_hold_is_queued_for_as_long_as_the_directory_has_it) {
  for (const size_t size : {size_t{1}, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE}) {
    Ending pool;
    EndingHolds ending(pool.directory, AT_ONCE, COST);
    const auto holds = pool.hold(1, size);
    size_t calls = 1;
    for (bool are_left = ending.release_holds(holds, ++pool.now); are_left; are_left = ending.release_holds({}, ++pool.now)) {
      EXPECT(ending.size() == pool.directory.stats().holds && pool.is_sound());
      ++calls;
    }
    EXPECT(ending.size() == 0 && pool.directory.stats().holds == 0 && pool.directory.stats().held == 0);
    EXPECT(calls == (size + AT_ONCE - 1) / AT_ONCE);
  }
}

TEST(many_small_holds_end_in_several_calls) {
  Ending pool;
  EndingHolds ending(pool.directory, AT_ONCE, COST);
  bool are_left = ending.release_holds(pool.hold(1, 1, 90), ++pool.now);
  size_t calls = 1;
  for (; are_left; ++calls) {
    EXPECT(ending.size() == pool.directory.stats().holds);
    are_left = ending.release_holds({}, ++pool.now);
  }
  EXPECT(calls == 90 / (AT_ONCE / (1 + COST)) + 1);  // the last one has two
}

TEST(an_unknown_hold_is_passed_over_and_without_a_bound_all_end_at_once) {
  Ending pool;
  EndingHolds ending(pool.directory, SIZE_MAX, 0);
  auto holds = pool.hold(1, 40, 5);
  holds.insert(holds.begin(), 9999);
  EXPECT(!ending.release_holds(holds, ++pool.now));
  EXPECT(ending.size() == 0 && pool.directory.stats().holds == 0 && pool.is_sound());
}
