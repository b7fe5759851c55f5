// Copies: a directory of chunks that another one has too, in the memory of a device. See directory.h.
//
// The originals decide which chunks there are; the copies, which of them are near a device as well. What is evicted, flushed or found
// bad among the copies leaves the originals as they are. The other way round:
//   1. A chunk that is READY or being written here is READY among the originals, of the same namespace and size, behind the same chunk.
//      When it leaves those, for any cause, it leaves here first. A copy that is pinned stays in its slot, out of sight.
//   2. READY here is the same as `has_copy` there, as the bit of this tier in the shared entry, and as the entry's residency in it.
//   3. A use of the original is one of its copy. So copies have their order and their worth from the uses that the originals see.
//   4. A copy has the priority of its original, as far as the share of this tier that may be retained has room, and its own no duration:
//      it expires with the original.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

const char* Directory::why_no_copies(const Directory& originals, const DirectoryGeometry& geometry) noexcept {
  if (!originals.table_.is_shared() || originals.tier_ <= Tier::HBM) {
    return "copies are made of chunks of the tier whose index clients read";
  }
  if (originals.copies_ != nullptr) {
    return "there is a directory of copies already";
  }
  const std::vector<RegionShape>& regions = originals.geometry_.index.regions;
  if (regions.size() <= DEVICE_REGION || regions[DEVICE_REGION] != geometry.region(Tier::HBM, Backing::DEVICE)) {
    return "the index is not planned with a region for this device";
  }
  return nullptr;
}

Directory::Directory(Directory& originals, const DirectoryGeometry& geometry, PolicyKind policy, const HashSeed& seed)
    : Directory(nullptr, nullptr, geometry, nullptr, Tier::HBM, policy, seed, &originals) {
  KVPOOL_CHECK(why_no_copies(originals, geometry) == nullptr);
  originals.copies_ = this;
}

Directory::~Directory() {
  KVPOOL_CHECK(copies_ == nullptr);
  for (uint32_t index = 0; originals_ != nullptr && index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (record.state == ChunkState::READY) {
      originals_->note_copy(record.key, {});
      table_.set_generation(record.page, 0);
    }
  }
  if (originals_ != nullptr) {
    originals_->copies_ = nullptr;
  }
}

// Why no copy of a chunk can be made behind this parent.
std::optional<SaveState> Directory::why_not_copied(NamespaceId owner, ClassId size_class, RecordId parent,
                                                   const ChunkKey& key) const noexcept {
  const ChunkRecord* const original = originals_->find_ready(key);
  if (original == nullptr) {
    return SaveState::NO_PARENT;  // as of a promotion whose source has gone
  }
  const SizeClass& here = arena_.size_class(size_class);
  const SizeClass& there = originals_->arena_.size_class(original->size_class);
  if (original->owner != owner || there.chunk_bytes != here.chunk_bytes || there.extents != here.extents) {
    return SaveState::FOREIGN;
  }
  const bool is_behind = parent.valid() == original->parent.valid() &&
                         (!parent.valid() || originals_->records_[original->parent].key == records_[parent].key);
  return is_behind ? std::nullopt : std::optional(SaveState::NO_PARENT);
}

Residency Directory::residency_of(RecordId id) const noexcept {
  return {records_[id].generation, table_.slot_of(records_[id].page)};
}

// A copy has become READY, which nobody could find yet.
void Directory::begin_copy(RecordId id) noexcept {
  const ChunkRecord& record = records_[id];
  originals_->note_copy(record.key, residency_of(id));
  const ChunkRecord* const original = originals_->find_ready(record.key);
  if (original->priority != record.priority) {
    static_cast<void>(set_retention(id, {original->priority, 0}));
  }
}

// A chunk has a copy from now on; generation 0: no more. Whoever finds the copy's bit finds where it is.
void Directory::note_copy(const ChunkKey& key, Residency copy) noexcept {
  const auto entry = table_.find(key);
  KVPOOL_CHECK(entry && entry->record.valid());
  ChunkRecord& record = records_[entry->record];
  const bool is_there = copy.generation != 0;
  KVPOOL_CHECK(record.state == ChunkState::READY);
  KVPOOL_CHECK(record.has_copy != is_there);
  record.has_copy = is_there;
  const auto others = static_cast<uint8_t>(entry->tiers & ~copies_bit());
  table_.set_tiers(key, others);
  table_.shared().set_residency(key, copies_->tier_, copy);
  if (is_there) {
    table_.set_tiers(key, static_cast<uint8_t>(others | copies_bit()));
  }
}

// The original leaves, and what follows it has left.
void Directory::withdraw(const ChunkKey& key, Cause cause) noexcept {
  const RecordId id = find_record(key);
  if (id.valid()) {
    departure_ = cause;
    stats_.withdrawn_chunks += remove_subtree(id);
  }
}

// These originals, a part of one chain, have been used. Those with a copy come first.
void Directory::use_copies(const std::vector<RecordId>& of_originals, uint64_t now_ns) noexcept {
  std::vector<RecordId> copies;
  for (const RecordId id : of_originals) {
    const ChunkRecord& original = originals_->records_[id];
    if (!original.has_copy) {
      break;
    }
    copies.push_back(find_record(original.key));
  }
  if (copies.empty()) {
    return;
  }
  ChunkRecord& first = records_[copies.front()];
  first.is_cut = first.is_cut || first.parent.valid();
  note_reuse(copies, first.depth, now_ns);
  for (const RecordId id : copies) {
    add_hold(id);
  }
  end_holds(copies, now_ns);
}

void Directory::follow_retention(const ChunkKey& key, uint8_t priority) noexcept {
  const RecordId id = find_record(key);
  KVPOOL_CHECK(id.valid());
  if (records_[id].priority != priority) {
    static_cast<void>(set_retention_in_queue(id, {priority, 0}));
  }
}

// A copy's duration is its original's.
Retention Directory::retained_as(RecordId id) const noexcept {
  Retention retention = retention_.of(id);
  const auto original = originals_ == nullptr ? std::nullopt : originals_->retention(records_[id].key);
  if (original && original->priority == retention.priority) {
    retention.duration_ms = original->duration_ms;
  }
  return retention;
}

std::optional<Columns> Directory::copies(const std::vector<HoldId>& holds) const {
  const auto held = holds_.records_of(holds);
  if (!held) {
    return std::nullopt;
  }
  Columns columns{std::vector<uint64_t>(held->size()), std::vector<uint64_t>(held->size()),
                  std::vector<uint8_t>(held->size(), NO_LEVEL), std::vector<uint64_t>(held->size())};
  LastRun last;
  for (size_t index = 0; index < held->size(); ++index) {
    const ChunkRecord& original = records_[(*held)[index]];
    if (!original.has_copy) {
      continue;
    }
    const ChunkRecord& copy = copies_->records_[copies_->find_record(original.key)];
    columns.offsets[index] = uint64_t{copy.page.value()} * PAGE_BYTES;
    columns.generations[index] = copy.generation;
    columns.levels[index] = static_cast<uint8_t>(copies_->tier_);
    columns.slots[index] = copies_->table_.slot_of(copy.page, last).packed();
  }
  return columns;
}

// The originals against the records of their copies, without a look at what clients read.
void Directory::verify_copies(std::vector<std::string>& broken) const {
  uint64_t found = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    const bool may_have = copies_ != nullptr && record.state == ChunkState::READY;
    const RecordId id = may_have ? copies_->find_record(record.key) : RecordId();
    found += id.valid() ? 1U : 0U;
    if (record.has_copy != (id.valid() && copies_->records_[id].state == ChunkState::READY)) {
      broken.push_back(name_of(RecordId(index)) + " is wrong about its copy");
    }
    if (id.valid() && (copies_->records_[id].owner != record.owner || copies_->records_[id].depth != record.depth ||
                       copies_->chunk_bytes(copies_->records_[id]) != chunk_bytes(record))) {
      broken.push_back(name_of(RecordId(index)) + " has a copy of another chunk");
    }
  }
  const uint64_t copies = copies_ == nullptr ? 0 : copies_->records_.alive() - copies_->stats_.zombies;
  if (found != copies) {
    broken.push_back("copies of stored chunks: " + std::to_string(found) + ", of all: " + std::to_string(copies));
  }
}

// A record against what clients read of its copy, or of itself where it is one.
void Directory::verify_copy(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& record = records_[id];
  if (originals_ != nullptr && record.state != ChunkState::ZOMBIE) {
    const ChunkRecord* const original = originals_->find_ready(record.key);
    if (original == nullptr || original->owner != record.owner) {
      broken.push_back(name_of(id) + " is a copy of nothing");
    }
    const uint32_t extents = arena_.size_class(record.size_class).extents;
    if (record.state == ChunkState::READY && table_.words().landed(table_.slot_of(record.page)) != extents) {
      broken.push_back(name_of(id) + " is a copy in a slot without all extents");
    }
  }
  if (copies_ == nullptr || record.state == ChunkState::ZOMBIE) {
    return;
  }
  const auto entry = table_.find(record.key);
  const Residency none{};
  const Residency expected = record.has_copy ? copies_->residency_of(copies_->find_record(record.key)) : none;
  const bool is_shown = entry && (entry->tiers & copies_bit()) != 0;
  if (is_shown != record.has_copy || table_.shared().residency(record.key, copies_->tier_).value_or(none) != expected) {
    broken.push_back(name_of(id) + " has an entry that is wrong about its copy");
  }
}

}  // namespace kvpool
