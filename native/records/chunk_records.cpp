// Record memory, tree links and list links. See chunk_records.h.
#include "records/chunk_records.h"

#include <new>

#include "base/check.h"

namespace kvpool {

ChunkRecords::ChunkRecords(uint32_t capacity) : capacity_(capacity), records_(capacity) { KVPOOL_CHECK(capacity_ > 0); }

void ChunkRecords::prefetch(RecordId id) const noexcept { __builtin_prefetch(&records_[id.value()], 1); }

void ChunkRecords::prefetch_whole(RecordId id) const noexcept {
  prefetch(id);
  __builtin_prefetch(&records_[id.value()].key, 1);
}

RecordId ChunkRecords::allocate() noexcept {
  KVPOOL_CHECK(!is_full());
  ++alive_;
  if (first_free_.valid()) {
    const RecordId id = first_free_;
    ChunkRecord& record = records_[id.value()];
    KVPOOL_CHECK(record.state == ChunkState::FREE);
    first_free_ = record.newer;
    record = ChunkRecord{};
    return id;
  }
  new (&records_[end_]) ChunkRecord{};
  return RecordId(end_++);
}

void ChunkRecords::release(RecordId id) noexcept {
  ChunkRecord& record = records_[id.value()];
  KVPOOL_CHECK(!record.parent.valid());
  KVPOOL_CHECK(!record.first_child.valid());
  KVPOOL_CHECK(record.holds == 0);
  KVPOOL_CHECK(record.pins == 0);
  record = ChunkRecord{};
  record.newer = first_free_;
  first_free_ = id;
  --alive_;
}

void ChunkRecords::attach_child(RecordId parent, RecordId child) noexcept {
  ChunkRecord& above = records_[parent.value()];
  ChunkRecord& below = records_[child.value()];
  KVPOOL_CHECK(!below.parent.valid());
  below.parent = parent;
  below.depth = above.depth + 1;
  below.next_sibling = above.first_child;
  if (above.first_child.valid()) {
    records_[above.first_child.value()].previous_sibling = child;
  }
  above.first_child = child;
}

void ChunkRecords::detach(RecordId child) noexcept {
  ChunkRecord& below = records_[child.value()];
  if (!below.parent.valid()) {
    return;
  }
  if (below.previous_sibling.valid()) {
    records_[below.previous_sibling.value()].next_sibling = below.next_sibling;
  } else {
    KVPOOL_CHECK(records_[below.parent.value()].first_child == child);
    records_[below.parent.value()].first_child = below.next_sibling;
  }
  if (below.next_sibling.valid()) {
    records_[below.next_sibling.value()].previous_sibling = below.previous_sibling;
  }
  below.parent = RecordId();
  below.next_sibling = RecordId();
  below.previous_sibling = RecordId();
}

void ChunkRecords::link_run_behind(ChunkList& list, std::span<const RecordId> run, RecordId older) noexcept {
  RecordId& before = older.valid() ? records_[older.value()].newer : list.oldest;
  RecordId newer = before;
  before = run.back();
  (newer.valid() ? records_[newer.value()].older : list.newest) = run.front();
  for (size_t index = 0; index < run.size(); ++index) {
    ChunkRecord& record = records_[run[index].value()];
    KVPOOL_DCHECK(!record.older.valid() && !record.newer.valid());
    record.newer = newer;
    record.older = index + 1 < run.size() ? run[index + 1] : older;
    newer = run[index];
  }
  list.length += run.size();
}

void ChunkRecords::unlink_run(ChunkList& list, std::span<const RecordId> run) noexcept {
  KVPOOL_CHECK(list.length >= run.size());
  const RecordId newer = records_[run.front().value()].newer;
  const RecordId older = records_[run.back().value()].older;
  (older.valid() ? records_[older.value()].newer : list.oldest) = newer;
  (newer.valid() ? records_[newer.value()].older : list.newest) = older;
  bool has_hand = false;
  for (const RecordId id : run) {
    ChunkRecord& record = records_[id.value()];
    has_hand = has_hand || list.hand == id;
    record.older = RecordId();
    record.newer = RecordId();
  }
  if (has_hand) {
    list.hand = older.valid() ? older : newer;
  }
  list.length -= run.size();
}

}  // namespace kvpool
