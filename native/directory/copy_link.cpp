#include "directory/copy_link.h"

#include <string>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

const char* CopyLink::why_refused(const Directory& originals, const DirectoryGeometry& geometry) noexcept {
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

CopyLink::CopyLink(Directory& originals, Directory& copies) noexcept : originals_(originals), copies_(copies) {
  KVPOOL_CHECK(why_refused(originals, copies.geometry_) == nullptr);
  originals.copies_ = this;
}

CopyLink::~CopyLink() {
  for (uint32_t index = 0; index < copies_.records_.end(); ++index) {
    const ChunkRecord& copy = copies_.records_[RecordId(index)];
    if (copy.state == ChunkState::READY) {
      end_copy(copy.key);
      copies_.table_.set_generation(copy.page, 0);
    }
  }
  originals_.copies_ = nullptr;
}

std::optional<SaveState> CopyLink::why_not_copied(NamespaceId owner, ClassId size_class, RecordId parent,
                                                  const ChunkKey& key) const noexcept {
  const ChunkRecord* const original = originals_.find_ready(key);
  if (original == nullptr) {
    return SaveState::NO_PARENT;  // as of a promotion whose source has gone
  }
  const SizeClass& here = copies_.arena_.size_class(size_class);
  const SizeClass& there = originals_.arena_.size_class(original->size_class);
  if (original->owner != owner || there.chunk_bytes != here.chunk_bytes || there.extents != here.extents) {
    return SaveState::FOREIGN;
  }
  const bool is_behind = parent.valid() == original->parent.valid() &&
                         (!parent.valid() || originals_.records_[original->parent].key == copies_.records_[parent].key);
  return is_behind ? std::nullopt : std::optional(SaveState::NO_PARENT);
}

bool CopyLink::is_copied_from(const ChunkKey& key, Tier from, uint64_t generation) const noexcept {
  const ChunkRecord* const original = from == originals_.tier_ ? originals_.find_ready(key) : nullptr;
  return original != nullptr && (generation == 0 || original->generation == generation);
}

void CopyLink::begin_copy(RecordId id) noexcept {
  const ChunkRecord& copy = copies_.records_[id];
  note_copy(copy.key, residency_of(id));
  const ChunkRecord* const original = originals_.find_ready(copy.key);
  if (original->priority != copy.priority) {
    static_cast<void>(copies_.retention_.set_retention(id, {original->priority, 0}));
  }
}

// A chunk has a copy from now on; generation 0: no more. Whoever finds the copy's bit finds where it is.
void CopyLink::note_copy(const ChunkKey& key, Residency copy) noexcept {
  const auto entry = originals_.table_.find(key);
  KVPOOL_CHECK(entry && entry->record.valid());
  ChunkRecord& original = originals_.records_[entry->record];
  const bool is_there = copy.generation != 0;
  KVPOOL_CHECK(original.state == ChunkState::READY);
  KVPOOL_CHECK(original.has_copy != is_there);
  original.has_copy = is_there;
  const auto others = static_cast<uint8_t>(entry->tiers & ~bit());
  originals_.table_.set_tiers(key, others);
  originals_.table_.shared().set_residency(key, copies_.tier_, copy);
  if (is_there) {
    originals_.table_.set_tiers(key, static_cast<uint8_t>(others | bit()));
  }
}

uint8_t CopyLink::bit() const noexcept { return tier_bit(copies_.tier_); }

Residency CopyLink::residency_of(RecordId copy) const noexcept {
  return {copies_.records_[copy].generation, copies_.table_.slot_of(copies_.records_[copy].page)};
}

void CopyLink::withdraw(const ChunkKey& key, Cause cause) noexcept {
  const RecordId copy = copies_.find_record(key);
  if (copy.valid()) {
    copies_.departure_ = cause;
    copies_.stats_.withdrawn_chunks += copies_.remove_subtree(copy);
  }
}

// Those with a copy come first.
void CopyLink::use_copies(std::span<const RecordId> originals, uint64_t now_ns) noexcept {
  std::vector<RecordId> used;
  for (const RecordId id : originals) {
    const ChunkRecord& original = originals_.records_[id];
    if (!original.has_copy) {
      break;
    }
    used.push_back(copies_.find_record(original.key));
  }
  if (used.empty()) {
    return;
  }
  ChunkRecord& first = copies_.records_[used.front()];
  first.is_cut = first.is_cut || first.parent.valid();
  copies_.note_reuse(used, first.depth, now_ns);
  copies_.add_holds(used);
  copies_.end_holds(used, now_ns);
}

void CopyLink::follow_retention(const ChunkKey& key, uint8_t priority) noexcept {
  const RecordId copy = copies_.find_record(key);
  KVPOOL_CHECK(copy.valid());
  if (copies_.records_[copy].priority != priority) {
    static_cast<void>(copies_.retention_.set_retention_in_queue(copy, {priority, 0}));
  }
}

void CopyLink::locate(const std::vector<RecordId>& originals, Columns& columns) const {
  LastRun last;
  for (size_t index = 0; index < originals.size(); ++index) {
    const ChunkRecord& original = originals_.records_[originals[index]];
    if (!original.has_copy) {
      continue;
    }
    const ChunkRecord& copy = copies_.records_[copies_.find_record(original.key)];
    columns.offsets[index] = uint64_t{copy.page.value()} * PAGE_BYTES;
    columns.generations[index] = copy.generation;
    columns.levels[index] = static_cast<uint8_t>(copies_.tier_);
    columns.slots[index] = copies_.table_.slot_of(copy.page, last).packed();
  }
}

void CopyLink::verify(std::vector<std::string>& broken) const {
  uint64_t found = 0;
  for (uint32_t index = 0; index < originals_.records_.end(); ++index) {
    const ChunkRecord& original = originals_.records_[RecordId(index)];
    const RecordId id = original.state == ChunkState::READY ? copies_.find_record(original.key) : RecordId();
    const ChunkRecord* const copy = id.valid() ? &copies_.records_[id] : nullptr;
    found += copy != nullptr ? 1U : 0U;
    if (original.has_copy != (copy != nullptr && copy->state == ChunkState::READY)) {
      broken.push_back(name_of(RecordId(index)) + " is wrong about its copy");
    }
    if (copy != nullptr && (copy->owner != original.owner || copy->depth != original.depth ||
                            copies_.chunk_bytes(*copy) != originals_.chunk_bytes(original))) {
      broken.push_back(name_of(RecordId(index)) + " has a copy of another chunk");
    }
  }
  const uint64_t all = copies_.records_.alive() - copies_.stats_.zombies;
  if (found != all) {
    broken.push_back("copies of stored chunks: " + std::to_string(found) + ", of all: " + std::to_string(all));
  }
}

void CopyLink::verify_counts(std::vector<std::string>& broken) const {
  const uint64_t entries = originals_.table_.count_in(bit());
  const uint64_t published = copies_.table_.count_published();
  if (entries != copies_.stats_.chunks || published != copies_.stats_.chunks) {
    broken.push_back("copies: " + std::to_string(copies_.stats_.chunks) + ", entries with one " + std::to_string(entries) +
                     ", slots of copies with a generation " + std::to_string(published));
  }
}

void CopyLink::verify_copy(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& copy = copies_.records_[id];
  const ChunkRecord* const original = originals_.find_ready(copy.key);
  if (original == nullptr || original->owner != copy.owner) {
    broken.push_back(name_of(id) + " is a copy of nothing");
  }
  const uint32_t extents = copies_.arena_.size_class(copy.size_class).extents;
  if (copy.state == ChunkState::READY && copies_.table_.words().landed(copies_.table_.slot_of(copy.page)) != extents) {
    broken.push_back(name_of(id) + " is a copy in a slot without all extents");
  }
}

void CopyLink::verify_original(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& original = originals_.records_[id];
  const auto entry = originals_.table_.find(original.key);
  const Residency none{};
  const Residency expected = original.has_copy ? residency_of(copies_.find_record(original.key)) : none;
  const bool is_shown = entry && (entry->tiers & bit()) != 0;
  if (is_shown != original.has_copy || originals_.table_.shared().residency(original.key, copies_.tier_).value_or(none) != expected) {
    broken.push_back(name_of(id) + " has an entry that is wrong about its copy");
  }
}

}  // namespace kvpool
