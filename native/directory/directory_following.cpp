// Saves that others follow before they are committed. See directory.h.
#include <algorithm>

#include "directory/directory.h"

namespace kvpool {

bool Directory::land_saved(HoldId reservation, size_t first, size_t count, uint32_t first_extent,
                           std::span<const uint32_t> checksums) {
  const ReservationState* const state = holds_.find_reservation(reservation);
  if (state == nullptr || state->expired) {
    return false;
  }
  const size_t reserved = state->written.size();
  const size_t extents = count == 0 ? 0 : checksums.size() / count;
  if (!table_.has_words() || first_extent + 1 >= state->extents) {
    return true;
  }
  const auto landing = static_cast<uint32_t>(std::min<size_t>(extents, state->extents - 1 - first_extent));
  for (size_t index = 0; index < count && first < reserved && index < reserved - first; ++index) {
    const ChunkRecord& record = records_[state->records[state->written[first + index]]];
    if (record.state != ChunkState::WRITING || !record.has_writer || landing == 0) {
      continue;
    }
    const SlotAddress slot = table_.slot_of(record.page);
    if (table_.words().landed(slot) == first_extent) {
      table_.words().land(slot, first_extent, checksums.data() + index * extents, landing);
    }
  }
  return true;
}

// Whether the extents that others may have read by now are those that are committed: no chunk of two saves' extents comes to be.
bool Directory::has_landed_as(const ChunkRecord& record, const uint32_t* checksums) const noexcept {
  if (!table_.has_words()) {
    return true;
  }
  const SlotAddress slot = table_.slot_of(record.page);
  const uint32_t landed = table_.words().landed(slot);
  for (uint32_t extent = 0; extent < landed; ++extent) {
    if (table_.words().checksum(slot, extent) != checksums[extent]) {
      return false;
    }
  }
  return true;
}

Columns Directory::follow_saves(NamespaceId owner, const std::optional<ChunkKey>& parent, const uint8_t* keys, size_t n) {
  Columns found;
  auto above = find_above(parent);
  for (size_t index = 0; index < n && above && table_.is_shared(); ++index) {
    const RecordId id = find_record(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!id.valid() || records_[id].owner != owner || records_[id].parent != *above ||
        records_[id].state != ChunkState::WRITING) {
      break;
    }
    const ChunkRecord& record = records_[id];
    table_.set_generation(record.page, record.generation);
    found.offsets.push_back(uint64_t{record.page.value()} * PAGE_BYTES);
    found.generations.push_back(record.generation);
    found.levels.push_back(NO_LEVEL);
    found.slots.push_back(table_.slot_of(record.page).packed());
    above = id;
  }
  return found;
}

}  // namespace kvpool
