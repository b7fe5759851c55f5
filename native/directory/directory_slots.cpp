// Slots of removed chunks: they are free again when no hardware, client or peer reads or writes them. See directory.h.
#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

// Nobody holds it any more.
void Directory::let_zombie_go(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (record.pins > 0) {
    ++stats_.pinned;
    stats_.pinned_bytes += chunk_bytes(record);
    shares_.unprotect(record.size_class);
    return;
  }
  --stats_.zombies;
  --namespaces_[record.owner.value()].zombies;
  free_slot(id);
}

// Frees the slot of a removed chunk though the chunk is still held: a reader sees in the slot's generation word that the slot has
// another chunk. Without such words, in a tier that no client maps, a hold gates the slot as a pin does.
void Directory::vacate(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (record.holds > 0 && !record.has_io() && record.has_slot() && table_.has_words()) {
    give_slot_back(id);
    shares_.vacate(record.size_class);
    record.page = PackedPage();
  }
}

void Directory::give_slot_back(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(table_.has_generation(record.page, 0));
  KVPOOL_CHECK(arena_.owner(record.page) == id);
  standings_.set_written(record, false);
  stats_.used_bytes -= chunk_bytes(record);
  arena_.release(record.page);
  tokens_.forget(id);
}

// REQUIRES: nobody holds the chunk, and nobody reads or writes its slot any more.
void Directory::free_slot(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (record.has_slot()) {
    give_slot_back(id);
    shares_.unprotect(record.size_class);
  } else {
    shares_.release_record();
  }
  if (!promotions_.empty()) {
    promotions_.erase(record.generation);  // no report of its landing has come
  }
  records_.release(id);
}

// Nothing is written into the slot any more: its writer has reported that.
void Directory::end_writer(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  record.has_writer = false;
  if (record.state != ChunkState::ZOMBIE) {
    return;
  }
  if (record.holds == 0) {
    let_zombie_go(id);
  } else {
    vacate(id);
  }
}

void Directory::verify_slot(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& record = records_[id];
  const std::string name = "chunk record " + std::to_string(id.value());
  const bool is_zombie = record.state == ChunkState::ZOMBIE;
  if (record.has_slot() ? arena_.owner(record.page) != id : !is_zombie || record.has_io()) {
    broken.push_back(name + " does not own its slot");
  }
  const bool is_written = (record.state == ChunkState::WRITING && !record.is_waiting()) || record.state == ChunkState::PROMOTING;
  if (is_written ? !record.has_writer : record.has_writer && !is_zombie) {
    broken.push_back(name + " is wrong about its writer");
  }
  if (is_zombie && record.has_slot() && record.holds > 0 && !record.has_io() && table_.has_words()) {
    broken.push_back(name + " has a slot that nobody uses");
  }
  if (record.state != ChunkState::READY && record.holds == 0 && record.pins == 0) {
    broken.push_back(name + " is neither stored nor held");
  }
}

}  // namespace kvpool
