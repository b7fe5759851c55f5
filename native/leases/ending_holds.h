// Ending holds: holds that nobody needs any more, released a bounded number of chunks at once, because to end all holds of one
// connection may take a tenth of a second.
//
// What it is: a queue in front of Directory::release_part. What it is not: a clock, or who calls again.
//
// Invariant: every hold here is known to the directory.
// Threads: the control thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "directory/directory.h"

namespace kvpool {

class EndingHolds {
 public:
  // `at_once`: chunks that one call ends; `hold_cost`: what a hold costs itself, in chunks. REQUIRES: the directory lives as long.
  EndingHolds(Directory& directory, size_t at_once, size_t hold_cost)
      : directory_(directory), at_once_(at_once), hold_cost_(hold_cost) {}
  EndingHolds(const EndingHolds&) = delete;
  EndingHolds& operator=(const EndingHolds&) = delete;

  // Releases these after those that are waiting, as many as fit one call. Whether some are left.
  bool release_holds(const std::vector<HoldId>& holds, uint64_t now_ns) {
    holds_.insert(holds_.end(), holds.begin(), holds.end());
    for (size_t left = at_once_; !holds_.empty() && left > 0;) {
      const HoldId hold = holds_.front();
      const size_t ended = directory_.release_part(hold, left, now_ns);
      if (ended < left || directory_.holds().find_hold(hold) == nullptr) {
        holds_.pop_front();
      }
      const size_t cost = ended + std::min(hold_cost_, SIZE_MAX - ended);
      left -= std::min(left, cost);
    }
    return !holds_.empty();
  }
  [[nodiscard]] size_t size() const noexcept { return holds_.size(); }

 private:
  Directory& directory_;
  const size_t at_once_;
  const size_t hold_cost_;
  std::deque<HoldId> holds_;
};

}  // namespace kvpool
