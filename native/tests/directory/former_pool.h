// What the tests of former lives share: pools whose records are kept, one after the other over the same arena.
#pragma once

#include <map>
#include <set>

#include "tests/directory_pool.h"

namespace kvpool::testing {

inline std::shared_ptr<Mapping> new_records(const DirectoryGeometry& geometry) {
  return Mapping::create("records", KeptRegion::bytes(geometry.kept()), false).mapping;
}

// A pool of small segments whose records are kept; over the arena of `former` where there is one.
inline std::unique_ptr<Pool> new_life(const DirectoryGeometry& geometry, const std::shared_ptr<Mapping>& arena = nullptr,
                                      PolicyKind policy = PolicyKind::LRU) {
  return std::make_unique<Pool>(geometry, arena, new_records(geometry), policy);
}

inline void make_ready(Pool& pool) {
  for (uint32_t segment = 0; segment < pool.geometry.arena.segments; ++segment) {
    pool.directory.mark_segment_ready(segment);
  }
}

inline FormerCounts take_over(Pool& pool, const std::shared_ptr<Mapping>& index, const std::shared_ptr<Mapping>& records, uint64_t now) {
  pool.now = now;
  return pool.directory.restore_former(FormerLife(index, records, pool.geometry), std::vector{pool.owner}, now);
}
inline FormerCounts take_over(Pool& pool, const Pool& former) { return take_over(pool, former.index, former.records, former.now); }

// What a life had of a chunk, or of a slot that somebody writes to.
struct Kept {
  uint64_t page;
  uint64_t generation;
  uint32_t holder;
  std::vector<uint32_t> checksums;
  friend bool operator==(const Kept&, const Kept&) = default;
};
struct KeptState {
  std::map<uint64_t, Kept> ready;       // by the second word of the key
  std::set<uint64_t> written;           // pages of slots with a writer
};

inline KeptState state_of(const Pool& pool) {
  KeptState state;
  for (uint32_t number = 0; number < pool.directory.places(); ++number) {
    const ChunkRecord& record = pool.directory.record(RecordId(number));
    if (record.state == ChunkState::READY) {
      const auto found = pool.view->find(record.key);
      Kept kept{record.page.value(), record.generation, 0, {}};
      for (uint32_t extent = 0; found && extent < pool.directory.arena().size_class(record.size_class).extents; ++extent) {
        kept.checksums.push_back(pool.view->checksum_at(found->slot, extent));
      }
      state.ready.emplace(record.key.words[1], kept);
    } else if (record.has_writer) {
      state.written.insert(record.page.value());
    }
  }
  return state;
}

// Regions as they would be found after a kill.
inline std::shared_ptr<Mapping> copy_of(const uint8_t* bytes, uint64_t size) {
  auto mapping = Mapping::create("former", size, false).mapping;
  std::memcpy(mapping->data(), bytes, size);
  return mapping;
}
inline std::shared_ptr<Mapping> copy_of(const Mapping& mapping) { return copy_of(mapping.data(), mapping.size()); }

}  // namespace kvpool::testing
