// Former life: what an earlier process has left of a directory in its index and its records, for the one that takes over its arena.
//
// What it is: a reader of both, which believes nothing that it has not compared. What it is not: a judge of what becomes of a chunk
// here (Directory::restore_former), or a reader of payload: a load compares checksums as ever.
//
// Bits may have flipped in either, and the process may have died between any two stores (kept_region.h). A chunk can be taken over that
// was READY, whose seal and run are right, and whose slot's words say that it was published with this generation. Whoever may be
// writing to a slot is believed without a seal: to let a slot be costs little.
// Threads: any; nobody writes to either any more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "arena/slot_arena.h"
#include "directory/directory_geometry.h"
#include "records/chunk_records.h"
#include "records/kept_region.h"
#include "shared_index/index_words.h"

namespace kvpool {

// What became of the records of a former life: each is counted once.
struct FormerCounts {
  uint64_t taken = 0;
  uint64_t taken_bytes = 0;
  uint64_t withheld = 0;  // slots that somebody may still write to
  uint64_t withheld_bytes = 0;
  uint64_t unfinished = 0;   // were not READY, and nobody writes to their slots
  uint64_t damaged = 0;      // the record or the run of its slot is not what it was
  uint64_t unpublished = 0;  // their slots' words say otherwise
  uint64_t unknown = 0;      // of a namespace that is not known here
  uint64_t orphaned = 0;     // what precedes them is not taken
  uint64_t unplaced = 0;     // their slot, key or record is taken, or there is no room
};

// A lent run of the former life. `size_class`: here.
struct FormerRun {
  SegmentRun segments;
  ClassId size_class;
};

// Of a record: what is taken from it as it is.
struct FormerChunk {
  const ChunkRecord& record;
  FormerRun run;
  HolderId writer;
  uint64_t used_ns;
  std::span<const uint32_t> checksums;
  std::span<const int32_t> tokens;
};

class FormerLife {
 public:
  // REQUIRES: `why_refused` is nullptr.
  FormerLife(std::shared_ptr<const Mapping> index, std::shared_ptr<const Mapping> records, const DirectoryGeometry& geometry);
  // Why a directory of this geometry cannot go on with these; nullptr where it can.
  [[nodiscard]] static const char* why_refused(const std::shared_ptr<const Mapping>& index, const std::shared_ptr<const Mapping>& records,
                                               const DirectoryGeometry& geometry);

  // Calls `visit` with every id whose record was ever used. Reading what was never written would take memory for it.
  template <typename Visit>
  void visit_records(Visit visit) const {
    const Mapping& mapping = kept_.mapping();
    const uint64_t last = PAGE_BYTES + uint64_t{max_chunks()} * sizeof(ChunkRecord);
    for (Stretch pages = mapping.next_pages(PAGE_BYTES); pages.begin < std::min(pages.end, last); pages = mapping.next_pages(pages.end)) {
      static_cast<void>(mapping.populate(pages.begin, pages.end - pages.begin));
      const uint64_t end = (std::min(pages.end, last) - PAGE_BYTES) / sizeof(ChunkRecord);
      for (uint64_t id = (pages.begin - PAGE_BYTES) / sizeof(ChunkRecord); id < end; ++id) {
        visit(static_cast<uint32_t>(id));
      }
    }
  }
  [[nodiscard]] const ChunkRecord& record(uint32_t id) const noexcept { return records_[id]; }
  [[nodiscard]] RecordSeal seal(uint32_t id) const noexcept { return kept_.seals()[id]; }
  [[nodiscard]] const KeptRegion& region() const noexcept { return kept_; }
  [[nodiscard]] uint32_t max_chunks() const noexcept { return kept_.shape().max_chunks; }
  // How many entries its index seems to have, of chunks in any tier; bytes of cells for token ids.
  [[nodiscard]] uint64_t entries() const noexcept;
  [[nodiscard]] uint64_t used_token_bytes() const noexcept { return kept_.used_token_bytes(); }
  [[nodiscard]] uint64_t generations_end() const noexcept { return generations_end_; }

  // Whether a record is what it was when it was sealed, of a chunk that can be stored.
  [[nodiscard]] bool is_sealed(uint32_t id) const noexcept;
  // The segment that a page lies in; nothing where there is none. The entry of its run; nothing where it is not whole.
  [[nodiscard]] std::optional<uint32_t> segment_of(PageIndex page) const noexcept;
  [[nodiscard]] std::optional<KeptRun> run_at(uint32_t segment) const noexcept;
  [[nodiscard]] uint32_t segments() const noexcept { return kept_.shape().segments; }
  // The checksums of a chunk that was published in the slot with these numbers; nothing where it was not.
  [[nodiscard]] std::optional<std::span<const uint32_t>> published(const ChunkRecord& record, SlotNumbers slot, uint32_t extents) const noexcept;
  // The token ids that were stored with a chunk; empty where there are none, or they are not what they were.
  [[nodiscard]] std::span<const int32_t> tokens(uint32_t id) const noexcept;
  void prefetch(uint32_t id) const noexcept;

 private:
  const std::shared_ptr<const Mapping> index_;
  const KeptRegion kept_;
  const ChunkRecord* const records_;
  RegionWords words_;
  const uint64_t generations_end_;
};

}  // namespace kvpool
