#include "kvpool/ssd_verify_job.h"

#include <algorithm>
#include <cstdlib>

#include "kvpool/check.h"
#include "kvpool/crc32c.h"

namespace kvpool {
namespace {

static_assert(SSD_PIECE_BYTES % PAGE_BYTES == 0 && SSD_PIECE_BYTES > PAGE_BYTES);

SsdStatus status_of(int error) {
  if (error == 0) {
    return SsdStatus::OK;
  }
  return error == SsdIo::NO_MORE_BYTES ? SsdStatus::SHORT_READ : SsdStatus::IO_ERROR;
}

}  // namespace

void SsdVerifyJob::Free::operator()(uint8_t* pages) const noexcept { std::free(pages); }

SsdVerifyJob::SsdVerifyJob(uint64_t id, std::vector<SsdVerify> chunks)
    : SsdJob(id),
      plan_(std::move(chunks)),
      layers_(static_cast<uint32_t>(plan_.at(0).expected.layer_crcs.size())),
      layer_bytes_(plan_.at(0).expected.layer_bytes),
      piece_layers_(static_cast<uint32_t>(std::clamp<uint64_t>(SSD_PIECE_BYTES / layer_bytes_, 1, layers_))),
      pieces_((layers_ + piece_layers_ - 1) / piece_layers_),
      chunks_(plan_.size()) {
  for (size_t chunk = 0; chunk < plan_.size(); ++chunk) {
    KVPOOL_CHECK(plan_[chunk].expected.layer_crcs.size() == layers_);
    KVPOOL_CHECK(plan_[chunk].expected.layer_bytes == layer_bytes_);
    chunks_[chunk].found.resize(layers_);
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

// Empty where there is no memory.
SsdVerifyJob::Scratch SsdVerifyJob::take_scratch() {
  {
    const std::lock_guard guard(lock_);
    if (!scratch_.empty()) {
      Scratch kept = std::move(scratch_.back());
      scratch_.pop_back();
      return kept;
    }
  }
  return Scratch(static_cast<uint8_t*>(std::aligned_alloc(PAGE_BYTES, SSD_PIECE_BYTES)));
}

bool SsdVerifyJob::run_piece(SsdIo& io, std::vector<SsdOutcome>& ended) {
  size_t index = 0;
  uint32_t piece = 0;
  if (!claim(index, piece)) {
    return false;
  }
  const uint32_t first = piece * piece_layers_;
  std::vector<uint32_t> wanted;
  std::vector<uint32_t> crcs(std::min(piece_layers_, layers_ - first));
  uint64_t bytes = 0;
  Scratch scratch = take_scratch();
  SsdStatus status = scratch == nullptr ? SsdStatus::CANCELLED : SsdStatus::OK;
  if (piece == 0 && status == SsdStatus::OK) {
    status = read_header(io, plan_[index], scratch.get(), wanted);
    bytes += SSD_HEADER_BYTES;
  }
  if (status == SsdStatus::OK) {
    status = read_layers(io, plan_[index], first, scratch.get(), crcs, bytes);
  }
  const std::lock_guard guard(lock_);
  if (scratch != nullptr) {
    scratch_.push_back(std::move(scratch));
  }
  if (status == SsdStatus::OK) {
    std::copy(crcs.begin(), crcs.end(), chunks_[index].found.begin() + static_cast<std::ptrdiff_t>(first));
    if (piece == 0) {
      chunks_[index].wanted = std::move(wanted);
    }
  }
  settle(index, status, bytes, ended);
  return true;
}

SsdStatus SsdVerifyJob::read_header(SsdIo& io, const SsdVerify& plan, uint8_t* pages,
                                    std::vector<uint32_t>& wanted) const {
  iovec part{pages, SSD_HEADER_BYTES};
  const SsdStatus read = status_of(io.read(plan.offset, &part, 1));
  if (read != SsdStatus::OK) {
    return read;
  }
  SsdHeader found;
  const SsdStatus decoded = decode_ssd_header(pages, found);
  const SsdStatus status = decoded == SsdStatus::OK ? compare_ssd_headers(found, plan.expected) : decoded;
  wanted = std::move(found.layer_crcs);
  return status;
}

// Layers need not begin or end with a page: the pages around them are read, and only their own bytes counted.
SsdStatus SsdVerifyJob::read_layers(SsdIo& io, const SsdVerify& plan, uint32_t first, uint8_t* pages,
                                    std::vector<uint32_t>& crcs, uint64_t& bytes) const {
  uint64_t at = first * layer_bytes_;
  const uint64_t end = at + crcs.size() * layer_bytes_;
  while (at < end) {
    const uint64_t page = at / PAGE_BYTES * PAGE_BYTES;
    const uint64_t size = std::min(SSD_PIECE_BYTES, round_up(end, PAGE_BYTES) - page);
    iovec part{pages, size};
    const SsdStatus status = status_of(io.read(plan.offset + SSD_HEADER_BYTES + page, &part, 1));
    if (status != SsdStatus::OK) {
      return status;
    }
    bytes += size;
    const uint64_t until = std::min(end, page + size);
    while (at < until) {
      const uint64_t layer = at / layer_bytes_;
      const uint64_t step = std::min(until, (layer + 1) * layer_bytes_) - at;
      uint32_t& crc = crcs[layer - first];
      crc = crc32c(crc, pages + (at - page), step);
      at += step;
    }
  }
  return SsdStatus::OK;
}

// REQUIRES: `lock_` is held.
void SsdVerifyJob::settle(size_t index, SsdStatus status, uint64_t bytes, std::vector<SsdOutcome>& ended) {
  Chunk& chunk = chunks_[index];
  --chunk.running;
  chunk.bytes += bytes;
  chunk.read += status == SsdStatus::OK ? 1U : 0U;
  if (chunk.status == SsdStatus::OK) {
    const bool differs = chunk.read == pieces_ && chunk.found != chunk.wanted;
    chunk.status = differs ? SsdStatus::BAD_CHECKSUM : status;
  }
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
