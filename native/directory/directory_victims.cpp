// Victims: which chunks may be evicted, and which is the next. See directory.h.
#include <algorithm>

#include "directory/directory.h"

namespace kvpool {
namespace {

// Chunks that are checked one by one for one slot: a guess, about a millisecond. Where more would have to go, chunks that no
// other tier has stay protected.
constexpr uint32_t ASKED_MAX = 16'384;

}  // namespace

bool Directory::may_evict(RecordId id) const noexcept {
  return is_free(records_[id]) && (!protects_unsaved_ || !wants_place_below(records_[id]));
}

// The answer where a chunk has to be written to a lower tier before it may be evicted: meanwhile it counts as lost by its class.
SaveState Directory::wait_for(RecordId id) noexcept {
  if (id.valid() && is_free(records_[id])) {
    write_shares_.note_lost(records_[id].size_class, chunk_bytes(records_[id]));
  }
  return SaveState::NOT_READY;
}

// Whether these and all that follows them may be evicted. Those that follow one of them are looked at through it alone: each once.
bool Directory::may_evict_all(std::vector<RecordId> owners) const {
  const auto is_before = [](RecordId one, RecordId other) { return one.value() < other.value(); };
  std::sort(owners.begin(), owners.end(), is_before);
  std::vector<RecordId> left = owners;
  for (uint32_t asked = 0; !left.empty(); ++asked) {
    const RecordId id = left.back();
    left.pop_back();
    if (!may_evict(id) || (protects_unsaved_ && asked == ASKED_MAX)) {
      return false;
    }
    for (RecordId child = records_[id].first_child; child.valid(); child = records_[child].next_sibling) {
      if (!std::binary_search(owners.begin(), owners.end(), child, is_before)) {
        left.push_back(child);
      }
    }
  }
  return true;
}

// The next victim of a size class, or (unset) of all: the coldest that may be evicted. Where the coldest is protected because no
// other tier has it, it is the coldest of the others; but a chunk above the default priority is not evicted for one that is not. Where
// none may be evicted, the one that would be next.
RecordId Directory::next_victim(std::optional<ClassId> size_class) noexcept {
  const auto coldest = [&](Among among) {
    return size_class ? queues_.victim(*size_class, latest_ns_, among) : queues_.victim(latest_ns_, among);
  };
  const RecordId first = coldest(Among::ALL);
  if (!first.valid() || may_evict(first)) {
    return first;
  }
  const RecordId saved = coldest(Among::SAVED);
  const bool is_worse = saved.valid() && records_[saved].level > std::max(DEFAULT_PRIORITY, records_[first].level);
  return saved.valid() && !is_worse ? saved : first;
}

}  // namespace kvpool
