#include "near/near_copier.h"

#include <algorithm>

#include "base/check.h"
#include "checksum/crc32c.h"
#include "copy/copy_tuning.h"

namespace kvpool {

NearCopier::NearCopier(const NearPlan& plan, const LineJob& job, SlotLanding& landing)
    : plan_(plan), job_(job), landing_(landing) {
  KVPOOL_CHECK(plan_.checks.size() == plan_.rows.size() * plan_.extents && plan_.sources.size() == plan_.rows.size());
  for (const NearSource& chunk : plan_.sources) {
    KVPOOL_CHECK(plan_.source->contains(chunk.offset, plan_.extents * plan_.extent_bytes));
  }
  landing_.each([this](uint32_t chunk) { chunks_.push_back(chunk); });
}

void NearCopier::run() {
  for (uint32_t extent = 0; extent < plan_.extents && copy_of_all(extent); ++extent) {
  }
}

// False where the job was to end.
bool NearCopier::copy_of_all(uint32_t extent) {
  for (const uint32_t chunk : chunks_) {
    if (landing_.has_ended(chunk)) {
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
bool NearCopier::copy_extent(uint32_t chunk, uint32_t extent, uint32_t& crc) {
  const uint8_t* const source = plan_.source->data() + plan_.sources[chunk].offset + extent * plan_.extent_bytes;
  uint8_t* const target = landing_.bytes_of(chunk, extent);
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
    landing_.end_all(PullStatus::CANCELLED, PullFault::CANCELLED);
    return true;
  }
  if (StreamClock::now() >= plan_.deadline) {
    landing_.end_all(PullStatus::FAILED, PullFault::LATE);
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
  landing_.report();
  copied_.clear();
  copied_bytes_ = 0;
}

void NearCopier::land(const Copied& copied, uint32_t extent) {
  if (!is_in_place(plan_.sources[copied.chunk])) {
    landing_.end(copied.chunk, PullStatus::BAD_SOURCE, PullFault::GONE);
  } else if (!landing_.is_promised(copied.chunk, extent, copied.crc)) {
    landing_.end(copied.chunk, PullStatus::BAD_SOURCE, PullFault::CHECKSUM);
  } else {
    landing_.land(copied.chunk, extent, &copied.crc, 1);
  }
}

}  // namespace kvpool
