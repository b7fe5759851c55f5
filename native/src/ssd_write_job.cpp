#include <algorithm>

#include "kvpool/check.h"
#include "kvpool/crc32c.h"
#include "kvpool/ssd_job.h"

namespace kvpool {

SsdWriteJob::SsdWriteJob(uint64_t id, std::vector<SsdWrite> chunks, std::shared_ptr<const Mapping> arena)
    : SsdJob(id), plan_(std::move(chunks)), arena_(std::move(arena)) {
  KVPOOL_CHECK(!plan_.empty());
}

bool SsdWriteJob::has_pieces() const {
  const std::lock_guard guard(lock_);
  return next_ < plan_.size();
}

bool SsdWriteJob::run_piece(SsdIo& io, std::vector<SsdOutcome>& ended) {
  size_t index = 0;
  {
    const std::lock_guard guard(lock_);
    if (next_ == plan_.size()) {
      return false;
    }
    index = next_++;
  }
  uint64_t bytes = 0;
  const SsdStatus status = write(io, plan_[index], bytes);
  ended.push_back({id(), static_cast<uint32_t>(index), status, bytes});
  return true;
}

SsdStatus SsdWriteJob::write(SsdIo& io, const SsdWrite& chunk, uint64_t& bytes) const {
  alignas(PAGE_BYTES) static thread_local SsdPage page;
  uint8_t* source = arena_->data() + chunk.arena_offset;
  const uint64_t layer_bytes = chunk.header.layer_bytes;
  for (size_t layer = 0; layer < chunk.header.layer_crcs.size(); ++layer) {
    if (crc32c(0, source + layer * layer_bytes, layer_bytes) != chunk.header.layer_crcs[layer]) {
      return SsdStatus::BAD_SOURCE;
    }
  }
  encode_ssd_header(chunk.header, page.data());
  const uint64_t size = round_up(chunk.header.chunk_bytes(), PAGE_BYTES);
  int error = 0;
  if (size <= SSD_WRITE_BYTES) {
    iovec parts[2] = {{page.data(), page.size()}, {source, size}};
    error = io.write(chunk.offset, parts, 2);
  } else {
    for (uint64_t at = 0; at < size && error == 0; at += SSD_WRITE_BYTES) {
      iovec part{source + at, std::min(SSD_WRITE_BYTES, size - at)};
      error = io.write(chunk.offset + SSD_HEADER_BYTES + at, &part, 1);
    }
    if (error == 0) {
      iovec part{page.data(), page.size()};
      error = io.write(chunk.offset, &part, 1);
    }
  }
  bytes = error == 0 ? size + SSD_HEADER_BYTES : 0;
  return error == 0 ? SsdStatus::OK : SsdStatus::IO_ERROR;
}

void SsdWriteJob::cancel(std::vector<SsdOutcome>& ended) {
  const std::lock_guard guard(lock_);
  for (; next_ < plan_.size(); ++next_) {
    ended.push_back({id(), static_cast<uint32_t>(next_), SsdStatus::CANCELLED, 0});
  }
}

}  // namespace kvpool
