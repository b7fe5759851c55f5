#include "ssd/ssd_job.h"

namespace kvpool {
namespace {

uint32_t extents_in_piece(uint64_t extents, uint64_t extent_bytes) {
  const uint64_t pieces = std::max<uint64_t>(1, (extents * extent_bytes + SSD_PIECE_BYTES / 2) / SSD_PIECE_BYTES);
  return static_cast<uint32_t>(std::max<uint64_t>(1, extents / pieces));
}

}  // namespace

SsdPieceJob::SsdPieceJob(const SsdHeader& header, size_t chunks)
    : extents_(static_cast<uint32_t>(header.extent_crcs.size())),
      extent_bytes_(header.extent_bytes),
      header_bytes_(header.header_bytes()),
      piece_extents_(extents_in_piece(extents_, extent_bytes_)),
      pieces_((extents_ + piece_extents_ - 1) / piece_extents_),
      chunks_(chunks) {}

bool SsdPieceJob::begin_piece(size_t chunk) {
  const std::lock_guard guard(lock_);
  const bool begins = chunks_[chunk].status == SsdStatus::OK;
  chunks_[chunk].running += begins ? 1U : 0U;
  return begins;
}

void SsdPieceJob::end_piece(size_t chunk, std::vector<SsdOutcome>& ended) {
  --chunks_[chunk].running;
  end_if_over(chunk, ended);
}

void SsdPieceJob::fail(size_t chunk, SsdStatus status) {
  SsdStatus& first = chunks_[chunk].status;
  first = first == SsdStatus::OK ? status : first;
}

void SsdPieceJob::cancel(uint32_t, uint32_t, std::vector<SsdOutcome>& ended) {
  const std::lock_guard guard(lock_);
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (chunks_[chunk].done < pieces_) {
      fail(chunk, SsdStatus::CANCELLED);
    }
    end_if_over(chunk, ended);
  }
}

void SsdPieceJob::end_if_over(size_t index, std::vector<SsdOutcome>& ended) {
  Chunk& chunk = chunks_[index];
  const bool is_over = chunk.status != SsdStatus::OK || chunk.done == pieces_;
  if (is_over && chunk.running == 0 && !chunk.has_ended) {
    chunk.has_ended = true;
    ended.push_back({number(), static_cast<uint32_t>(index), chunk.status, chunk.bytes, take_tokens(index)});
  }
}

}  // namespace kvpool
