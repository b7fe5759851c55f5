// Slots of removed chunks: they are free again when no hardware, client or peer reads or writes them. See directory.h.
#include <algorithm>

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
  if (record.is_abandoned) {
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
  set_written(record, false);
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

// Nothing is written into the slot any more: its writer has reported that, or a fence proves it.
void Directory::end_writer(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  record.has_writer = false;
  if (record.is_abandoned) {
    record.is_abandoned = false;
    --stats_.quarantined;
    stats_.quarantined_bytes -= chunk_bytes(record);
  }
  if (record.state != ChunkState::ZOMBIE) {
    return;
  }
  if (record.holds == 0) {
    let_zombie_go(id);
  } else {
    vacate(id);
  }
}

FenceId Directory::abandon(HoldId id, uint64_t now_ns) {
  const ReservationState* const reservation = holds_.find_reservation(id);
  const HoldTable::Records* const hold = holds_.find_hold(id);
  if (reservation == nullptr && hold == nullptr) {
    return 0;
  }
  if (reservation != nullptr) {
    expire_part(id, SIZE_MAX, now_ns);
  }
  const std::vector<RecordId> records = hold != nullptr ? *hold : reservation->records;
  ++last_fence_;
  for (const RecordId of : records) {
    ChunkRecord& record = records_[of];
    if (record.has_writer && !record.is_abandoned) {
      record.is_abandoned = true;
      ++stats_.quarantined;
      stats_.quarantined_bytes += chunk_bytes(record);
      quarantine_.push_back({last_fence_, of, record.generation});
    }
    if (record.state == ChunkState::PROMOTING) {
      departure_ = Cause::FAILED_LANDING;
      stats_.dropped_chunks += remove_subtree(of);
    }
  }
  if (reservation != nullptr) {
    end_part(id, SIZE_MAX, now_ns);
  } else {
    release(id, now_ns);
  }
  return last_fence_;
}

size_t Directory::release_quarantine(FenceId fence) noexcept {
  size_t released = 0;
  for (; !quarantine_.empty() && quarantine_.front().fence <= fence; quarantine_.pop_front()) {
    const Quarantined& slot = quarantine_.front();
    const ChunkRecord& record = records_[slot.record];
    if (record.is_abandoned && record.generation == slot.generation) {  // else its writer has reported its end since
      end_writer(slot.record);
      ++released;
    }
  }
  return released;
}

void Directory::verify_slot(RecordId id, std::vector<std::string>& broken) const {
  const ChunkRecord& record = records_[id];
  const std::string name = "chunk record " + std::to_string(id.value());
  const bool is_zombie = record.state == ChunkState::ZOMBIE;
  if (record.has_slot() ? arena_.owner(record.page) != id : !is_zombie || record.has_io()) {
    broken.push_back(name + " does not own its slot");
  }
  const bool is_written = (record.state == ChunkState::WRITING && !is_waiting(record)) || record.state == ChunkState::PROMOTING;
  if (is_written ? !record.has_writer : record.has_writer && !is_zombie) {
    broken.push_back(name + " is wrong about its writer");
  }
  if (is_zombie && record.has_slot() && record.holds > 0 && !record.has_io() && table_.has_words()) {
    broken.push_back(name + " has a slot that nobody uses");
  }
  if (record.is_abandoned && !(is_zombie && record.has_writer && record.has_slot())) {
    broken.push_back(name + " is in quarantine and has no writer");
  }
  if (record.state != ChunkState::READY && record.holds == 0 && record.pins == 0 && !record.is_abandoned) {
    broken.push_back(name + " is neither stored nor held");
  }
}

void Directory::verify_quarantine(std::vector<std::string>& broken) const {
  uint64_t abandoned = 0;
  uint64_t bytes = 0;
  for (uint32_t index = 0; index < records_.end(); ++index) {
    const ChunkRecord& record = records_[RecordId(index)];
    abandoned += record.is_abandoned ? 1U : 0U;
    bytes += record.is_abandoned ? chunk_bytes(record) : 0;
  }
  const auto waits = std::count_if(quarantine_.begin(), quarantine_.end(), [this](const Quarantined& slot) {
    return records_[slot.record].is_abandoned && records_[slot.record].generation == slot.generation;
  });
  if (abandoned != stats_.quarantined || bytes != stats_.quarantined_bytes || static_cast<uint64_t>(waits) != abandoned) {
    broken.push_back("slots in quarantine: " + std::to_string(abandoned) + ", counted " + std::to_string(stats_.quarantined) +
                     ", waiting for a fence " + std::to_string(waits));
  }
}

}  // namespace kvpool
