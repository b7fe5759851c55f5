// Kept region: where the records of a directory lie when they are to outlive the process, and what certifies them there.
//
// What it is: fixed layouts, little endian, and the checksums of their parts. What it is not: the reader of a former life
// (directory/former_life.h), or memory: a region is a Mapping that somebody else keeps open as well.
//
//   offset 0       KeptHead, one page: the sizes that everything else depends on, and a bound of the generations given
//   4096           ChunkRecord[max_chunks]
//   seals_offset   RecordSeal[max_chunks]: what makes a record mean something, and who may be writing into its slot
//   runs_offset    KeptRun[segments]: which run each segment of the arena was lent in last
//   tokens_offset  token_bytes: the token ids of chunks (kept_tokens.h); what is not used of it takes no memory
//   learned_offset learned_bytes: what the eviction policy has learned (class_queue_policy.h); likewise
//
// A process may be killed between any two stores, and what it has stored then stands there, in the order of the program. So:
//   1. A record is good while it is READY, its seal is right and the generation word of its slot in the index is its own. The seal is
//      stored when the slot is given, the word when the chunk is published; the word is cleared before anything of the record is.
//   2. The seal has the key, generation, page, namespace and place of a record and the generation of its parent, which never change while
//      a chunk lives; the entry of its run has the geometry. Its last use, its priority and its place in the queues do, and any
//      value of theirs in range is one that might have been: those are judged by their range alone.
//   3. A seal names the parent itself: a record is taken out of its parent's children for moments, while victims are looked for.
//   4. A run is entered before the first of its slots is given, while no record names a page of it. An entry that is out of date is
//      named by no record.
//   5. A seal of 0 says that nobody has heard of the slot yet: nobody writes there.
//
// Threads: one writes, the control thread; a region of a former life has no writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/memory.h"
#include "base/types.h"

namespace kvpool {

inline constexpr char KEPT_MAGIC[8] = {'K', 'V', 'P', 'K', 'E', 'P', 'T', '1'};
// To be raised with any change of ChunkRecord, of what is below, or of what generation words mean.
inline constexpr uint32_t KEPT_VERSION = 1;

// The sizes that a region was made for. One of others is not read.
struct KeptShape {
  uint64_t capacity = 0;
  uint64_t segment_bytes = 0;
  uint64_t slot_bytes_min = 0;
  uint64_t checksum_bytes_min = 0;
  uint64_t token_bytes = 0;
  uint64_t learned_bytes = 0;
  uint32_t segments = 0;
  uint32_t max_run_segments = 0;
  uint32_t max_chunks = 0;
  uint32_t record_bytes = 0;
  friend bool operator==(const KeptShape&, const KeptShape&) noexcept = default;
};
static_assert(sizeof(KeptShape) == 64);

// No generation from `end` on has been given. Raised in steps, in turns in one of two places: one of them is whole at any time.
struct GenerationMark {
  uint64_t end;
  uint32_t crc;
  uint32_t pad;
};

struct KeptHead {
  char magic[8];
  uint32_t version;
  uint32_t crc;  // of `shape`
  KeptShape shape;
  GenerationMark marks[2];
};
static_assert(sizeof(KeptHead) <= PAGE_BYTES);

struct RecordSeal {
  uint32_t crc;     // 0: the slot has been given, and nobody has heard of it
  uint32_t holder;  // whose reservation has the slot written; OWN_WRITER: the process itself; unset: several, or nobody in particular
  uint32_t parent;  // a record; unset: the chunk is the first of its prompt
  uint32_t tokens;  // a cell of kept_tokens.h; 0: none. No part of the seal: the cell says whose it is
};
static_assert(sizeof(RecordSeal) == 16);

struct KeptRun {
  uint32_t first;     // segment
  uint32_t segments;  // 0: it was never lent
  uint64_t chunk_bytes;
  uint32_t extents;
  uint32_t has_place_below;
  uint32_t pad;
  uint32_t crc;  // with the number of the segment that it stands at
};
static_assert(sizeof(KeptRun) == 32);

// What follows is stored after what precedes, as far as a kill of this process can see.
inline void keep_order() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

[[nodiscard]] uint32_t crc_of(const KeptRun& run, uint32_t segment) noexcept;

// The parts of a region in a mapping. REQUIRES: it has `bytes(shape)`.
class KeptRegion {
 public:
  KeptRegion(std::shared_ptr<const Mapping> mapping, const KeptShape& shape) noexcept;
  [[nodiscard]] static uint64_t bytes(const KeptShape& shape) noexcept;
  // Of a former life; nothing where the mapping is no whole region of this version and of these sizes.
  [[nodiscard]] static std::optional<KeptRegion> read(std::shared_ptr<const Mapping> mapping, const KeptShape& expected) noexcept;

  // Makes a zeroed region one.
  void format() const noexcept;
  // No generation below this is to be given by a later life; 0 where neither mark is whole.
  [[nodiscard]] uint64_t generations_end() const noexcept;
  void set_generations_end(uint64_t end) const noexcept;

  // Where the first records lie, their seals, and the first bytes of cells for token ids. REQUIRES: there are so many.
  [[nodiscard]] std::vector<WrittenSoon> pages_for(uint64_t records, uint64_t token_bytes) const;
  // Bytes of cells that were ever written, in whole pages.
  [[nodiscard]] uint64_t used_token_bytes() const noexcept;

  [[nodiscard]] uint8_t* records() const noexcept { return mapping_->data() + PAGE_BYTES; }
  [[nodiscard]] RecordSeal* seals() const noexcept { return reinterpret_cast<RecordSeal*>(mapping_->data() + seals_offset(shape_)); }
  [[nodiscard]] KeptRun* runs() const noexcept { return reinterpret_cast<KeptRun*>(mapping_->data() + runs_offset(shape_)); }
  [[nodiscard]] uint8_t* tokens() const noexcept { return mapping_->data() + tokens_offset(shape_); }
  [[nodiscard]] uint8_t* learned() const noexcept { return mapping_->data() + learned_offset(shape_); }
  [[nodiscard]] const Mapping& mapping() const noexcept { return *mapping_; }
  [[nodiscard]] const KeptShape& shape() const noexcept { return shape_; }

 private:
  [[nodiscard]] static uint64_t seals_offset(const KeptShape& shape) noexcept;
  [[nodiscard]] static uint64_t runs_offset(const KeptShape& shape) noexcept;
  [[nodiscard]] static uint64_t tokens_offset(const KeptShape& shape) noexcept;
  [[nodiscard]] static uint64_t learned_offset(const KeptShape& shape) noexcept;
  [[nodiscard]] KeptHead& head() const noexcept { return *reinterpret_cast<KeptHead*>(mapping_->data()); }

  std::shared_ptr<const Mapping> mapping_;
  KeptShape shape_;
};

}  // namespace kvpool
