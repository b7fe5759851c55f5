#include "ssd/ssd_verify_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

static_assert(SSD_PIECE_BYTES % PAGE_BYTES == 0 && SSD_PIECE_BYTES > PAGE_BYTES && SSD_PIECE_BYTES <= SsdBounce::BYTES);

}  // namespace

SsdVerifyJob::SsdVerifyJob(uint64_t id, std::vector<SsdVerify> chunks)
    : SsdJob(id),
      plan_(std::move(chunks)),
      extents_(static_cast<uint32_t>(plan_.at(0).expected.extent_crcs.size())),
      extent_bytes_(plan_.at(0).expected.extent_bytes),
      header_bytes_(plan_.at(0).expected.header_bytes()),
      piece_extents_(static_cast<uint32_t>(std::clamp<uint64_t>(SSD_PIECE_BYTES / extent_bytes_, 1, extents_))),
      pieces_((extents_ + piece_extents_ - 1) / piece_extents_),
      chunks_(plan_.size()) {
  for (size_t chunk = 0; chunk < plan_.size(); ++chunk) {
    KVPOOL_CHECK(plan_[chunk].expected.extent_crcs.size() == extents_);
    KVPOOL_CHECK(plan_[chunk].expected.extent_bytes == extent_bytes_);
    chunks_[chunk].found.resize(extents_);
  }
}

bool SsdVerifyJob::has_pieces() const {
  const std::lock_guard guard(lock_);
  return next_chunk_ < chunks_.size();
}

// Chunk after chunk; what is left of one that has failed is passed over.
bool SsdVerifyJob::claim(size_t& chunk, uint32_t& piece) {
  const std::lock_guard guard(lock_);
  while (next_chunk_ < chunks_.size() && chunks_[next_chunk_].status != SsdStatus::OK) {
    ++next_chunk_;
    next_piece_ = 0;
  }
  if (next_chunk_ == chunks_.size()) {
    return false;
  }
  chunk = next_chunk_;
  piece = next_piece_;
  ++chunks_[chunk].running;
  if (++next_piece_ == pieces_) {
    ++next_chunk_;
    next_piece_ = 0;
  }
  return true;
}

bool SsdVerifyJob::run_piece(SsdWorker& worker, std::vector<SsdOutcome>& ended) {
  size_t chunk = 0;
  uint32_t piece = 0;
  if (!claim(chunk, piece)) {
    return false;
  }
  Piece found = read(worker.io, worker.bounce, chunk, piece);
  if (found.status != SsdStatus::OK && found.status != SsdStatus::IO_ERROR) {
    found = read(worker.calls, worker.bounce, chunk, piece);
    worker.has_found_bad_path = worker.has_found_bad_path || found.status == SsdStatus::OK;
  }
  settle(worker, chunk, piece, std::move(found), ended);
  return true;
}

SsdVerifyJob::Piece SsdVerifyJob::read(SsdIo& io, SsdBounce& bounce, size_t chunk, uint32_t piece) const {
  const uint32_t first = piece * piece_extents_;
  Piece found;
  found.crcs.resize(std::min(piece_extents_, extents_ - first));
  if (piece == 0) {
    found.status = read_header(io, plan_[chunk], bounce.data(), found.wanted);
    found.bytes += header_bytes_;
  }
  if (found.status == SsdStatus::OK) {
    found.status = read_extents(io, plan_[chunk], first, bounce.data(), found);
  }
  return found;
}

SsdStatus SsdVerifyJob::read_header(SsdIo& io, const SsdVerify& plan, uint8_t* pages,
                                    std::vector<uint32_t>& wanted) const {
  const SsdStatus read = read_status_of(io.read(plan.offset, pages, header_bytes_));
  if (read != SsdStatus::OK) {
    return read;
  }
  SsdHeader found;
  const SsdStatus decoded = decode_ssd_header(pages, header_bytes_, found);
  const SsdStatus status = decoded == SsdStatus::OK ? compare_ssd_headers(found, plan.expected) : decoded;
  wanted = std::move(found.extent_crcs);
  return status;
}

// Extents need not begin or end with a page: the pages around them are read, and only their own bytes counted.
SsdStatus SsdVerifyJob::read_extents(SsdIo& io, const SsdVerify& plan, uint32_t first, uint8_t* pages, Piece& found) const {
  uint64_t at = first * extent_bytes_;
  const uint64_t end = at + found.crcs.size() * extent_bytes_;
  while (at < end) {
    const uint64_t page = at / PAGE_BYTES * PAGE_BYTES;
    const uint64_t size = std::min(SSD_PIECE_BYTES, round_up(end, PAGE_BYTES) - page);
    const SsdStatus status = read_status_of(io.read(plan.offset + header_bytes_ + page, pages, size));
    if (status != SsdStatus::OK) {
      return status;
    }
    found.bytes += size;
    const uint64_t until = std::min(end, page + size);
    while (at < until) {
      const uint64_t extent = at / extent_bytes_;
      const uint64_t step = std::min(until, (extent + 1) * extent_bytes_) - at;
      uint32_t& crc = found.crcs[extent - first];
      crc = crc32c(crc, pages + (at - page), step);
      at += step;
    }
  }
  return SsdStatus::OK;
}

// REQUIRES: `lock_` is held.
void SsdVerifyJob::take(Chunk& chunk, uint32_t piece, Piece& found) {
  chunk.bytes += found.bytes;
  if (found.status == SsdStatus::OK) {
    const auto first = static_cast<std::ptrdiff_t>(piece * piece_extents_);
    std::copy(found.crcs.begin(), found.crcs.end(), chunk.found.begin() + first);
    if (piece == 0) {
      chunk.wanted = std::move(found.wanted);
    }
  }
}

bool SsdVerifyJob::is_right(const Chunk& chunk, uint32_t piece) const noexcept {
  const auto first = static_cast<std::ptrdiff_t>(piece * piece_extents_);
  const auto end = static_cast<std::ptrdiff_t>(std::min((piece + 1) * piece_extents_, extents_));
  return std::equal(chunk.found.begin() + first, chunk.found.begin() + end, chunk.wanted.begin() + first);
}

// The chunk's last piece compares all of them.
void SsdVerifyJob::settle(SsdWorker& worker, size_t index, uint32_t piece, Piece found, std::vector<SsdOutcome>& ended) {
  std::unique_lock guard(lock_);
  Chunk& chunk = chunks_[index];
  take(chunk, piece, found);
  SsdStatus status = found.status;
  chunk.read += status == SsdStatus::OK ? 1U : 0U;
  for (uint32_t at = 0; chunk.read == pieces_ && at < pieces_ && status == SsdStatus::OK; ++at) {
    if (!is_right(chunk, at)) {
      guard.unlock();
      Piece again = read(worker.calls, worker.bounce, index, at);
      guard.lock();
      take(chunk, at, again);
      status = again.status == SsdStatus::OK && !is_right(chunk, at) ? SsdStatus::BAD_CHECKSUM : again.status;
      worker.has_found_bad_path = worker.has_found_bad_path || status == SsdStatus::OK;
    }
  }
  --chunk.running;
  chunk.status = chunk.status == SsdStatus::OK ? status : chunk.status;
  end_if_over(index, ended);
}

// REQUIRES: `lock_` is held.
void SsdVerifyJob::end_if_over(size_t index, std::vector<SsdOutcome>& ended) {
  Chunk& chunk = chunks_[index];
  const bool is_over = chunk.status != SsdStatus::OK || chunk.read == pieces_;
  if (is_over && chunk.running == 0 && !chunk.has_ended) {
    chunk.has_ended = true;
    ended.push_back({id(), static_cast<uint32_t>(index), chunk.status, chunk.bytes});
  }
}

void SsdVerifyJob::cancel(std::vector<SsdOutcome>& ended) {
  const std::lock_guard guard(lock_);
  next_chunk_ = chunks_.size();
  for (size_t index = 0; index < chunks_.size(); ++index) {
    Chunk& chunk = chunks_[index];
    if (chunk.status == SsdStatus::OK && chunk.read < pieces_) {
      chunk.status = SsdStatus::CANCELLED;
    }
    end_if_over(index, ended);
  }
}

}  // namespace kvpool
