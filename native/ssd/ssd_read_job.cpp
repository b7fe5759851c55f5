#include <algorithm>

#include "base/check.h"
#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_job.h"

namespace kvpool {
SsdReadJob::SsdReadJob(std::vector<SsdRead> chunks, std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board)
    : SsdPieceJob(chunks), plan_(std::move(chunks)), arena_(std::move(arena)), board_(std::move(board)), found_(plan_.size()) {
  for (Found& found : found_) {
    found.is_read.resize(pieces_);
  }
}

// Where a piece begins in the chunk: the page behind the one that ends the extents before.
uint64_t SsdReadJob::piece_start(uint32_t piece) const noexcept { return round_up(first_extent(piece) * extent_bytes_, PAGE_BYTES); }

bool SsdReadJob::run_piece(SsdWorker& worker, uint32_t part, std::vector<SsdOutcome>& ended) {
  const auto piece = static_cast<uint32_t>(part / plan_.size());
  const size_t chunk = part % plan_.size();
  if (!begin_piece(chunk)) {
    return false;
  }
  SsdHeader found;
  uint64_t bytes = 0;
  SsdStatus status = read(worker.io, piece, chunk, found, bytes);
  if (status != SsdStatus::OK && status != SsdStatus::IO_ERROR) {
    status = read_again(worker, piece, chunk, found);
    worker.has_found_bad_path = worker.has_found_bad_path || status == SsdStatus::OK;  // a header has its own memory
  }
  if (piece == 0 && status == SsdStatus::OK) {
    const std::lock_guard guard(lock_);
    found_[chunk].header = std::move(found);
  }
  settle(worker, piece, chunk, status, bytes, ended);
  return false;
}

// Header and extents, where they belong: the header into memory of the tier's own.
SsdStatus SsdReadJob::read(SsdIo& io, uint32_t piece, size_t chunk, SsdHeader& found, uint64_t& bytes) const {
  alignas(PAGE_BYTES) static thread_local SsdPage pages;
  const std::span<uint8_t> header(pages.data(), header_bytes_);
  const SsdRead& plan = plan_[chunk];
  const uint64_t start = piece_start(piece);
  uint8_t* const target = arena_->data() + plan.arena_offset + start;
  bytes = piece_start(piece + 1) - start;
  const bool has_header = piece == 0;
  int error = 0;
  if (has_header) {
    error = io.read_slot(plan.offset, header, target, bytes);
    bytes += header.size();
  } else if (bytes > 0) {
    error = io.read(plan.offset + header_bytes_ + start, target, bytes);
  }
  if (error != 0 || !has_header) {
    return read_status_of(error);
  }
  const SsdStatus decoded = decode_ssd_header(header.data(), header.size(), found);
  return decoded == SsdStatus::OK ? compare_ssd_headers(found, plan.expected) : decoded;
}

// Reads a piece once more, with its header: by plain calls into memory that no client reaches, compared there, and copied from
// there into the slot. This outcome counts.
SsdStatus SsdReadJob::read_again(SsdWorker& worker, uint32_t piece, size_t chunk, SsdHeader& found) const {
  const SsdRead& plan = plan_[chunk];
  uint8_t* const pages = worker.bounce.data();
  ++worker.second_reads;
  SsdStatus status = read_status_of(worker.calls.read(plan.offset, pages, header_bytes_));
  status = status == SsdStatus::OK ? decode_ssd_header(pages, header_bytes_, found) : status;
  status = status == SsdStatus::OK ? compare_ssd_headers(found, plan.expected) : status;
  uint32_t crc = 0;
  uint64_t at = first_extent(piece) * extent_bytes_;
  const uint64_t end = first_extent(piece + 1) * extent_bytes_;
  while (status == SsdStatus::OK && at < end) {
    const uint64_t extent = at / extent_bytes_;
    const uint64_t page = at / PAGE_BYTES * PAGE_BYTES;
    const uint64_t until = std::min((extent + 1) * extent_bytes_, page + SSD_STEP_BYTES);
    status = read_status_of(worker.calls.read(plan.offset + header_bytes_ + page, pages, round_up(until, PAGE_BYTES) - page));
    if (status == SsdStatus::OK) {
      crc = copy_crc32c(crc, arena_->data() + plan.arena_offset + at, pages + (at - page), until - at);
      at = until;
    }
    if (status == SsdStatus::OK && at % extent_bytes_ == 0) {
      status = crc == found.extent_crcs[extent] ? SsdStatus::OK : SsdStatus::BAD_CHECKSUM;
      crc = 0;
    }
  }
  copy_fence();
  return status;
}

// Records a piece's outcome, then checks and announces the extents that are next in order. One thread at a time does that for
// a chunk; it finds the pieces that others read meanwhile in its next round.
void SsdReadJob::settle(SsdWorker& worker, uint32_t piece, size_t index, SsdStatus status, uint64_t bytes,
                        std::vector<SsdOutcome>& ended) {
  std::unique_lock guard(lock_);
  Chunk& chunk = chunks_[index];
  Found& found = found_[index];
  chunk.bytes += bytes;
  found.is_read[piece] = status == SsdStatus::OK;
  fail(index, status);
  if (!found.is_checking) {
    found.is_checking = true;
    while (chunk.status == SsdStatus::OK && chunk.done < pieces_ && found.is_read[chunk.done]) {
      const uint32_t next = chunk.done;
      guard.unlock();
      SsdStatus checked = check_piece(next, index);
      if (checked != SsdStatus::OK) {
        SsdHeader again;
        checked = read_again(worker, next, index, again);
      }
      guard.lock();
      ++chunk.done;
      fail(index, checked);
      if (chunk.status == SsdStatus::OK) {
        const uint32_t first = first_extent(next);
        board_->land(plan_[index].slot, first, found.header.extent_crcs.data() + first, first_extent(next + 1) - first);
      }
    }
    found.is_checking = false;
  }
  end_piece(index, ended);
}

void SsdReadJob::fail(size_t chunk, SsdStatus status) {
  if (status != SsdStatus::OK && chunks_[chunk].status == SsdStatus::OK) {
    board_->fail(plan_[chunk].slot);
  }
  SsdPieceJob::fail(chunk, status);
}

// The header is only written by piece 0, which was read before any piece is checked.
SsdStatus SsdReadJob::check_piece(uint32_t piece, size_t chunk) const {
  const uint32_t end = first_extent(piece + 1);
  for (uint32_t extent = first_extent(piece); extent < end; ++extent) {
    const uint8_t* bytes = arena_->data() + plan_[chunk].arena_offset + extent * extent_bytes_;
    if (crc32c(0, bytes, extent_bytes_) != found_[chunk].header.extent_crcs[extent]) {
      return SsdStatus::BAD_CHECKSUM;
    }
  }
  return SsdStatus::OK;
}

}  // namespace kvpool
