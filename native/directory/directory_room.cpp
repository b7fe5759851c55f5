// Room for one more chunk: what has to be evicted for it is decided before anything is. See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

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

// Evicts exactly what is in the plan, or nothing.
SaveState Directory::make_room(ClassId size_class, WindowSearch& search) noexcept {
  const RoomPlan plan = plan_room(size_class, search);
  if (plan.state != SaveState::RESERVED) {
    return plan.state;
  }
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  for (const RecordId id : plan.slot_owners) {
    if (records_[id].state == ChunkState::READY) {  // else it went with its parent
      evict_subtree(id, plan.slot_reason);
    }
  }
  for (const RecordId id : plan.further) {
    const Eviction reason = records_[id].size_class == size_class ? Eviction::OWN_CLASS : Eviction::OTHER_CLASS;
    evict(id, stats_.used_bytes + bytes > geometry_.capacity ? reason : Eviction::INDEX_FULL);
  }
  KVPOOL_CHECK(arena_.can_allocate(size_class));
  KVPOOL_CHECK(stats_.used_bytes + bytes <= geometry_.capacity);
  return SaveState::RESERVED;
}

RoomPlan Directory::plan_room(ClassId size_class, WindowSearch& search) noexcept {
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  if (stats_.used_bytes - stats_.idle_bytes + bytes > geometry_.capacity) {
    const bool waits = stats_.used_bytes - stats_.idle_bytes - stats_.pinned_bytes + bytes <= geometry_.capacity;
    return {waits ? SaveState::NOT_READY : SaveState::FULL};
  }
  if (records_.is_full() && stats_.idle_bytes == 0) {
    return {stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL};
  }
  RoomPlan plan = plan_slot(size_class, search);
  if (plan.state == SaveState::RESERVED) {
    plan_further(bytes, plan);
  }
  return plan;
}

// A slot: free, or the class's own next victim's, or in a window of other classes that was used longer ago than that.
RoomPlan Directory::plan_slot(ClassId size_class, WindowSearch& search) noexcept {
  if (arena_.can_allocate(size_class)) {
    return {SaveState::RESERVED};
  }
  const RecordId own = next_victim(size_class);
  find_window(size_class, search);
  if (search.window && (!own.valid() || is_cheaper(*search.window, records_[own]))) {
    std::vector<RecordId> owners = arena_.owners_in(*search.window);
    if (may_evict_all(owners)) {
      return {SaveState::RESERVED, std::move(owners), Eviction::OTHER_CLASS};
    }
    if (!own.valid()) {
      return {SaveState::NOT_READY};
    }
  }
  if (!own.valid()) {
    return {arena_.is_behind() || stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL};
  }
  if (!may_evict(own)) {
    return {wait_for(own)};
  }
  return {SaveState::RESERVED, {own}, Eviction::OWN_CLASS};
}

void Directory::find_window(ClassId size_class, WindowSearch& search) noexcept {
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
void Directory::plan_further(uint64_t bytes, RoomPlan& plan) noexcept {
  const uint64_t used = stats_.used_bytes + bytes;
  const uint64_t excess = used > geometry_.capacity ? used - geometry_.capacity : 0;
  bool lacks_record = records_.is_full() && plan.slot_owners.empty();
  uint64_t freed = 0;
  std::vector<TakenOut> out;
  const auto is_enough = [&] { return freed >= excess && !lacks_record; };
  const auto take_out = [&](RecordId id) {
    const RecordId parent = records_[id].parent;
    out.push_back({id, parent, queues_.take_out(id)});
    records_.detach(id);
    requeue_childless(parent, records_[id].last_access_ns);
  };
  const std::vector<RecordId> cleared = excess > 0 ? with_followers(records_, plan.slot_owners) : std::vector<RecordId>{};
  for (const RecordId id : cleared) {
    freed += chunk_bytes(records_[id]);
  }
  if (!is_enough()) {
    std::for_each(cleared.begin(), cleared.end(), take_out);
  }
  while (!is_enough()) {
    const RecordId victim = next_victim(std::nullopt);
    if (!victim.valid() || !may_evict(victim)) {
      const SaveState without = stats_.pinned_bytes > 0 ? SaveState::NOT_READY : SaveState::FULL;
      plan.state = victim.valid() ? wait_for(victim) : without;
      break;
    }
    plan.further.push_back(victim);
    freed += chunk_bytes(records_[victim]);
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
}

}  // namespace kvpool
