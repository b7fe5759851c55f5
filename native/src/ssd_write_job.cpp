#include <algorithm>

#include "kvpool/check.h"
#include "kvpool/crc32c.h"
#include "kvpool/ssd_job.h"

namespace kvpool {
namespace {

// Compares a chunk in memory with its checksums, from its start on, as far as it is told.
class SourceCheck {
 public:
  SourceCheck(const uint8_t* source, const SsdHeader& header) : source_(source), header_(header) {}

  [[nodiscard]] bool is_good() const noexcept { return is_good_; }

  void go_on_to(uint64_t end) noexcept {
    end = std::min(end, header_.chunk_bytes());
    while (at_ < end && is_good_) {
      const uint64_t layer = at_ / header_.layer_bytes;
      const uint64_t layer_end = (layer + 1) * header_.layer_bytes;
      const uint64_t step = std::min(end, layer_end) - at_;
      crc_ = crc32c(crc_, source_ + at_, step);
      at_ += step;
      if (at_ == layer_end) {
        is_good_ = crc_ == header_.layer_crcs[layer];
        crc_ = 0;
      }
    }
  }

 private:
  const uint8_t* const source_;
  const SsdHeader& header_;
  uint64_t at_ = 0;
  uint32_t crc_ = 0;
  bool is_good_ = true;
};

}  // namespace

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

// The checksums are compared while the disk works: a chunk that is corrupt in memory has a slot then that does not certify
// itself, which nobody is told of. A long chunk gets its header last, and not at all where it is corrupt.
SsdStatus SsdWriteJob::write(SsdIo& io, const SsdWrite& chunk, uint64_t& bytes) const {
  alignas(PAGE_BYTES) static thread_local SsdPage page;
  uint8_t* source = arena_->data() + chunk.arena_offset;
  SourceCheck check(source, chunk.header);
  encode_ssd_header(chunk.header, page.data());
  const uint64_t size = round_up(chunk.header.chunk_bytes(), PAGE_BYTES);
  int error = 0;
  if (size <= SSD_WRITE_BYTES) {
    iovec parts[2] = {{page.data(), page.size()}, {source, size}};
    error = io.write_beside(chunk.offset, parts, 2, [&] { check.go_on_to(size); });
  } else {
    error = io.write_long(chunk.offset + SSD_HEADER_BYTES, {source, size}, SSD_WRITE_BYTES / 2, [&](uint64_t end) {
      check.go_on_to(end);
      return check.is_good();
    });
    if (error == 0 && check.is_good()) {
      iovec part{page.data(), page.size()};
      error = io.write(chunk.offset, &part, 1);
    }
  }
  bytes = error == 0 ? size + SSD_HEADER_BYTES : 0;
  if (error != 0) {
    return SsdStatus::IO_ERROR;
  }
  return check.is_good() ? SsdStatus::OK : SsdStatus::BAD_SOURCE;
}

void SsdWriteJob::cancel(std::vector<SsdOutcome>& ended) {
  const std::lock_guard guard(lock_);
  for (; next_ < plan_.size(); ++next_) {
    ended.push_back({id(), static_cast<uint32_t>(next_), SsdStatus::CANCELLED, 0});
  }
}

}  // namespace kvpool
