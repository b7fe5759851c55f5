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

void append(std::vector<std::string>& broken, const std::vector<std::string>& more) {
  broken.insert(broken.end(), more.begin(), more.end());
}

}  // namespace

std::vector<std::string> Directory::verify(bool with_shared) const {
  std::vector<std::string> broken;
  if (with_shared || !table_.is_shared()) {
    append(broken, table_.verify());
  }
  append(broken, arena_.verify());
  verify_records(broken, with_shared);
  verify_queues(broken);
  verify_copies(broken);
  append(broken, retention_.verify());
  append(broken, holds_.verify());
  verify_sums(broken, with_shared);
  append(broken, shares_.verify());
  verify_namespaces(broken);
  return broken;
}

// First the records, each against its entry in the table, then the positions of the table, each against the record it names.
uint64_t Directory::verify_shared(uint64_t cursor, uint32_t limit, std::vector<std::string>& broken) const {
  if (cursor < TABLE_CURSOR) {
    const uint64_t end = std::min<uint64_t>(cursor + limit, records_.end());
    for (; cursor < end; ++cursor) {
      const RecordId id(static_cast<uint32_t>(cursor));
      if (records_[id].state != ChunkState::FREE) {
        verify_record(id, broken);
      }
    }
    return cursor < records_.end() ? cursor : table_.is_shared() ? TABLE_CURSOR : 0;
  }
  const uint64_t next = table_.shared().verify_part(cursor - TABLE_CURSOR, limit, broken, [this](const ChunkKey& key, RecordId id) {
    return id.valid() ? records_[id].key == key && records_[id].state != ChunkState::FREE : is_elsewhere(key);
  });
  return next == 0 ? 0 : TABLE_CURSOR + next;
}

void Directory::verify_records(std::vector<std::string>& broken, bool with_shared) const {
  uint32_t alive = 0;
  uint64_t counted = 0;
  uint64_t waiting = 0;
  size_t following = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    waiting += record.is_waiting() ? 1U : 0U;
    following += record.is_following ? 1U : 0U;
    counted += record.state == ChunkState::READY && record.generation > counted_from_ ? 1U : 0U;
    if (record.state != ChunkState::FREE) {
      ++alive;
      if (with_shared) {
        verify_record(RecordId(index), broken);
      }
      verify_tree(RecordId(index), broken);
    }
  }
  const uint64_t in_runs = std::accumulate(waiting_.begin(), waiting_.end(), uint64_t{0}, [this](uint64_t sum, const auto& run) {
    return sum + holds_.chain_of(run.second.hold).size();
  });
  if (following != following_) {
    broken.push_back("chunks behind others' that are written: " + std::to_string(following) + ", counted " + std::to_string(following_));
  }
  if (waiting != in_runs) {
    broken.push_back("chunks that wait for the one before them: " + std::to_string(waiting) + ", in runs " + std::to_string(in_runs));
  }
  if (counted != counted_) {
    broken.push_back("chunks since counting began: " + std::to_string(counted) + ", counted " + std::to_string(counted_));
  }
  if (promotions_.size() > stats_.promoting + stats_.zombies) {
    broken.push_back("promotions under way: " + std::to_string(promotions_.size()) + ", of fewer chunks");
  }
  if (alive != records_.alive()) {
    broken.push_back("records alive: " + std::to_string(alive) + ", counted " + std::to_string(records_.alive()));
  }
}

void Directory::verify_record(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& record = records_[id];
  const auto entry = table_.find(record.key);
  const bool is_found = entry && entry->record == id;
  const bool is_ready = record.state == ChunkState::READY;
  if (record.is_sampled != is_in_sample(record.key)) {
    broken.push_back(name_of(id) + " is wrong about the sample");
  }
  if (is_found != (record.state != ChunkState::ZOMBIE)) {
    broken.push_back(name_of(id) + (is_found ? " is a zombie in the table" : " is missing in the table"));
  } else if (is_found) {
    const SlotAddress slot = table_.is_shared() ? table_.slot_of(record.page) : SlotAddress();
    if (entry->generation != record.generation || entry->slot != slot) {
      broken.push_back(name_of(id) + " differs from its table entry");
    }
    if ((entry->tiers & tier_bit(tier_)) != (is_ready ? tier_bit(tier_) : 0)) {
      broken.push_back(name_of(id) + " has wrong tiers in the table");
    }
    const auto known = static_cast<uint8_t>(lower_bits_ | upper_bits_ | tier_bit(tier_) | copies_bit());
    if (!is_lower() && (entry->tiers & ~known) != outside_bit(record)) {
      broken.push_back(name_of(id) + " is wrong about a tier outside");
    }
  }
  const bool is_below = lower_bits_ != 0 && record.state != ChunkState::ZOMBIE && (tiers_->tiers_of(record.key) & lower_bits_) != 0;
  if (record.is_below != is_below) {
    broken.push_back(name_of(id) + " is wrong about its copy below");
  }
  const bool is_followed = record.state == ChunkState::WRITING && table_.has_generation(record.page, record.generation);
  if (record.has_slot() && !is_followed &&
      !table_.has_generation(record.page, record.has_bytes() ? record.generation : 0)) {
    broken.push_back(name_of(id) + " has a wrong generation word");
  }
  if (record.state == ChunkState::PROMOTING && !promotions_.contains(record.generation)) {
    broken.push_back(name_of(id) + " comes from no tier");
  }
  if (record.generation == 0 || record.generation > last_generation_) {
    broken.push_back(name_of(id) + " has a generation that was never given");
  }
  verify_slot(id, broken);
  verify_copy(id, broken);
}

void Directory::verify_tree(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& record = records_[id];
  if (record.state == ChunkState::ZOMBIE && (record.parent.valid() || record.first_child.valid())) {
    broken.push_back(name_of(id) + " is a zombie with relatives");
  }
  RecordId previous;
  for (RecordId child = record.first_child; child.valid(); child = records_[child].next_sibling) {
    if (records_[child].parent != id || records_[child].previous_sibling != previous) {
      broken.push_back(name_of(id) + " has a child that does not name it");
      return;
    }
    previous = child;
  }
  if (record.is_waiting() && !record.parent.valid()) {
    broken.push_back(name_of(id) + " waits for nothing");
  }
  if (!record.parent.valid()) {
    if (record.depth != 0 && record.state != ChunkState::ZOMBIE) {
      broken.push_back(name_of(id) + " is a root and deep in a chain");
    }
    return;
  }
  const ChunkRecord& parent = records_[record.parent];
  if (parent.owner != record.owner || parent.size_class != record.size_class || parent.depth + 1 != record.depth) {
    broken.push_back(name_of(id) + " differs from its parent in namespace, size class or by more than one in depth");
  }
  const bool both_writing = parent.state == ChunkState::WRITING && record.state == ChunkState::WRITING;
  if (!parent.has_bytes() && !both_writing) {
    broken.push_back(name_of(id) + " has a parent that is not stored");
  }
  if (record.is_waiting() && !both_writing) {
    broken.push_back(name_of(id) + " waits for a parent that is there");
  }
}

void Directory::verify_queues(std::vector<std::string>& broken) const {
  std::vector<uint8_t> found(records_.end());
  append(broken, queues_.verify(found));
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    const bool is_aside = record.is_aside && record.first_child.valid();
    if (found[index] != (record.is_listed() && !is_aside ? 1 : 0)) {
      broken.push_back(name_of(RecordId(index)) + " stands in " + std::to_string(found[index]) + " queues");
    }
    if (found[index] != 0 && record.pins == 0 && record.standing != standings_.of(record)) {
      broken.push_back(name_of(RecordId(index)) + " stands in the wrong list of its queue");
    }
    if (record.is_listed() && record.parent.valid() && records_[record.parent].is_listed() &&
        records_[record.parent].last_access_ns < record.last_access_ns && !record.is_cut) {
      broken.push_back(name_of(RecordId(index)) + " was used later than its parent");
    }
  }
}

void Directory::verify_namespaces(std::vector<std::string>& broken) const {
  std::vector<NamespaceCounts> counts(namespaces_.size());
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (record.state == ChunkState::WRITING) {
      ++counts[record.owner.value()].writing;
    } else if (record.state == ChunkState::ZOMBIE) {
      ++counts[record.owner.value()].zombies;
    }
  }
  for (uint32_t index = 0; index < namespaces_.size(); ++index) {
    if (counts[index].writing != namespaces_[index].writing || counts[index].zombies != namespaces_[index].zombies) {
      broken.push_back("namespace " + std::to_string(index) + " miscounts what is being written, or its zombies");
    }
  }
}

void Directory::verify_sums(std::vector<std::string>& broken, bool with_shared) const {
  DirectoryStats sums;
  uint64_t written = 0;
  std::vector<NamespaceCounts> counts(namespaces_.size());
  std::vector<uint64_t> used(arena_.class_count());
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    if (record.state == ChunkState::FREE) {
      continue;
    }
    const uint64_t bytes = record.has_slot() ? chunk_bytes(record) : 0;
    used[record.size_class.value()] += record.has_slot() ? 1U : 0U;
    sums.used_bytes += bytes;
    written += record.was_below ? bytes : 0;
    sums.pinned += record.holds == 0 && record.pins > 0 ? 1U : 0U;
    sums.pinned_bytes += record.holds == 0 && record.pins > 0 ? bytes : 0;
    sums.writing += record.state == ChunkState::WRITING ? 1U : 0U;
    sums.promoting += record.state == ChunkState::PROMOTING ? 1U : 0U;
    sums.zombies += record.state == ChunkState::ZOMBIE ? 1U : 0U;
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
  const auto expect = [&broken](const char* what, uint64_t truth, uint64_t count) { compare(what, truth, count, broken); };
  expect("chunks", sums.chunks, stats_.chunks);
  expect("chunks without a copy below", sums.unsaved_chunks, stats_.unsaved_chunks);
  expect("writing", sums.writing, stats_.writing);
  expect("promoting", sums.promoting, stats_.promoting);
  expect("zombies", sums.zombies, stats_.zombies);
  expect("used bytes", sums.used_bytes, stats_.used_bytes);
  expect("bytes written below since their use", written, standings_.written_bytes());
  expect("pinned", sums.pinned, stats_.pinned);
  expect("pinned bytes", sums.pinned_bytes, stats_.pinned_bytes);
  expect("idle bytes", sums.idle_bytes, stats_.idle_bytes);
  if (with_shared || !table_.is_shared()) {
    expect("table entries", sums.chunks + sums.writing + sums.promoting + table_.count_placeless(), table_.count());
    for (const Directory* lower : is_lower() ? std::span<Directory* const>() : lower_tiers()) {
      expect("entries of a lower tier", lower->stats_.chunks, table_.count_in(tier_bit(lower->tier_)));
    }
    if (copies_ != nullptr) {
      expect("entries with a copy", copies_->stats_.chunks, table_.count_in(copies_bit()));
      expect("slots of copies with a generation", copies_->stats_.chunks, copies_->table_.count_published());
    }
  }
  expect("evictions", stats_.evictions[0] + stats_.evictions[1] + stats_.evictions[2],
         stats_.evicted_chunks + stats_.shed_chunks);
  expect("chunks declined below", lower_bits_ == 0 ? 0 : stats_.evicted_chunks,
         std::accumulate(stats_.declined.begin(), stats_.declined.end(), uint64_t{0}));
  expect("stored chunks",
         sums.chunks + stats_.evicted_chunks + stats_.shed_chunks + stats_.flushed_chunks + stats_.dropped_chunks + stats_.withdrawn_chunks,
         stats_.stored_chunks + stats_.promoted_chunks);
  for (uint32_t index = 0; index < namespaces_.size(); ++index) {
    expect("chunks of a namespace", counts[index].chunks, namespaces_[index].chunks);
    expect("bytes of a namespace", counts[index].bytes, namespaces_[index].bytes);
    expect("held chunks of a namespace", counts[index].held, namespaces_[index].held);
  }
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    expect("slots of a class", used[index], arena_.used_slots(ClassId(index)));
  }
  expect("used bytes beyond the capacity", 0, stats_.used_bytes - std::min(stats_.used_bytes, geometry_.capacity));
}

}  // namespace kvpool
