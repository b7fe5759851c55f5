// One part of a near pull: extents on their way from the arena of another daemon of this host into slots of this node's arena.
//
// What it is: extent 0 of all chunks of the part, then extent 1, …, each copied once from memory that is mapped read-only, with its
// checksum in the same pass. What it is not: a right: the owner's offer protects the slots until its lease ends.
//
//   a chunk:  copying ──last extent──► DONE
//             ├─ other bytes than the promised checksum, or another generation after the copy ──► BAD_SOURCE   (this chunk alone)
//             └─ the deadline, the end of the job ──► FAILED, CANCELLED
//
// Nothing in the owner's memory is trusted: offsets and slots lie inside the mappings (the plan's precondition), the words of its index
// are read through checked addresses, and bytes count only with the checksum that came over the control plane.
// Threads: one.
#pragma once

#include <memory>
#include <vector>

#include "base/memory.h"
#include "net/slot_landing.h"
#include "shared_index/chunk_table.h"
#include "threads/job_line.h"

namespace kvpool {

// Where a chunk is at its owner, and under which generation.
struct NearSource {
  uint64_t offset;
  SlotAddress slot;
  uint64_t generation;
};

struct NearPlan : PullTarget {
  std::shared_ptr<const Mapping> source;  // the owner's arena
  std::shared_ptr<const IndexView> source_index;
  std::vector<NearSource> sources;  // by row
};

class NearCopier {
 public:
  // Copies the chunks of a part of the plan, until the job is to end. REQUIRES: every source inside the owner's arena and index, for
  // as many extents, and a check for each; all three outlive the copier.
  NearCopier(const NearPlan& plan, const LineJob& job, SlotLanding& landing);

  // Copies until all chunks have ended.
  void run();

 private:
  // Between two looks at the deadline; what is copied is verified while it is in the core's own cache.
  static constexpr uint64_t PIECE_BYTES = 256 << 10;

  struct Copied {
    uint32_t chunk;
    uint32_t crc;
  };

  [[nodiscard]] bool copy_of_all(uint32_t extent);
  [[nodiscard]] bool copy_extent(uint32_t chunk, uint32_t extent, uint32_t& crc);
  [[nodiscard]] bool must_end();
  void verify(uint32_t extent);
  void land(const Copied& copied, uint32_t extent);
  [[nodiscard]] bool is_in_place(const NearSource& chunk) const noexcept {
    return plan_.source_index->generation_at(chunk.slot) == chunk.generation;
  }

  const NearPlan& plan_;
  const LineJob& job_;
  SlotLanding& landing_;
  std::vector<uint32_t> chunks_;  // of this part
  std::vector<Copied> copied_;    // of the extent under way, not verified yet
  uint64_t copied_bytes_ = 0;
};

}  // namespace kvpool
