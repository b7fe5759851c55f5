#include "ssd/ssd_verify_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

static_assert(SSD_PIECE_BYTES % PAGE_BYTES == 0 && SSD_PIECE_BYTES > PAGE_BYTES && SSD_PIECE_BYTES <= SsdBounce::BYTES);

}  // namespace

SsdVerifyJob::SsdVerifyJob(std::vector<SsdVerify> chunks, std::optional<SsdWritten> reads_back)
    : SsdPieceJob(chunks), plan_(std::move(chunks)), reads_back_(std::move(reads_back)), sums_(plan_.size()) {
  for (Sums& sums : sums_) {
    sums.found.resize(extents_);
  }
}

// Chunk after chunk.
bool SsdVerifyJob::run_piece(SsdWorker& worker, uint32_t part, std::vector<SsdOutcome>& ended) {
  const size_t chunk = part / pieces_;
  const uint32_t piece = part % pieces_;
  if (!begin_piece(chunk)) {
    return false;
  }
  Piece found = read(worker.io, worker.bounce, chunk, piece);
  if (found.status != SsdStatus::OK && found.status != SsdStatus::IO_ERROR) {
    found = read(worker.calls, worker.bounce, chunk, piece);
    worker.has_found_bad_path = worker.has_found_bad_path || found.status == SsdStatus::OK;
  }
  settle(worker, chunk, piece, std::move(found), ended);
  return false;
}

SsdVerifyJob::Piece SsdVerifyJob::read(SsdIo& io, SsdBounce& bounce, size_t chunk, uint32_t piece) const {
  const uint32_t first = first_extent(piece);
  Piece found;
  found.crcs.resize(first_extent(piece + 1) - first);
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
void SsdVerifyJob::take(size_t chunk, uint32_t piece, Piece& found) {
  chunks_[chunk].bytes += found.bytes;
  if (found.status == SsdStatus::OK) {
    std::copy(found.crcs.begin(), found.crcs.end(), sums_[chunk].found.begin() + first_extent(piece));
    if (piece == 0) {
      sums_[chunk].wanted = std::move(found.wanted);
    }
  }
}

bool SsdVerifyJob::is_right(size_t chunk, uint32_t piece) const noexcept {
  const Sums& sums = sums_[chunk];
  const uint32_t first = first_extent(piece);
  return std::equal(sums.found.begin() + first, sums.found.begin() + first_extent(piece + 1), sums.wanted.begin() + first);
}

// The chunk's last piece compares all of them.
void SsdVerifyJob::settle(SsdWorker& worker, size_t index, uint32_t piece, Piece found, std::vector<SsdOutcome>& ended) {
  std::unique_lock guard(lock_);
  Chunk& chunk = chunks_[index];
  take(index, piece, found);
  SsdStatus status = found.status;
  chunk.done += status == SsdStatus::OK ? 1U : 0U;
  for (uint32_t at = 0; chunk.done == pieces_ && at < pieces_ && status == SsdStatus::OK; ++at) {
    if (!is_right(index, at)) {
      guard.unlock();
      Piece again = read(worker.calls, worker.bounce, index, at);
      guard.lock();
      take(index, at, again);
      status = again.status == SsdStatus::OK && !is_right(index, at) ? SsdStatus::BAD_CHECKSUM : again.status;
      worker.has_found_bad_path = worker.has_found_bad_path || status == SsdStatus::OK;
    }
  }
  fail(index, status);
  end_piece(index, ended);
}

}  // namespace kvpool
