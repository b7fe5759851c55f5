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
// are read through checked addresses, and bytes count only with the checksum that came over the control plane. Each chunk ends exactly
// once; nothing is written to its slot afterwards.
// Threads: one.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "net/extent_receiver.h"
#include "shared_index/chunk_table.h"
#include "shared_index/landing_board.h"
#include "threads/job_line.h"

namespace kvpool {

// Where a chunk is at its owner, under which generation, and where it goes.
struct NearChunk {
  uint64_t source_offset;
  SlotAddress source;
  uint64_t generation;
  PullRow target;
};

struct NearPlan {
  std::shared_ptr<const Mapping> source;  // the owner's arena
  std::shared_ptr<const IndexView> source_index;
  std::vector<NearChunk> chunks;
  std::vector<uint32_t> checks;  // CRC-32C of each chunk's extents, as the owner promised them
  uint32_t extents = 0;
  uint64_t extent_bytes = 0;
  uint32_t parts = 1;
  StreamClock::time_point deadline;
};

class NearCopier {
 public:
  using Report = std::function<void(const PullOutcome&)>;

  // Copies the chunks number `part`, `part` + `parts`, … of the plan, until the job is to end. `report` is called once for each chunk;
  // what the copier does not know of an outcome (job, waited) is left to it.
  // REQUIRES: every source inside the owner's arena and index, every target inside arena and index, for as many extents.
  NearCopier(const NearPlan& plan, uint32_t part, const Mapping& arena, LandingBoard& board, const LineJob& job,
             Report report);

  // Copies until all chunks have ended.
  void run();
  // Ends those that have not ended.
  void end_all(PullStatus status, PullFault fault);

 private:
  // Between two looks at the deadline; what is copied is verified while it is in the core's own cache.
  static constexpr uint64_t PIECE_BYTES = 256 << 10;

  struct Chunk {
    bool has_ended = false;
    uint64_t bytes = 0;
    std::chrono::microseconds first_extent{0};
  };
  struct Copied {
    uint32_t chunk;
    uint32_t crc;
  };

  [[nodiscard]] bool copy_of_all(uint32_t extent);
  [[nodiscard]] bool copy_extent(uint32_t chunk, uint32_t extent, uint32_t& crc);
  [[nodiscard]] bool must_end();
  void verify(uint32_t extent);
  void land(const Copied& copied, uint32_t extent);
  void end_chunk(uint32_t chunk, PullStatus status, PullFault fault);
  [[nodiscard]] bool is_in_place(const NearChunk& chunk) const noexcept {
    return plan_.source_index->generation_at(chunk.source) == chunk.generation;
  }
  [[nodiscard]] Chunk& of(uint32_t chunk) { return chunks_[chunk / plan_.parts]; }
  [[nodiscard]] std::chrono::microseconds elapsed() const;

  const NearPlan& plan_;
  const uint32_t part_;
  const Mapping& arena_;
  LandingBoard& board_;
  const LineJob& job_;
  const Report report_;
  const StreamClock::time_point begun_;
  std::vector<Chunk> chunks_;   // of this part
  std::vector<Copied> copied_;  // of the extent under way, not verified yet
  uint64_t copied_bytes_ = 0;
};

}  // namespace kvpool
