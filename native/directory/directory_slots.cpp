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
  promotions_.forget_promotion(record.generation);
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

}  // namespace kvpool
