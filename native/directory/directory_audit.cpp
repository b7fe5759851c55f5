// The directory recounted from its records, holds, table and arena. See the invariants in directory.h.
#include <algorithm>
#include <numeric>

#include "directory/directory.h"
#include "hash/sampling.h"

namespace kvpool {
namespace {

// Cursors of `verify_shared` from here on are positions in the table.
constexpr uint64_t TABLE_CURSOR = uint64_t{1} << 32;

void compare(const char* what, uint64_t truth, uint64_t count, std::vector<std::string>& broken) {
  if (truth != count) {
    broken.push_back(std::string(what) + ": " + std::to_string(truth) + ", counted " + std::to_string(count));
  }
}

bool is_withheld(const ChunkRecord& record) noexcept {
  return record.state == ChunkState::ZOMBIE && record.has_writer && record.holds == 0 && record.pins == 0;
}

void append(std::vector<std::string>& broken, const std::vector<std::string>& more) {
  broken.insert(broken.end(), more.begin(), more.end());
}

}  // namespace

// Recounts a directory, of which it reads everything. One line per broken invariant.
class DirectoryAudit {
 public:
  DirectoryAudit(const Directory& directory, std::vector<std::string>& broken) : of_(directory), broken_(broken) {}

  void verify_records(bool with_shared) const;
  void verify_record(RecordId id) const;
  void verify_queues() const;
  void verify_namespaces() const;
  void verify_sums(bool with_shared) const;

 private:
  void verify_tree(RecordId id) const;
  void verify_slot(RecordId id) const;

  const Directory& of_;
  std::vector<std::string>& broken_;
};

std::vector<std::string> Directory::verify(bool with_shared) const {
  std::vector<std::string> broken;
  if (with_shared || !table_.is_shared()) {
    append(broken, table_.verify());
  }
  append(broken, arena_.verify());
  const DirectoryAudit audit(*this, broken);
  audit.verify_records(with_shared);
  audit.verify_queues();
  if (copies_ != nullptr) {
    copies_->verify(broken);
  }
  append(broken, retention_.ledger().verify());
  append(broken, holds_.verify());
  append(broken, waiting_.verify(records_, holds_));
  audit.verify_sums(with_shared);
  append(broken, shares_.verify());
  audit.verify_namespaces();
  return broken;
}

// First the records, each against its entry in the table, then the positions of the table, each against the record it names.
uint64_t Directory::verify_shared(uint64_t cursor, uint32_t limit, std::vector<std::string>& broken) const {
  if (cursor < TABLE_CURSOR) {
    const uint64_t end = std::min<uint64_t>(cursor + limit, records_.end());
    for (; cursor < end; ++cursor) {
      const RecordId id(static_cast<uint32_t>(cursor));
      if (records_[id].state != ChunkState::FREE) {
        DirectoryAudit(*this, broken).verify_record(id);
      }
    }
    return cursor < records_.end() ? cursor : table_.is_shared() ? TABLE_CURSOR : 0;
  }
  const uint64_t next = table_.shared().verify_part(cursor - TABLE_CURSOR, limit, broken, [this](const ChunkKey& key, RecordId id) {
    return id.valid() ? records_[id].key == key && records_[id].state != ChunkState::FREE : is_elsewhere(key);
  });
  return next == 0 ? 0 : TABLE_CURSOR + next;
}

void DirectoryAudit::verify_records(bool with_shared) const {
  uint32_t alive = 0;
  uint64_t counted = 0;
  for (uint32_t index = 0; index < of_.records_.end(); ++index) {
    const ChunkRecord& record = of_.records_[RecordId(index)];
    counted += record.state == ChunkState::READY && record.generation > of_.counted_from_ ? 1U : 0U;
    if (record.state != ChunkState::FREE) {
      ++alive;
      if (with_shared) {
        verify_record(RecordId(index));
      }
      verify_tree(RecordId(index));
    }
  }
  if (counted != of_.counted_) {
    broken_.push_back("chunks since counting began: " + std::to_string(counted) + ", counted " + std::to_string(of_.counted_));
  }
  if (of_.promotions_.count() > of_.stats_.promoting + of_.stats_.zombies) {
    broken_.push_back("promotions under way: " + std::to_string(of_.promotions_.count()) + ", of fewer chunks");
  }
  if (alive != of_.records_.alive()) {
    broken_.push_back("records alive: " + std::to_string(alive) + ", counted " + std::to_string(of_.records_.alive()));
  }
}

void DirectoryAudit::verify_record(RecordId id) const {
  const ChunkRecord& record = of_.records_[id];
  const auto entry = of_.table_.find(record.key);
  const bool is_found = entry && entry->record == id;
  const bool is_ready = record.state == ChunkState::READY;
  if (record.is_sampled != is_in_sample(record.key)) {
    broken_.push_back(name_of(id) + " is wrong about the sample");
  }
  if (is_found != (record.state != ChunkState::ZOMBIE)) {
    broken_.push_back(name_of(id) + (is_found ? " is a zombie in the table" : " is missing in the table"));
  } else if (is_found) {
    const SlotAddress slot = of_.table_.is_shared() ? of_.table_.slot_of(record.page) : SlotAddress();
    if (entry->generation != record.generation || entry->slot != slot) {
      broken_.push_back(name_of(id) + " differs from its table entry");
    }
    if ((entry->tiers & tier_bit(of_.tier_)) != (is_ready ? tier_bit(of_.tier_) : 0)) {
      broken_.push_back(name_of(id) + " has wrong tiers in the table");
    }
    const auto known = static_cast<uint8_t>(of_.lower_bits_ | of_.upper_bits_ | tier_bit(of_.tier_) | of_.copies_bit());
    if (!of_.is_lower() && (entry->tiers & ~known) != of_.promotions_.outside_bit(record)) {
      broken_.push_back(name_of(id) + " is wrong about a tier outside");
    }
  }
  const bool is_below = record.state != ChunkState::ZOMBIE && of_.uppermost_below(record.key).has_value();
  if (record.is_below != is_below) {
    broken_.push_back(name_of(id) + " is wrong about its copy below");
  }
  const bool is_followed = record.state == ChunkState::WRITING && of_.table_.has_generation(record.page, record.generation);
  if (record.has_slot() && !is_followed &&
      !of_.table_.has_generation(record.page, record.has_bytes() ? record.generation : 0)) {
    broken_.push_back(name_of(id) + " has a wrong generation word");
  }
  if (record.state == ChunkState::PROMOTING && !of_.promotions_.is_under_way(record.generation)) {
    broken_.push_back(name_of(id) + " comes from no tier");
  }
  if (record.generation == 0 || record.generation > of_.last_generation_) {
    broken_.push_back(name_of(id) + " has a generation that was never given");
  }
  const bool is_kept = !of_.records_.are_kept() || !is_ready || (of_.records_.is_sealed(id) && of_.arena_.is_kept(record.page));
  if (!is_kept) {
    broken_.push_back(name_of(id) + " would not be known to a later life");
  }
  verify_slot(id);
  if (of_.originals_ != nullptr && record.state != ChunkState::ZOMBIE) {
    of_.originals_->verify_copy(id, broken_);
  }
  if (of_.copies_ != nullptr && record.state != ChunkState::ZOMBIE) {
    of_.copies_->verify_original(id, broken_);
  }
  if (of_.copies_ == nullptr && record.has_copy) {
    broken_.push_back(name_of(id) + " has a copy nowhere");
  }
}

void DirectoryAudit::verify_tree(RecordId id) const {
  const ChunkRecord& record = of_.records_[id];
  if (record.state == ChunkState::ZOMBIE && (record.parent.valid() || record.first_child.valid())) {
    broken_.push_back(name_of(id) + " is a zombie with relatives");
  }
  RecordId previous;
  for (RecordId child = record.first_child; child.valid(); child = of_.records_[child].next_sibling) {
    if (of_.records_[child].parent != id || of_.records_[child].previous_sibling != previous) {
      broken_.push_back(name_of(id) + " has a child that does not name it");
      return;
    }
    previous = child;
  }
  if (record.is_waiting() && !record.parent.valid()) {
    broken_.push_back(name_of(id) + " waits for nothing");
  }
  if (!record.parent.valid()) {
    if (record.depth != 0 && record.state != ChunkState::ZOMBIE) {
      broken_.push_back(name_of(id) + " is a root and deep in a chain");
    }
    return;
  }
  const ChunkRecord& parent = of_.records_[record.parent];
  if (parent.owner != record.owner || parent.size_class != record.size_class || parent.depth + 1 != record.depth) {
    broken_.push_back(name_of(id) + " differs from its parent in namespace, size class or by more than one in depth");
  }
  const bool both_writing = parent.state == ChunkState::WRITING && record.state == ChunkState::WRITING;
  if (!parent.has_bytes() && !both_writing) {
    broken_.push_back(name_of(id) + " has a parent that is not stored");
  }
  if (record.is_waiting() && !both_writing) {
    broken_.push_back(name_of(id) + " waits for a parent that is there");
  }
}

void DirectoryAudit::verify_queues() const {
  std::vector<uint8_t> found(of_.records_.end());
  append(broken_, of_.queues_.verify(found));
  for (uint32_t index = 0; index < of_.records_.end(); ++index) {
    const ChunkRecord& record = of_.records_[RecordId(index)];
    const bool is_aside = record.is_aside && record.first_child.valid();
    if (found[index] != (record.is_listed() && !is_aside ? 1 : 0)) {
      broken_.push_back(name_of(RecordId(index)) + " stands in " + std::to_string(found[index]) + " queues");
    }
    if (found[index] != 0 && record.pins == 0 && record.standing != of_.standings_.of(record)) {
      broken_.push_back(name_of(RecordId(index)) + " stands in the wrong list of its queue");
    }
    if (record.is_listed() && record.parent.valid() && of_.records_[record.parent].is_listed() &&
        of_.records_[record.parent].last_access_ns < record.last_access_ns && !record.is_cut) {
      broken_.push_back(name_of(RecordId(index)) + " was used later than its parent");
    }
  }
}

void DirectoryAudit::verify_namespaces() const {
  std::vector<NamespaceCounts> counts(of_.namespaces_.size());
  for (uint32_t index = 0; index < of_.records_.end(); ++index) {
    const ChunkRecord& record = of_.records_[RecordId(index)];
    if (record.state == ChunkState::WRITING) {
      ++counts[record.owner.value()].writing;
    } else if (record.state == ChunkState::ZOMBIE) {
      ++counts[record.owner.value()].zombies;
    }
  }
  for (uint32_t index = 0; index < of_.namespaces_.size(); ++index) {
    if (counts[index].writing != of_.namespaces_[index].writing || counts[index].zombies != of_.namespaces_[index].zombies) {
      broken_.push_back("namespace " + std::to_string(index) + " miscounts what is being written, or its zombies");
    }
  }
}

void DirectoryAudit::verify_sums(bool with_shared) const {
  const DirectoryStats& counted = of_.stats_;
  DirectoryStats sums;
  uint64_t written = 0;
  std::vector<NamespaceCounts> counts(of_.namespaces_.size());
  std::vector<uint64_t> used(of_.arena_.class_count());
  for (uint32_t index = 0; index < of_.records_.end(); ++index) {
    const ChunkRecord& record = of_.records_[RecordId(index)];
    if (record.state == ChunkState::FREE) {
      continue;
    }
    const uint64_t bytes = record.has_slot() ? of_.chunk_bytes(record) : 0;
    used[record.size_class.value()] += record.has_slot() ? 1U : 0U;
    sums.used_bytes += bytes;
    written += record.was_below ? bytes : 0;
    sums.pinned += record.holds == 0 && record.pins > 0 ? 1U : 0U;
    sums.pinned_bytes += record.holds == 0 && record.pins > 0 ? bytes : 0;
    sums.writing += record.state == ChunkState::WRITING ? 1U : 0U;
    sums.promoting += record.state == ChunkState::PROMOTING ? 1U : 0U;
    sums.zombies += record.state == ChunkState::ZOMBIE ? 1U : 0U;
    sums.withheld += is_withheld(record) ? 1U : 0U;
    sums.withheld_bytes += is_withheld(record) ? bytes : 0;
    if (record.state == ChunkState::READY) {
      ++sums.chunks;
      sums.unsaved_chunks += record.is_below ? 0U : 1U;
      sums.idle_bytes += record.is_free() ? bytes : 0;
      NamespaceCounts& owner = counts[record.owner.value()];
      ++owner.chunks;
      owner.bytes += bytes;
      owner.held += record.holds > 0 ? 1U : 0U;
    }
  }
  const auto expect = [this](const char* what, uint64_t truth, uint64_t count) { compare(what, truth, count, broken_); };
  expect("chunks", sums.chunks, counted.chunks);
  expect("chunks without a copy below", sums.unsaved_chunks, counted.unsaved_chunks);
  expect("writing", sums.writing, counted.writing);
  expect("promoting", sums.promoting, counted.promoting);
  expect("zombies", sums.zombies, counted.zombies);
  expect("withheld", sums.withheld, of_.withheld_.count());
  expect("withheld bytes", sums.withheld_bytes, of_.withheld_.bytes());
  for (const auto& [holder, share] : of_.withheld_.by_holder()) {
    expect("withheld of a holder", static_cast<uint64_t>(std::ranges::count_if(share.records, [this](RecordId id) {
             return is_withheld(of_.records_[id]);
           })), share.records.size());
  }
  expect("used bytes", sums.used_bytes, counted.used_bytes);
  expect("bytes written below since their use", written, of_.standings_.written_bytes());
  expect("pinned", sums.pinned, counted.pinned);
  expect("pinned bytes", sums.pinned_bytes, counted.pinned_bytes);
  expect("idle bytes", sums.idle_bytes, counted.idle_bytes);
  if (with_shared || !of_.table_.is_shared()) {
    expect("table entries", sums.chunks + sums.writing + sums.promoting + of_.table_.count_placeless(), of_.table_.count());
    for (const Directory* lower : of_.is_lower() ? std::span<Directory* const>() : of_.lower_tiers()) {
      expect("entries of a lower tier", lower->stats_.chunks, of_.table_.count_in(tier_bit(lower->tier_)));
    }
    if (of_.copies_ != nullptr) {
      of_.copies_->verify_counts(broken_);
    }
  }
  expect("evictions", counted.evictions[0] + counted.evictions[1] + counted.evictions[2],
         counted.evicted_chunks + counted.shed_chunks);
  expect("chunks declined below", of_.lower_bits_ == 0 ? 0 : counted.evicted_chunks,
         std::accumulate(counted.declined.begin(), counted.declined.end(), uint64_t{0}));
  expect("stored chunks",
         sums.chunks + counted.evicted_chunks + counted.shed_chunks + counted.flushed_chunks + counted.dropped_chunks + counted.withdrawn_chunks,
         counted.stored_chunks + counted.promoted_chunks);
  for (uint32_t index = 0; index < of_.namespaces_.size(); ++index) {
    expect("chunks of a namespace", counts[index].chunks, of_.namespaces_[index].chunks);
    expect("bytes of a namespace", counts[index].bytes, of_.namespaces_[index].bytes);
    expect("held chunks of a namespace", counts[index].held, of_.namespaces_[index].held);
  }
  for (uint32_t index = 0; index < of_.arena_.class_count(); ++index) {
    expect("slots of a class", used[index], of_.arena_.used_slots(ClassId(index)));
  }
  expect("used bytes beyond the capacity", 0, counted.used_bytes - std::min(counted.used_bytes, of_.geometry_.capacity));
}

void DirectoryAudit::verify_slot(RecordId id) const {
  const ChunkRecord& record = of_.records_[id];
  const std::string name = "chunk record " + std::to_string(id.value());
  const bool is_zombie = record.state == ChunkState::ZOMBIE;
  if (record.has_slot() ? of_.arena_.owner(record.page) != id : !is_zombie || record.has_io()) {
    broken_.push_back(name + " does not own its slot");
  }
  const bool is_written = (record.state == ChunkState::WRITING && !record.is_waiting()) || record.state == ChunkState::PROMOTING;
  if (is_written ? !record.has_writer : record.has_writer && !is_zombie) {
    broken_.push_back(name + " is wrong about its writer");
  }
  if (is_zombie && record.has_slot() && record.holds > 0 && !record.has_io() && of_.table_.has_words()) {
    broken_.push_back(name + " has a slot that nobody uses");
  }
  if (record.state != ChunkState::READY && record.holds == 0 && record.pins == 0 && !is_withheld(record)) {
    broken_.push_back(name + " is neither stored nor held");
  }
}

}  // namespace kvpool
