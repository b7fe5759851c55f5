// Construction, removal and eviction order of the directory. See directory.h.
#include "directory/directory.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

// Unless the ledger is given another share: enough for the prompts that all requests share, too little to fill the tier.
constexpr double RETAINED_SHARE = 0.3;

}  // namespace

Directory::Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index,
                     const DirectoryGeometry& geometry, const uint8_t epoch[16], Tier tier, PolicyKind policy,
                     const HashSeed& seed, std::shared_ptr<const Mapping> records)
    : Directory(std::move(arena), std::move(index), geometry, epoch, tier, policy, seed, TableRegion{}, std::move(records)) {}

Directory::Directory(Directory& originals, const DirectoryGeometry& geometry, PolicyKind policy, const HashSeed& seed)
    : Directory(nullptr, nullptr, geometry, nullptr, Tier::HBM, policy, seed, TableRegion{&originals.table_.shared(), DEVICE_REGION},
                nullptr) {
  originals_ = std::make_unique<CopyLink>(originals, *this);
}

Directory::~Directory() { KVPOOL_CHECK(copies_ == nullptr); }

Directory::Directory(std::shared_ptr<const Mapping> arena, std::shared_ptr<const Mapping> index,
                     const DirectoryGeometry& geometry, const uint8_t epoch[16], Tier tier, PolicyKind policy,
                     const HashSeed& seed, TableRegion region, std::shared_ptr<const Mapping> records)
    : geometry_(geometry),
      tier_(tier),
      arena_mapping_(std::move(arena)),
      table_(std::move(index), geometry.index, epoch, tier, geometry.max_chunks, records_, arena_, region),
      records_(std::move(records), geometry.kept()),
      arena_(geometry.arena, records_.runs()),
      policy_(make_policy(policy, geometry.max_chunks, seed, records_.learned())),
      queues_(records_, *policy_),
      standings_(records_, arena_, queues_),
      demotion_(records_, arena_, queues_, *policy_, standings_, geometry.capacity),
      room_(records_, arena_, queues_, standings_, demotion_, stats_, geometry.capacity),
      retention_(*this, records_, arena_, geometry.capacity),
      holds_(records_),
      shares_(holds_, records_, arena_, geometry.capacity, geometry.max_chunks) {
  retention_.ledger().cap(RETAINED_SHARE);
  KVPOOL_CHECK(arena_mapping_ == nullptr || arena_mapping_->size() >= geometry_.arena.total_bytes());
  KVPOOL_CHECK(geometry_.index.regions.empty() || geometry_.index.regions[DRAM_REGION].bytes == geometry_.arena.total_bytes());
}

std::optional<ClassId> Directory::add_class(uint64_t chunk_bytes, uint32_t extents, bool has_place_below, ClassId instead) {
  if (chunk_bytes > geometry_.capacity) {
    return std::nullopt;
  }
  const uint32_t known = arena_.class_count();
  const auto added = arena_.add_class(chunk_bytes, extents, has_place_below, instead);
  if (arena_.class_count() > known) {
    queues_.add_class();
    demotion_.add_class();
  } else if (added && *added == instead) {
    demotion_.forget_class(instead);
  }
  return added;
}

NamespaceId Directory::add_namespace() {
  namespaces_.emplace_back();
  chunk_tokens_.push_back(0);
  return NamespaceId(static_cast<uint32_t>(namespaces_.size() - 1));
}

NamespaceCounts Directory::namespace_counts(NamespaceId owner) const noexcept {
  return owner.value() < namespaces_.size() ? namespaces_[owner.value()] : NamespaceCounts{};
}

DirectoryStats Directory::stats() const noexcept {
  DirectoryStats stats = stats_;
  stats.held = holds_.held();
  stats.holds = holds_.holds();
  stats.pins = holds_.pins();
  stats.reservations = holds_.reservations().size();
  stats.waiting_runs = waiting_.count();
  stats.withheld = withheld_.count();
  stats.withheld_bytes = withheld_.bytes();
  stats.token_id_bytes = tokens_.bytes();
  stats.token_ids_left_out = tokens_.left_out();
  stats.policy = policy_->counts();
  stats.retention = retention_.ledger().counts();
  return stats;
}

std::span<const int32_t> Directory::tokens_of(const ChunkKey& key, RecordId hint) const noexcept {
  const bool is_there = hint.valid() && hint.value() < records_.end() && records_[hint].key == key && records_[hint].has_bytes();
  const RecordId id = is_there ? hint : find_record(key);
  return id.valid() ? tokens_.of(id) : std::span<const int32_t>{};
}

const ChunkRecord* Directory::find_ready(const ChunkKey& key) const noexcept {
  const RecordId id = find_record(key);
  return id.valid() && records_[id].state == ChunkState::READY ? &records_[id] : nullptr;
}

std::optional<ChunkPlace> Directory::place_of(const ChunkKey& key) const noexcept {
  const ChunkRecord* ready = find_ready(key);
  return ready != nullptr ? std::optional(ChunkPlace{uint64_t{ready->page.value()} * PAGE_BYTES, ready->generation})
                          : std::nullopt;
}

// Nobody holds these chunks any more. They come to their queues from the last one to the first: a chain from its leaf on.
void Directory::make_idle(std::span<const RecordId> chain, uint64_t now_ns) noexcept {
  latest_ns_ = std::max(latest_ns_, now_ns);
  count_idle(chain, [this, used_ns = latest_ns_](ChunkRecord& record) {
    KVPOOL_CHECK(record.state == ChunkState::READY);
    KVPOOL_CHECK(record.holds == 0);
    record.last_access_ns = used_ns;
    record.standing = standings_.of(record);
  });
  queues_.add_all(chain);
}

// What of these chunks can be evicted now, or once their pins end. `prepare` is called with each before. REQUIRES: of one size class.
template <typename Prepare>
void Directory::count_idle(std::span<const RecordId> chain, Prepare prepare) noexcept {
  if (chain.empty()) {
    return;
  }
  const ClassId of = records_[chain.front()].size_class;
  TouchedRun run;
  uint64_t pinned = 0;
  for (const RecordId id : chain) {
    ChunkRecord& record = records_[id];
    prepare(record);
    if (record.pins == 0) {
      arena_.set_idle(record.page, record.last_access_ns, run);
    } else {
      ++pinned;
    }
  }
  const uint64_t bytes = arena_.size_class(of).chunk_bytes;
  shares_.unprotect(of, chain.size());
  stats_.idle_bytes += (chain.size() - pinned) * bytes;
  stats_.pinned += pinned;
  stats_.pinned_bytes += pinned * bytes;
}

void Directory::count_idle(RecordId id) noexcept {
  count_idle(std::span(&id, 1), [](const ChunkRecord&) {});
}

// Somebody holds these chunks, or they leave. REQUIRES: of one size class.
void Directory::make_busy(std::span<const RecordId> chain) noexcept {
  if (chain.empty()) {
    return;
  }
  queues_.remove_all(chain);
  const ClassId of = records_[chain.front()].size_class;
  TouchedRun run;
  uint64_t pinned = 0;
  for (const RecordId id : chain) {
    const ChunkRecord& record = records_[id];
    KVPOOL_CHECK(record.state == ChunkState::READY);
    if (record.pins == 0) {
      arena_.set_busy(record.page, run);
    } else {
      ++pinned;
    }
  }
  const uint64_t bytes = arena_.size_class(of).chunk_bytes;
  shares_.protect(of, chain.size());
  stats_.idle_bytes -= (chain.size() - pinned) * bytes;
  stats_.pinned -= pinned;
  stats_.pinned_bytes -= pinned * bytes;
}

// No lookup finds the chunk any more, and who is reading it sees that in the generation word.
void Directory::hide(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(!record.first_child.valid());
  if (record.state == ChunkState::READY) {
    if (copies_ != nullptr) {
      copies_->withdraw(record.key, departure_);
    }
    reports_.report(record, ChangeKind::LEFT, departure_);
    if (originals_ != nullptr) {
      originals_->end_copy(record.key);
    }
  }
  promotions_.leave_outside(record);
  waiting_.end_following(record);
  leave(record.key);
  retention_.forget_chunk(id);
  if (record.state == ChunkState::WRITING && table_.has_generation(record.page, record.generation)) {
    table_.end_landing(record.page);  // it was offered to others
  }
  table_.set_generation(record.page, 0);
  keep_order();  // a later life takes nothing of the record from now on
  records_.detach(id);
  if (record.state == ChunkState::READY) {
    NamespaceCounts& counts = namespaces_[record.owner.value()];
    --counts.chunks;
    counts.bytes -= chunk_bytes(record);
    counts.held -= record.holds > 0 ? 1U : 0U;
    --stats_.chunks;
    counted_ -= record.generation > counted_from_ ? 1U : 0U;
    stats_.unsaved_chunks -= record.is_below ? 0U : 1U;
    if (is_lower()) {
      tiers_->note(*this, record.key, false);
      departed_.push_back(record.key);
    }
  } else if (record.state == ChunkState::PROMOTING) {
    --stats_.promoting;
  } else {
    KVPOOL_CHECK(record.state == ChunkState::WRITING);
    --stats_.writing;
    --namespaces_[record.owner.value()].writing;
  }
}

void Directory::remove_idle(RecordId id) noexcept {
  KVPOOL_CHECK(records_[id].is_free());
  const RecordId parent = records_[id].parent;
  const uint64_t last_access_ns = records_[id].last_access_ns;
  make_busy(id);
  hide(id);
  free_slot(id);
  standings_.requeue_childless(parent, last_access_ns);
}

// What the removal or the publication of a chunk looks at, but for its record.
void Directory::prefetch_chunk(RecordId id) const noexcept {
  const ChunkRecord& record = records_[id];
  table_.prefetch(record.key);
  table_.prefetch_words(record.page);
  tokens_.prefetch(id);
}

// The next victims are mostly those that were used just after this one: they come into the cache while this one leaves.
void Directory::prefetch_victims_behind(RecordId id) const noexcept {
  const RecordId next = records_[id].newer;
  if (next.valid()) {
    prefetch_chunk(next);
    policy_->prefetch(records_[next].key);
    if (const RecordId behind = records_[next].newer; behind.valid()) {
      records_.prefetch_whole(behind);
    }
  }
}

void Directory::evict(RecordId leaf, Eviction reason) noexcept {
  prefetch_victims_behind(leaf);
  stats_.lifetimes.add(age_ns(records_[leaf], latest_ns_));
  ++stats_.evictions[static_cast<size_t>(reason)];
  count_departure(records_[leaf]);
  policy_->note_evicted(records_[leaf]);
  retention_.hand_down(records_[leaf]);
  departure_ = static_cast<Cause>(reason);
  remove_idle(leaf);
}

void Directory::make_zombie(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.holds > 0 || record.pins > 0);
  if (record.is_listed()) {
    queues_.remove(id);
  }
  stats_.aborted_chunks += record.state == ChunkState::WRITING ? 1U : 0U;
  hide(id);
  record.state = ChunkState::ZOMBIE;
  record.is_below = false;
  ++stats_.zombies;
  ++namespaces_[record.owner.value()].zombies;
  vacate(id);
  if (const auto run = waiting_.take_run(id)) {
    release(run->hold, latest_ns_);  // what followed it in the run went before it
  }
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
    if (records_[id].is_free()) {
      remove_idle(id);
    } else {
      make_zombie(id);
      standings_.requeue_childless(parent, 0);
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

uint64_t Directory::drop(const ChunkKey& key, uint64_t generation) {
  const RecordId id = find_record(key);
  if (!id.valid() || records_[id].generation != generation || records_[id].state != ChunkState::READY) {
    return 0;
  }
  departure_ = Cause::DROPPED;
  const uint64_t removed = remove_subtree(id);
  stats_.dropped_chunks += removed;
  return removed;
}

uint64_t Directory::discard(const ChunkKey& key) {
  const RecordId id = find_record(key);
  if (!id.valid() || !records_[id].has_bytes()) {
    return 0;
  }
  departure_ = Cause::DISCARDED;
  const uint64_t removed = remove_subtree(id);
  stats_.flushed_chunks += removed;
  return removed;
}

}  // namespace kvpool
