#include "directory/standings.h"

#include <algorithm>

namespace kvpool {

void Standings::add_by_access(RecordId id, uint32_t steps, bool or_oldest) noexcept {
  records_[id].standing = of(records_[id]);
  queues_.add_by_access(id, steps, or_oldest);
}

void Standings::settle_chunk(RecordId id) noexcept {
  const ChunkRecord& record = records_[id];
  if (record.is_free() && !record.is_aside && record.standing != of(record)) {
    queues_.remove(id);
    add_by_access(id, SETTLE_STEPS, false);
  }
}

void Standings::begin_saving(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (record.is_listed() && !record.is_aside && record.standing == Standing::UNSAVED) {
    queues_.remove(id);
    record.standing = Standing::BEING_SAVED;
    queues_.add(id);
  }
}

void Standings::requeue(RecordId id) noexcept {
  queues_.remove(id);
  add_by_access(id, POSITION_STEPS, true);
}

void Standings::requeue_childless(RecordId parent, uint64_t child_access_ns) noexcept {
  if (!parent.valid()) {
    return;
  }
  ChunkRecord& record = records_[parent];
  const bool is_behind_child = record.last_access_ns < child_access_ns;
  record.last_access_ns = std::max(record.last_access_ns, child_access_ns);
  record.is_cut = record.is_cut || is_behind_child;
  if (record.first_child.valid() || !record.is_listed()) {
    return;
  }
  if (record.is_aside || is_behind_child) {
    queues_.remove(parent);
    add_by_access(parent, CHILDLESS_STEPS, false);
  } else if (record.level != record.priority) {
    requeue(parent);
  }
}

void Standings::renew(RecordId id, uint64_t now_ns) noexcept {
  ChunkRecord& record = records_[id];
  if (record.is_listed()) {
    queues_.remove(id);
    record.last_access_ns = now_ns;
    record.is_cut = record.parent.valid();
    record.standing = of(record);  // what was set aside has not followed its copies below
    queues_.add(id);
  }
}

uint64_t Standings::unsaved_bytes(uint64_t used_bytes) const noexcept {
  uint64_t bytes = used_bytes - written_bytes_;
  for (uint32_t index = 0; index < arena_.class_count(); ++index) {
    const ClassId size_class(index);
    const SizeClass& geometry = arena_.size_class(size_class);
    const uint64_t chunks =
        geometry.has_place_below ? queues_.count(size_class, Standing::BEING_SAVED) : arena_.used_slots(size_class);
    bytes -= chunks * geometry.chunk_bytes;
  }
  return bytes;
}

}  // namespace kvpool
