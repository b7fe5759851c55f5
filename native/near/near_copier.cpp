#include "near/near_copier.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"
#include "copy/copy_tuning.h"

namespace kvpool {

NearCopier::NearCopier(const NearPlan& plan, uint32_t part, const Mapping& arena, LandingBoard& board,
                       const LineJob& job, Report report)
    : plan_(plan),
      part_(part),
      arena_(arena),
      board_(board),
      job_(job),
      report_(std::move(report)),
      begun_(StreamClock::now()),
      chunks_((plan.chunks.size() + plan.parts - 1 - part) / plan.parts) {
  KVPOOL_CHECK(plan_.checks.size() == plan_.chunks.size() * plan_.extents);
  const uint64_t bytes = plan_.extents * plan_.extent_bytes;
  for (const NearChunk& chunk : plan_.chunks) {
    KVPOOL_CHECK(plan_.source->contains(chunk.source_offset, bytes));
    KVPOOL_CHECK(arena_.contains(chunk.target.arena_offset, bytes));
  }
}

std::chrono::microseconds NearCopier::elapsed() const {
  return std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - begun_);
}

void NearCopier::run() {
  for (uint32_t extent = 0; extent < plan_.extents && copy_of_all(extent); ++extent) {
  }
}

// False where the job was to end.
bool NearCopier::copy_of_all(uint32_t extent) {
  for (uint32_t chunk = part_; chunk < plan_.chunks.size(); chunk += plan_.parts) {
    if (of(chunk).has_ended) {
      continue;
    }
    uint32_t crc = 0;
    if (!copy_extent(chunk, extent, crc)) {
      return false;
    }
    copied_.push_back({chunk, crc});
    copied_bytes_ += plan_.extent_bytes;
    if (copied_bytes_ >= PIECE_BYTES) {
      verify(extent);
    }
  }
  verify(extent);
  return true;
}

// False where the job was to end: then all chunks have.
bool NearCopier::copy_extent(uint32_t number, uint32_t extent, uint32_t& crc) {
  const NearChunk& chunk = plan_.chunks[number];
  const uint8_t* const source = plan_.source->data() + chunk.source_offset + extent * plan_.extent_bytes;
  uint8_t* const target = arena_.data() + chunk.target.arena_offset + extent * plan_.extent_bytes;
  for (uint64_t at = 0; at < plan_.extent_bytes; at += PIECE_BYTES) {
    if (must_end()) {
      return false;
    }
    crc = copy_crc32c(crc, target + at, source + at, std::min(PIECE_BYTES, plan_.extent_bytes - at));
  }
  return true;
}

bool NearCopier::must_end() {
  if (job_.has_ended()) {
    end_all(PullStatus::CANCELLED, PullFault::CANCELLED);
    return true;
  }
  if (StreamClock::now() >= plan_.deadline) {
    end_all(PullStatus::FAILED, PullFault::LATE);
    return true;
  }
  return false;
}

// The generations after the bytes: if one still stands, all bytes of its extent were this chunk's.
void NearCopier::verify(uint32_t extent) {
  if (copied_.empty()) {
    return;
  }
  copy_fence();
  for (const Copied& copied : copied_) {
    land(copied, extent);
  }
  copied_.clear();
  copied_bytes_ = 0;
}

void NearCopier::land(const Copied& copied, uint32_t extent) {
  const NearChunk& chunk = plan_.chunks[copied.chunk];
  if (!is_in_place(chunk)) {
    end_chunk(copied.chunk, PullStatus::BAD_SOURCE, PullFault::GONE);
    return;
  }
  if (copied.crc != plan_.checks[uint64_t{copied.chunk} * plan_.extents + extent]) {
    end_chunk(copied.chunk, PullStatus::BAD_SOURCE, PullFault::CHECKSUM);
    return;
  }
  of(copied.chunk).bytes += plan_.extent_bytes;
  board_.land(chunk.target.slot, extent, &copied.crc, 1);
  if (extent == 0) {
    of(copied.chunk).first_extent = elapsed();
  }
  if (extent + 1 == plan_.extents) {
    end_chunk(copied.chunk, PullStatus::DONE, PullFault::NONE);
  }
}

void NearCopier::end_chunk(uint32_t number, PullStatus status, PullFault fault) {
  Chunk& chunk = of(number);
  if (chunk.has_ended) {
    return;
  }
  chunk.has_ended = true;
  if (status != PullStatus::DONE) {
    board_.fail(plan_.chunks[number].target.slot);
  }
  PullOutcome outcome;
  outcome.chunk = number;
  outcome.status = status;
  outcome.fault = fault;
  outcome.bytes = chunk.bytes;
  outcome.first_extent = chunk.first_extent;
  outcome.elapsed = elapsed();
  report_(outcome);
}

void NearCopier::end_all(PullStatus status, PullFault fault) {
  copied_.clear();
  for (uint32_t chunk = part_; chunk < plan_.chunks.size(); chunk += plan_.parts) {
    end_chunk(chunk, status, fault);
  }
}

}  // namespace kvpool
