// Geometry, construction, removal and eviction order of the directory. See directory.h.
#include "kvpool/directory.h"

#include <algorithm>

#include "kvpool/check.h"

namespace kvpool {
namespace {

// From this size on segments are multiples of huge pages; below, rounding would waste the arena.
constexpr uint64_t HUGE_SEGMENT_BYTES = uint64_t{16} << 20;
constexpr uint64_t SEGMENTS_AT_LEAST = 8;
constexpr uint64_t MAX_CAPACITY = uint64_t{4} << 40;
// Until something else is said: enough for the prompts that everybody shares, too little to pin the tier.
constexpr double RETAINED_SHARE = 0.3;

}  // namespace

std::optional<DirectoryGeometry> DirectoryGeometry::plan(uint64_t capacity, uint64_t segment_bytes,
                                                         uint32_t max_chunks, uint32_t further_entries) {
  const uint64_t entries = uint64_t{max_chunks} + further_entries;
  if (capacity == 0 || capacity > MAX_CAPACITY || segment_bytes == 0 || max_chunks == 0 ||
      entries > (1U << (MAX_TABLE_LOG2 - 1))) {
    return std::nullopt;
  }
  const uint64_t share = (capacity + SEGMENTS_AT_LEAST - 1) / SEGMENTS_AT_LEAST;
  uint64_t bytes = round_up(std::min(segment_bytes, share), PAGE_BYTES);
  if (bytes >= HUGE_SEGMENT_BYTES) {
    bytes = round_up(bytes, HUGE_PAGE_BYTES);
  }
  const uint64_t segments = (capacity + bytes - 1) / bytes + 1;
  if (segments > UINT32_MAX) {
    return std::nullopt;
  }
  const ArenaShape arena{bytes, static_cast<uint32_t>(segments)};
  const IndexShape index{IndexShape::table_log2_for(entries), arena.total_bytes()};
  if (!index.valid() || arena.total_bytes() / PAGE_BYTES >= (1U << 31) - 1) {
    return std::nullopt;
  }
  return DirectoryGeometry{capacity, max_chunks, arena, index};
}

std::optional<DirectoryGeometry> DirectoryGeometry::plan_files(uint64_t segment_bytes, uint32_t segments,
                                                               uint32_t max_chunks) {
  const bool is_in_range = segment_bytes != 0 && segment_bytes % PAGE_BYTES == 0 && segments != 0 &&
                           segment_bytes <= MAX_CAPACITY / segments;
  if (!is_in_range || max_chunks == 0 || max_chunks > (1U << (MAX_TABLE_LOG2 - 1))) {
    return std::nullopt;
  }
  const ArenaShape arena{segment_bytes, segments, 1};
  const IndexShape index{IndexShape::table_log2_for(max_chunks), arena.total_bytes()};
  if (!index.valid() || arena.total_bytes() / PAGE_BYTES >= (1U << 31) - 1) {
    return std::nullopt;
  }
  return DirectoryGeometry{arena.total_bytes(), max_chunks, arena, index};
}

Directory::Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index,
                     const DirectoryGeometry& geometry, const uint8_t epoch[16], Tier tier, PolicyKind policy)
    : geometry_(geometry),
      tier_(tier),
      arena_mapping_(std::move(arena)),
      table_(std::move(index), geometry.index, epoch),
      arena_(geometry.arena),
      records_(geometry.max_chunks),
      policy_(make_policy(policy, geometry.max_chunks)),
      queues_(records_, *policy_),
      timers_(records_) {
  cap_retained(RETAINED_SHARE);
  KVPOOL_CHECK(arena_mapping_ == nullptr || arena_mapping_->size() >= geometry_.arena.total_bytes());
  KVPOOL_CHECK(geometry_.index.arena_bytes == geometry_.arena.total_bytes());
}

std::optional<ClassId> Directory::add_class(uint64_t chunk_bytes, uint32_t layers) {
  if (chunk_bytes > geometry_.capacity) {
    return std::nullopt;
  }
  const uint32_t known = arena_.class_count();
  const auto added = arena_.add_class(chunk_bytes, layers);
  if (arena_.class_count() > known) {
    queues_.add_class();
  }
  return added;
}

NamespaceId Directory::add_namespace() {
  namespaces_.emplace_back();
  return NamespaceId(static_cast<uint32_t>(namespaces_.size() - 1));
}

NamespaceCounts Directory::namespace_counts(NamespaceId owner) const noexcept {
  return owner.value() < namespaces_.size() ? namespaces_[owner.value()] : NamespaceCounts{};
}

DirectoryStats Directory::stats() const noexcept {
  DirectoryStats stats = stats_;
  stats.holds = holds_.size();
  stats.reservations = reservations_.size();
  stats.token_id_bytes = tokens_.bytes();
  stats.policy = policy_->counts();
  return stats;
}

std::span<const int32_t> Directory::tokens_of(const ChunkKey& key) const noexcept {
  const auto entry = table_.find(key);
  return entry && entry->record.valid() ? tokens_.of(entry->record) : std::span<const int32_t>{};
}

uint64_t Directory::chunk_bytes(const ChunkRecord& record) const noexcept {
  return arena_.size_class(record.size_class).chunk_bytes;
}

void Directory::make_idle(RecordId id, uint64_t now_ns) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.state == ChunkState::READY);
  KVPOOL_CHECK(record.holds == 0);
  latest_ns_ = std::max(latest_ns_, now_ns);
  record.last_access_ns = latest_ns_;
  queues_.add(id);
  arena_.set_idle(record.page, latest_ns_);
  stats_.idle_bytes += chunk_bytes(record);
}

void Directory::make_busy(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.state == ChunkState::READY);
  queues_.remove(id);
  arena_.set_busy(record.page);
  stats_.idle_bytes -= chunk_bytes(record);
}

// Nobody finds the chunk any more, and who is reading it learns so from the generation word.
void Directory::hide(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(!record.first_child.valid());
  if (record.state == ChunkState::READY) {
    report(record, ChangeKind::LEFT, departure_);
  }
  leave(record.key);
  forget_retention(id);
  table_.set_generation(record.page, 0);
  records_.detach(id);
  if (record.state == ChunkState::READY) {
    NamespaceCounts& counts = namespaces_[record.owner.value()];
    --counts.chunks;
    counts.bytes -= chunk_bytes(record);
    counts.held -= record.holds > 0 ? 1U : 0U;
    --stats_.chunks;
    if (faster_ != nullptr) {
      static_cast<void>(faster_->note_slower(record.key, false));
      departed_.push_back(record.key);
    }
  } else if (record.state == ChunkState::PROMOTING) {
    --stats_.promoting;
  } else {
    KVPOOL_CHECK(record.state == ChunkState::WRITING);
    --stats_.writing;
  }
}

void Directory::remove_idle(RecordId id) noexcept {
  KVPOOL_CHECK(records_[id].holds == 0);
  const RecordId parent = records_[id].parent;
  make_busy(id);
  hide(id);
  free_slot(id);
  settle_widow(parent);
}

void Directory::evict(RecordId leaf, Eviction reason) noexcept {
  stats_.lifetimes.add(age_ns(records_[leaf], latest_ns_));
  ++stats_.evictions[static_cast<size_t>(reason)];
  count_departure(records_[leaf]);
  policy_->note_evicted(records_[leaf]);
  hand_down(records_[leaf]);
  departure_ = static_cast<Cause>(reason);
  remove_idle(leaf);
}

// A chunk that stood with its child for the child's sake goes back to its own level when nothing follows it any more.
void Directory::settle_widow(RecordId parent) noexcept {
  if (parent.valid() && !records_[parent].first_child.valid() && is_listed(records_[parent]) &&
      records_[parent].level != records_[parent].priority) {
    requeue(parent);
  }
}

void Directory::make_zombie(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.holds > 0);
  hide(id);
  record.state = ChunkState::ZOMBIE;
  ++stats_.zombies;
}

void Directory::free_slot(RecordId id) noexcept {
  const ChunkRecord& record = records_[id];
  KVPOOL_CHECK(table_.generation(record.page) == 0);
  KVPOOL_CHECK(arena_.owner(record.page) == id);
  stats_.used_bytes -= chunk_bytes(record);
  arena_.release(record.page);
  tokens_.forget(id);
  records_.release(id);
}

RecordId Directory::leftmost_leaf(RecordId top) const noexcept {
  while (records_[top].first_child.valid()) {
    top = records_[top].first_child;
  }
  return top;
}

// Removes a chunk and all that follow it, leaves first. Returns how many READY chunks went.
uint64_t Directory::remove_subtree(RecordId top) noexcept {
  uint64_t removed = 0;
  for (RecordId id = leftmost_leaf(top);;) {
    const bool is_last = id == top;
    const RecordId parent = records_[id].parent;
    removed += records_[id].state == ChunkState::READY ? 1U : 0U;
    if (records_[id].holds == 0) {
      remove_idle(id);
    } else {
      make_zombie(id);
    }
    if (is_last) {
      return removed;
    }
    id = leftmost_leaf(parent);  // from here and not from the top: each chunk of the subtree is passed once down, once up
  }
}

// REQUIRES: nobody holds the chunk, and so none that follow it.
void Directory::evict_subtree(RecordId top, Eviction reason) noexcept {
  RecordId id = leftmost_leaf(top);
  while (id != top) {
    const RecordId parent = records_[id].parent;
    evict(id, reason);
    id = leftmost_leaf(parent);
  }
  evict(top, reason);
}

uint64_t Directory::remove_named(const ChunkKey& key) noexcept {
  const auto entry = table_.find(key);
  const bool is_here = entry && entry->record.valid() && has_bytes(records_[entry->record].state);
  return is_here ? remove_subtree(entry->record) : 0;
}

uint64_t Directory::drop(const ChunkKey& key) {
  departure_ = Cause::DROPPED;
  const uint64_t removed = remove_named(key);
  stats_.dropped_chunks += removed;
  return removed;
}

uint64_t Directory::discard(const ChunkKey& key) {
  departure_ = Cause::DISCARDED;
  const uint64_t removed = remove_named(key);
  stats_.flushed_chunks += removed;
  return removed;
}

// REQUIRES: nobody holds the chunk, and so none that follow it. Returns how many went.
uint64_t Directory::flush_subtree(RecordId top) noexcept {
  uint64_t removed = 1;
  for (RecordId id = leftmost_leaf(top); id != top; ++removed) {
    const RecordId parent = records_[id].parent;
    remove_idle(id);
    id = leftmost_leaf(parent);
  }
  remove_idle(top);
  return removed;
}

// What follows a chunk was used no later than it.
FlushResult Directory::flush(std::optional<NamespaceId> owner, uint64_t before_ns) {
  FlushResult result;
  departure_ = Cause::FLUSHED;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (is_listed(record) && record.last_access_ns < before_ns && (!owner || record.owner == *owner)) {
      const uint64_t bytes = chunk_bytes(record);
      const uint64_t removed = flush_subtree(RecordId(index));
      result.chunks += removed;
      result.bytes += removed * bytes;
    }
  }
  for (uint32_t index = 0; index < namespaces_.size(); ++index) {
    result.skipped += !owner || *owner == NamespaceId(index) ? namespaces_[index].held : 0;
  }
  stats_.flushed_chunks += result.chunks;
  return result;
}

RecordPage Directory::records(uint32_t cursor, uint32_t limit, uint32_t end) {
  RecordPage page;
  std::vector<RecordId> held;
  uint32_t index = cursor;
  const uint32_t stop = std::min(end, records_.end());
  for (; index < stop && page.records.size() < limit; ++index) {
    if (records_[RecordId(index)].state == ChunkState::READY) {
      page.records.push_back(RecordId(index));
      append_chain(RecordId(index), held);
    }
  }
  page.next = index < stop ? index : 0;
  if (!held.empty()) {
    page.hold = make_hold(std::move(held)).id;
  }
  return page;
}

}  // namespace kvpool
