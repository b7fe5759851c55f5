// Record memory, tree links and recency lists. See chunk_records.h.
#include "kvpool/chunk_records.h"

#include "kvpool/check.h"

namespace kvpool {

ChunkRecords::ChunkRecords(uint32_t capacity) : capacity_(capacity) {
  KVPOOL_CHECK(capacity_ > 0);
  records_.reserve(capacity_);
}

void ChunkRecords::prefetch(RecordId id) const noexcept {
  const auto* first = reinterpret_cast<const char*>(&records_[id.value()]);
  __builtin_prefetch(first, 1);
  __builtin_prefetch(first + 64, 1);
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
  records_.emplace_back();
  return RecordId(static_cast<uint32_t>(records_.size() - 1));
}

void ChunkRecords::release(RecordId id) noexcept {
  ChunkRecord& record = records_[id.value()];
  KVPOOL_CHECK(!record.parent.valid());
  KVPOOL_CHECK(!record.first_child.valid());
  KVPOOL_CHECK(record.holds == 0);
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

void ChunkRecords::add_class() { lists_.emplace_back(); }

void ChunkRecords::push_newest(RecordId id) noexcept { link_behind(id, newest(records_[id.value()].size_class)); }

void ChunkRecords::insert_by_access(RecordId id, uint32_t steps) noexcept {
  ChunkRecord& record = records_[id.value()];
  RecordId below = newest(record.size_class);  // from the newest end down to one that is not newer
  RecordId above = oldest(record.size_class);  // from the oldest end up to one that is
  for (uint32_t step = 0; step < steps; ++step) {
    if (!below.valid() || records_[below.value()].last_access_ns <= record.last_access_ns) {
      link_behind(id, below);
      return;
    }
    if (records_[above.value()].last_access_ns > record.last_access_ns) {
      link_behind(id, records_[above.value()].older);
      return;
    }
    below = records_[below.value()].older;
    above = records_[above.value()].newer;
  }
  record.last_access_ns = records_[newest(record.size_class).value()].last_access_ns;
  push_newest(id);
}

// `older` unset: becomes the oldest.
void ChunkRecords::link_behind(RecordId id, RecordId older) noexcept {
  ChunkRecord& record = records_[id.value()];
  RecencyList& list = lists_[record.size_class.value()];
  KVPOOL_DCHECK(!record.older.valid() && !record.newer.valid());
  record.older = older;
  RecordId& before = older.valid() ? records_[older.value()].newer : list.oldest;
  record.newer = before;
  before = id;
  (record.newer.valid() ? records_[record.newer.value()].older : list.newest) = id;
  ++list.length;
}

void ChunkRecords::unlink(RecordId id) noexcept {
  ChunkRecord& record = records_[id.value()];
  RecencyList& list = lists_[record.size_class.value()];
  KVPOOL_CHECK(list.length > 0);
  if (record.older.valid()) {
    records_[record.older.value()].newer = record.newer;
  } else {
    list.oldest = record.newer;
  }
  if (record.newer.valid()) {
    records_[record.newer.value()].older = record.older;
  } else {
    list.newest = record.older;
  }
  record.older = RecordId();
  record.newer = RecordId();
  --list.length;
}

}  // namespace kvpool
