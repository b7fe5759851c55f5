#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_job.h"

namespace kvpool {

SsdWriteJob::SsdWriteJob(std::vector<SsdWrite> chunks, std::shared_ptr<const Mapping> arena)
    : plan_(std::move(chunks)), arena_(std::move(arena)), progress_(plan_.size()) {
  KVPOOL_CHECK(!plan_.empty());
}

std::optional<SsdVerify> SsdWriteJob::written(uint32_t chunk) const {
  return SsdVerify{plan_[chunk].offset, plan_[chunk].header};
}

bool SsdWriteJob::run_piece(SsdWorker& worker, uint32_t index, std::vector<SsdOutcome>& ended) {
  const SsdWrite& chunk = plan_[index];
  Progress& progress = progress_[index];
  const int error = write_next(worker, chunk, progress);
  const uint64_t size = round_up(chunk.header.chunk_bytes(), PAGE_BYTES);
  if (error == 0 && progress.is_good && progress.at < size) {
    return true;
  }
  const SsdStatus status = error != 0 ? SsdStatus::IO_ERROR : progress.is_good ? SsdStatus::OK : SsdStatus::BAD_SOURCE;
  ended.push_back({number(), index, status, error == 0 ? size + chunk.header.header_bytes() : 0});
  return false;
}

// The next piece of a chunk, in steps, and its header: in front where that piece is all of it, behind the last one otherwise, and
// not at all where the chunk is corrupt. A corrupt chunk on disk has no valid header then.
int SsdWriteJob::write_next(SsdWorker& worker, const SsdWrite& chunk, Progress& progress) const {
  const uint64_t size = round_up(chunk.header.chunk_bytes(), PAGE_BYTES);
  const uint64_t first = progress.at;
  const uint64_t length = std::min(size - first, SSD_WRITE_BYTES);
  const uint64_t header_bytes = chunk.header.header_bytes();
  const uint64_t head = length == size ? header_bytes : 0;
  uint8_t* const pages = worker.bounce.data();
  // The first step is longer by the header, and so is the place of each.
  const auto fill = [&](unsigned place, uint64_t at, uint64_t step) {
    uint8_t* const target = pages + place * SsdBounce::HALF_BYTES;
    const uint64_t before = at == 0 ? head : 0;
    if (before > 0) {
      encode_ssd_header(chunk.header, target);
    }
    return copy_source(target + before, chunk, step - before, progress) ? target : nullptr;
  };
  const uint64_t offset = chunk.offset + header_bytes + first - head;
  int error = worker.io.write_steps(offset, head + length, SSD_STEP_BYTES + head, fill);
  if (error == 0 && progress.is_good && head == 0 && progress.at == size) {
    encode_ssd_header(chunk.header, pages);
    error = worker.io.write(chunk.offset, pages, header_bytes);
  }
  return error;
}

// Brings the next bytes of a chunk into memory that is about to be written, zeros behind its end, and compares each extent that
// ends there. False where one is not what its checksum says.
bool SsdWriteJob::copy_source(uint8_t* target, const SsdWrite& chunk, uint64_t size, Progress& progress) const {
  const SsdHeader& header = chunk.header;
  const uint64_t first = progress.at;
  const uint64_t end = std::min(first + size, header.chunk_bytes());
  const uint8_t* const source = arena_->data() + chunk.arena_offset;
  while (progress.at < end && progress.is_good) {
    const uint64_t extent = progress.at / header.extent_bytes;
    const uint64_t extent_end = (extent + 1) * header.extent_bytes;
    const uint64_t step = std::min(end, extent_end) - progress.at;
    progress.crc = copy_crc32c(progress.crc, target + (progress.at - first), source + progress.at, step);
    progress.at += step;
    if (progress.at == extent_end) {
      progress.is_good = progress.crc == header.extent_crcs[extent];
      progress.crc = 0;
    }
  }
  std::memset(target + (end - first), 0, first + size - end);
  progress.at = first + size;
  copy_fence();
  return progress.is_good;
}

void SsdWriteJob::cancel(uint32_t first, uint32_t end, std::vector<SsdOutcome>& ended) {
  for (uint32_t chunk = first; chunk < end; ++chunk) {
    ended.push_back({number(), chunk, SsdStatus::CANCELLED, 0});
  }
}

}  // namespace kvpool
