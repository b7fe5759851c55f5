// Withheld slots: those that somebody may still write to for whom a former life of the process reserved them.
//
// What it is: which they are, by the holder whose reservation they were then: OWN_WRITER, where that process itself has them written;
// unset, where several have. What it is not: the judge of when such a writer has ended (its caller), or of what a slot was for.
// Invariant (recounted by the Directory's `verify`): the records here are exactly the zombies with a writer that nobody holds.
// Threads: the control thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/types.h"

namespace kvpool {

class WithheldSlots {
 public:
  struct Share {
    std::vector<RecordId> records;
    uint64_t bytes = 0;
  };

  void add(HolderId holder, RecordId id, uint64_t bytes) {
    Share& share = by_holder_[holder.value()];
    share.records.push_back(id);
    share.bytes += bytes;
    ++count_;
    bytes_ += bytes;
  }
  // The holder's, no longer here; none where it has none.
  [[nodiscard]] std::vector<RecordId> take(HolderId holder) {
    auto found = by_holder_.extract(holder.value());
    if (found.empty()) {
      return {};
    }
    count_ -= found.mapped().records.size();
    bytes_ -= found.mapped().bytes;
    return std::move(found.mapped().records);
  }
  [[nodiscard]] const std::map<uint32_t, Share>& by_holder() const noexcept { return by_holder_; }
  [[nodiscard]] uint64_t count() const noexcept { return count_; }
  [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::map<uint32_t, Share> by_holder_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kvpool
