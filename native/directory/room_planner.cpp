// What has to be evicted for one more chunk, decided before anything is. See room_planner.h.
#include "directory/room_planner.h"

#include <algorithm>

namespace kvpool {
namespace {

// Chunks that are checked one by one for one slot: a guess, about a millisecond. Where more would have to go, chunks that no
// other tier has stay protected.
constexpr uint32_t ASKED_MAX = 16'384;

// A chunk that is taken out of the queues while the next victim without it is searched.
struct TakenOut {
  RecordId id;
  RecordId parent;
  EvictionQueues::Place place;
};

// Whether clearing a window of other classes costs less than evicting this chunk: the lower priority first, then the older.
bool is_cheaper(const SegmentWindow& window, const ChunkRecord& own) noexcept {
  const bool is_own_retained = own.level > DEFAULT_PRIORITY;
  if (own.level < DEFAULT_PRIORITY || window.is_retained != is_own_retained) {
    return own.level >= DEFAULT_PRIORITY && is_own_retained;
  }
  return window.newest_ns < own.last_access_ns;
}

// These chunks and all that follow them, leaves first, each once.
std::vector<RecordId> with_followers(const ChunkRecords& records, const std::vector<RecordId>& owners) {
  const auto is_before = [](RecordId one, RecordId other) { return one.value() < other.value(); };
  std::vector<RecordId> sorted = owners;
  std::sort(sorted.begin(), sorted.end(), is_before);
  std::vector<RecordId> all = owners;
  for (size_t index = 0; index < all.size(); ++index) {
    for (RecordId child = records[all[index]].first_child; child.valid(); child = records[child].next_sibling) {
      if (!std::binary_search(sorted.begin(), sorted.end(), child, is_before)) {
        all.push_back(child);
      }
    }
  }
  std::sort(all.begin(), all.end(), [&](RecordId one, RecordId other) { return records[one].depth > records[other].depth; });
  return all;
}

}  // namespace

bool RoomPlanner::may_evict(RecordId id, uint64_t now_ns) const noexcept {
  return records_[id].is_free() && (!protects_unsaved_ || !demotion_.wants_place_below(records_[id], now_ns));
}

// The answer where a chunk has to be written to a lower tier before it may be evicted: meanwhile it counts as lost by its class.
SaveState RoomPlanner::wait_for(RecordId id) noexcept {
  if (id.valid() && records_[id].is_free()) {
    demotion_.note_lost(records_[id]);
  }
  return SaveState::NOT_READY;
}

bool RoomPlanner::may_evict_all(std::vector<RecordId> owners, uint64_t now_ns) const {
  const auto is_before = [](RecordId one, RecordId other) { return one.value() < other.value(); };
  std::sort(owners.begin(), owners.end(), is_before);
  std::vector<RecordId> left = owners;
  for (uint32_t asked = 0; !left.empty(); ++asked) {
    const RecordId id = left.back();
    left.pop_back();
    if (!may_evict(id, now_ns) || (protects_unsaved_ && asked == ASKED_MAX)) {
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

// The next victim of a size class, or (unset) of all. Where none may be evicted, the one that would be next.
RecordId RoomPlanner::next_victim(std::optional<ClassId> size_class, uint64_t now_ns) noexcept {
  const auto coldest = [&](Among among) {
    return size_class ? queues_.victim(*size_class, now_ns, among) : queues_.victim(now_ns, among);
  };
  const RecordId first = coldest(Among::ALL);
  if (!first.valid() || may_evict(first, now_ns)) {
    return first;
  }
  const RecordId saved = coldest(Among::SAVED);
  const bool is_worse = saved.valid() && records_[saved].level > std::max(DEFAULT_PRIORITY, records_[first].level);
  return saved.valid() && !is_worse ? saved : first;
}

const RoomPlan& RoomPlanner::plan_room(ClassId size_class, WindowSearch& search, uint64_t now_ns) noexcept {
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  plan_.own = RecordId();
  plan_.slot_owners.clear();
  plan_.further.clear();
  if (stats_.used_bytes - stats_.idle_bytes + bytes > capacity_) {
    const bool waits = stats_.used_bytes - stats_.idle_bytes - stats_.pinned_bytes + bytes <= capacity_;
    plan_.state = waits ? SaveState::NOT_READY : SaveState::FULL;
  } else if (records_.is_full() && stats_.idle_bytes == 0) {
    plan_.state = stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL;
  } else {
    plan_.state = plan_slot(size_class, search, now_ns);
    if (plan_.state == SaveState::RESERVED) {
      plan_.state = plan_further(bytes, now_ns);
    }
  }
  return plan_;
}

// A slot: free, or the class's own next victim's, or in a window of other classes that was used longer ago than that.
SaveState RoomPlanner::plan_slot(ClassId size_class, WindowSearch& search, uint64_t now_ns) noexcept {
  if (arena_.can_allocate(size_class)) {
    return SaveState::RESERVED;
  }
  const RecordId own = next_victim(size_class, now_ns);
  find_window(size_class, search);
  if (search.window && (!own.valid() || is_cheaper(*search.window, records_[own]))) {
    std::vector<RecordId> owners = arena_.owners_in(*search.window);
    if (may_evict_all(owners, now_ns)) {
      plan_.slot_owners = std::move(owners);
      return SaveState::RESERVED;
    }
    if (!own.valid()) {
      return SaveState::NOT_READY;
    }
  }
  if (!own.valid()) {
    return arena_.is_behind() || stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL;
  }
  if (!may_evict(own, now_ns)) {
    return wait_for(own);
  }
  plan_.own = own;
  return SaveState::RESERVED;
}

void RoomPlanner::find_window(ClassId size_class, WindowSearch& search) noexcept {
  if (search.searched && (!search.window || arena_.is_clearable(size_class, *search.window))) {
    return;
  }
  search.searched = true;
  search.window = std::nullopt;
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    if (ClassId(index) != size_class && arena_.lent_runs(ClassId(index)) > 0) {
      search.window = arena_.coldest_window(size_class);
      return;
    }
  }
}

// Further victims, one by one, until capacity and records suffice. Each is taken out of the queues as if it were evicted, so that
// the next victim after it is found; in the end all are put back where they were, the last one first.
SaveState RoomPlanner::plan_further(uint64_t bytes, uint64_t now_ns) noexcept {
  const uint64_t used = stats_.used_bytes + bytes;
  const uint64_t excess = used > capacity_ ? used - capacity_ : 0;
  bool lacks_record = records_.is_full() && !plan_.own.valid() && plan_.slot_owners.empty();
  uint64_t freed = plan_.own.valid() ? bytes_of(plan_.own) : 0;
  if (freed >= excess && !lacks_record) {
    return SaveState::RESERVED;
  }
  auto state = SaveState::RESERVED;
  std::vector<TakenOut> out;
  const auto is_enough = [&] { return freed >= excess && !lacks_record; };
  const auto take_out = [&](RecordId id) {
    const RecordId parent = records_[id].parent;
    out.push_back({id, parent, queues_.take_out(id)});
    records_.detach(id);
    standings_.requeue_childless(parent, records_[id].last_access_ns);
  };
  if (plan_.own.valid()) {
    take_out(plan_.own);
  }
  const std::vector<RecordId> cleared = excess > 0 ? with_followers(records_, plan_.slot_owners) : std::vector<RecordId>{};
  for (const RecordId id : cleared) {
    freed += bytes_of(id);
  }
  if (!is_enough()) {
    std::for_each(cleared.begin(), cleared.end(), take_out);
  }
  while (!is_enough()) {
    const RecordId victim = next_victim(std::nullopt, now_ns);
    if (!victim.valid() || !may_evict(victim, now_ns)) {
      const SaveState without = stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL;
      state = victim.valid() ? wait_for(victim) : without;
      break;
    }
    plan_.further.push_back(victim);
    freed += bytes_of(victim);
    lacks_record = false;
    if (!is_enough()) {
      take_out(victim);
    }
  }
  for (auto taken = out.rbegin(); taken != out.rend(); ++taken) {
    if (taken->parent.valid()) {
      records_.attach_child(taken->parent, taken->id);
    }
    queues_.put_back(taken->id, taken->place);
  }
  return state;
}

}  // namespace kvpool
