#include "mover/mover_lane.h"

#include <algorithm>
#include <ctime>
#include <thread>
#include <utility>

#include "checksum/crc32c.h"
#include "copy/copy_tuning.h"

namespace kvpool {
namespace {

// Between two looks at a piece in flight, longer each time; and while nothing is in flight, which a new chunk ends (guesses).
constexpr std::chrono::microseconds FIRST_NAP{20};
constexpr std::chrono::microseconds LONGEST_NAP{500};
constexpr std::chrono::microseconds UNRESPONSIVE_NAP{20'000};
constexpr std::chrono::microseconds IDLE_NAP{1'000'000};
// Parts of a piece begin where stores past the caches want them to.
constexpr uint64_t PIECE_ALIGNMENT = 64;

uint64_t thread_cpu_ns() noexcept {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<uint64_t>(used.tv_sec) * 1'000'000'000U + static_cast<uint64_t>(used.tv_nsec);
}

}  // namespace

MoverLane::MoverLane(const MoverMemory& memory, MoveJobs& jobs, MoveKind kind, std::unique_ptr<PieceRing> ring,
                     std::shared_ptr<DeviceStream> stream, double answer_s) noexcept
    : memory_(memory),
      jobs_(jobs),
      kind_(kind),
      ring_(std::move(ring)),
      stream_(std::move(stream)),
      answer_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(answer_s))),
      nap_(FIRST_NAP) {}

void MoverLane::run() {
  while (!jobs_.is_abandoned()) {
    retire();
    while (figures_.is_unresponsive) {
      const auto chunk = jobs_.next(kind_);
      if (chunk == nullptr) {
        break;
      }
      jobs_.end(*chunk, MoveOutcome::FAILED);
    }
    if (!figures_.is_unresponsive && ring_->has_free() && fill()) {
      nap_ = FIRST_NAP;
      continue;
    }
    figures_.cpu_ns = thread_cpu_ns();
    if (ring_->in_flight() == 0 && current_ == nullptr && jobs_.is_stopped()) {
      return;
    }
    wait();
  }
}

void MoverLane::wait() {
  if (figures_.is_unresponsive) {
    nap(UNRESPONSIVE_NAP);
    return;
  }
  if (ring_->in_flight() == 0) {
    jobs_.wait(kind_, IDLE_NAP);
    return;
  }
  const bool has_work = current_ != nullptr || jobs_.has_next(kind_);
  if (has_work && !waits_for_piece_) {
    figures_.ring_waits.fetch_add(1, std::memory_order_relaxed);
  }
  waits_for_piece_ = has_work;
  if (has_work) {
    std::this_thread::sleep_for(nap_);
  } else {
    nap(nap_);
  }
  nap_ = std::min(nap_ * 2, LONGEST_NAP);
}

// A new chunk ends it.
void MoverLane::nap(std::chrono::microseconds time) const {
  if (jobs_.is_stopped()) {
    std::this_thread::sleep_for(time);
  } else {
    jobs_.wait(kind_, time);
  }
}

// Fills a piece with what there is, and gives it to the stream. False where there was nothing.
bool MoverLane::fill() {
  MovePiece& piece = ring_->next();
  bool has_moved = false;
  while (piece.filled < ring_->piece_bytes() && (current_ != nullptr || take_next())) {
    if (jobs_.is_stopped()) {
      end_current(piece, MoveOutcome::CANCELLED);
    } else if (!add_part(piece)) {
      end_current(piece, current_->outcome);
    }
    has_moved = true;
  }
  if (!piece.parts.empty()) {
    launch(piece);
  }
  return has_moved;
}

// Chunks that need not be begun end here.
bool MoverLane::take_next() {
  while (auto chunk = jobs_.next(kind_)) {
    const uint32_t landed = memory_.index->landed_at(chunk->slot());
    if (memory_.index->generation_at(chunk->slot()) != chunk->row.generation) {
      jobs_.end(*chunk, MoveOutcome::BAD_SOURCE);
    } else if (kind_ == MoveKind::PROMOTE && ((landed & LANDING_FAILED) != 0 || landed < chunk->row.extents)) {
      jobs_.end(*chunk, MoveOutcome::FAILED);  // it is still being read into the arena
    } else {
      current_ = std::move(chunk);
      return true;
    }
  }
  return false;
}

// False where the chunk has ended badly; `outcome` says how.
bool MoverLane::add_part(MovePiece& piece) {
  MovedChunk& chunk = *current_;
  const uint64_t size = std::min(ring_->piece_bytes() - piece.filled, chunk.row.chunk_bytes - chunk.at);
  uint8_t* const bytes = piece.bytes + piece.filled;
  if (kind_ == MoveKind::PROMOTE) {
    chunk.spoil(copy_in(chunk, bytes, size));
  }
  if (chunk.outcome != MoveOutcome::DONE) {
    return false;
  }
  if (!give(chunk, bytes, size).ok()) {
    chunk.spoil(MoveOutcome::FAILED);
    return false;
  }
  piece.parts.push_back({current_, piece.filled, size});
  piece.filled = round_up(piece.filled + size, PIECE_ALIGNMENT);
  chunk.at += size;
  if (chunk.at == chunk.row.chunk_bytes) {
    piece.ending.push_back(std::move(current_));
    current_ = nullptr;
  }
  return true;
}

DeviceStatus MoverLane::give(const MovedChunk& chunk, const uint8_t* bytes, uint64_t size) {
  const CurrentContext current(*memory_.device);
  if (!current.ok()) {
    return current.status();
  }
  const cuda::Address there = memory_.memory->address() + chunk.row.device_offset + chunk.at;
  const auto here = reinterpret_cast<cuda::Address>(bytes);
  const bool is_up = kind_ == MoveKind::PROMOTE;
  return memory_.device->driver().copy(is_up ? there : here, is_up ? here : there, size, stream_->get());
}

// Copies the next bytes of a chunk, extent by extent; DONE where all extents that end among them are in order.
MoveOutcome MoverLane::copy_in(MovedChunk& chunk, uint8_t* target, uint64_t size) {
  const uint8_t* const source = memory_.arena->data() + chunk.row.arena_offset + chunk.at;
  MoveOutcome found = MoveOutcome::DONE;
  for (uint64_t copied = 0; copied < size && found == MoveOutcome::DONE;) {
    const uint64_t part = std::min(size - copied, chunk.extent_bytes() - chunk.extent_at);
    chunk.crc = copy_crc32c(chunk.crc, target + copied, source + copied, part);
    chunk.extent_at += part;
    copied += part;
    if (chunk.extent_at == chunk.extent_bytes()) {
      found = verdict(chunk);
      ++chunk.extent;
      chunk.extent_at = 0;
      chunk.crc = 0;
    }
  }
  copy_fence();  // the device reads the piece
  return found;
}

// The bytes before the checksum, and that before the generation: if it still stands, all of them were this chunk's.
MoveOutcome MoverLane::verdict(const MovedChunk& chunk) const {
  copy_fence();
  const uint32_t expected = memory_.index->checksum_at(chunk.slot(), chunk.extent);
  const bool is_there = memory_.index->generation_at(chunk.slot()) == chunk.row.generation;
  return is_there && chunk.crc == expected ? MoveOutcome::DONE : MoveOutcome::BAD_SOURCE;
}

// Sums the bytes that the stream has put into a piece.
void MoverLane::sum(MovedChunk& chunk, const uint8_t* bytes, uint64_t size) {
  for (uint64_t summed = 0; summed < size && chunk.outcome == MoveOutcome::DONE;) {
    const uint64_t part = std::min(size - summed, chunk.extent_bytes() - chunk.extent_at);
    chunk.crc = crc32c(chunk.crc, bytes + summed, part);
    chunk.extent_at += part;
    summed += part;
    if (chunk.extent_at == chunk.extent_bytes()) {
      chunk.spoil(verdict(chunk));
      ++chunk.extent;
      chunk.extent_at = 0;
      chunk.crc = 0;
    }
  }
}

// Ends the current chunk behind its last bytes: in the piece that is being filled, in the newest one in flight, or nowhere.
void MoverLane::end_current(MovePiece& filling, MoveOutcome outcome) {
  const std::shared_ptr<MovedChunk> chunk = std::move(current_);
  current_ = nullptr;
  chunk->spoil(outcome);
  if (!filling.parts.empty()) {
    filling.ending.push_back(chunk);
  } else if (chunk->at > 0 && ring_->in_flight() > 0) {
    ring_->newest().ending.push_back(chunk);
  } else {
    jobs_.end(*chunk, chunk->outcome);
  }
}

void MoverLane::launch(MovePiece& piece) {
  piece.is_recorded = piece.event->record(stream_->get()).ok();
  if (ring_->in_flight() == 0) {
    progress_ = Clock::now();
  }
  ring_->queue();
  waits_for_piece_ = false;
  if (!piece.is_recorded) {
    fail(piece);
  }
}

// Takes back all pieces that are done.
void MoverLane::retire() {
  while (ring_->in_flight() > 0) {
    MovePiece& piece = ring_->oldest();
    if (!is_done(piece)) {
      if (!figures_.is_unresponsive && Clock::now() - progress_ > answer_) {
        give_up();
      }
      return;
    }
    settle(piece);
    ring_->free_oldest();
    progress_ = Clock::now();
    nap_ = FIRST_NAP;
  }
  figures_.is_unresponsive = false;
}

// A piece without an event gets one now, behind everything that the stream was given since.
bool MoverLane::is_done(MovePiece& piece) {
  bool done = false;
  DeviceStatus status;
  if (!piece.is_recorded) {
    status = piece.event->record(stream_->get());
    piece.is_recorded = status.ok();
  }
  if (status.ok()) {
    status = piece.event->query(done);
  }
  if (!status.ok()) {
    fail(piece);
  }
  return done;
}

void MoverLane::settle(MovePiece& piece) {
  for (const MovePart& part : piece.parts) {
    if (kind_ == MoveKind::CHECK) {
      sum(*part.chunk, piece.bytes + part.piece_at, part.size);
    }
    figures_.bytes.fetch_add(part.chunk->outcome == MoveOutcome::DONE ? part.size : 0, std::memory_order_relaxed);
  }
  for (const auto& chunk : piece.ending) {
    jobs_.end(*chunk, chunk->outcome);
  }
}

// Nobody knows what becomes of the piece: its chunks end here.
void MoverLane::fail(MovePiece& piece) {
  for (const MovePart& part : piece.parts) {
    part.chunk->spoil(MoveOutcome::FAILED);
    jobs_.end(*part.chunk, part.chunk->outcome);
  }
  for (const auto& chunk : piece.ending) {
    chunk->spoil(MoveOutcome::FAILED);
    jobs_.end(*chunk, chunk->outcome);
  }
  piece.parts.clear();
  piece.ending.clear();
}

// The device does not answer: everything under way has failed. Its pieces stay as they are until it does.
void MoverLane::give_up() {
  figures_.is_unresponsive = true;
  ring_->visit_in_flight([this](MovePiece& piece) { fail(piece); });
  if (current_ != nullptr) {
    jobs_.end(*current_, MoveOutcome::FAILED);
    current_ = nullptr;
  }
}

}  // namespace kvpool
