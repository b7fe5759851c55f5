// A ring of pinned memory in pieces, through which a lane moves chunks to a device or from it.
//
//   free ─next─► being filled ─queue─► in flight ─its event, oldest first─► free
//
// What it is: all the pinned memory that a lane ever has, made at once. What it is not: a judge of bytes.
// Invariant: `in_flight` pieces from `oldest` on are read or written by the stream, or were until their event.
// Threads: one.
#pragma once

#include <memory>
#include <vector>

#include "device/device_event.h"
#include "device/pinned_memory.h"
#include "mover/move_jobs.h"

namespace kvpool {

// Bytes of a chunk in a piece.
struct MovePart {
  std::shared_ptr<MovedChunk> chunk;
  uint64_t piece_at;
  uint64_t size;
};

struct MovePiece {
  uint8_t* bytes = nullptr;
  std::unique_ptr<EventHandle> event;
  bool is_recorded = true;  // the event, behind what is in flight
  uint64_t filled = 0;
  std::vector<MovePart> parts;
  std::vector<std::shared_ptr<MovedChunk>> ending;  // chunks that end with this piece
};

class PieceRing {
 public:
  static constexpr uint64_t BYTES_MIN = uint64_t{8} * PAGE_BYTES;

  // REQUIRES: bytes >= BYTES_MIN; the device outlives the ring.
  [[nodiscard]] static std::unique_ptr<PieceRing> make(const Device& device, uint64_t bytes, DeviceStatus& status);

  [[nodiscard]] uint64_t piece_bytes() const noexcept { return piece_bytes_; }
  [[nodiscard]] size_t in_flight() const noexcept { return in_flight_; }
  [[nodiscard]] bool has_free() const noexcept { return in_flight_ < pieces_.size(); }
  // The piece to fill. REQUIRES: has_free().
  [[nodiscard]] MovePiece& next() noexcept { return pieces_[(oldest_ + in_flight_) % pieces_.size()]; }
  // The stream was given what is in `next()`. REQUIRES: has_free().
  void queue() noexcept { ++in_flight_; }
  // REQUIRES: in_flight() > 0.
  [[nodiscard]] MovePiece& oldest() noexcept { return pieces_[oldest_]; }
  [[nodiscard]] MovePiece& newest() noexcept { return pieces_[(oldest_ + in_flight_ - 1) % pieces_.size()]; }
  void free_oldest() noexcept;
  // Calls `visit` with each piece in flight.
  template <typename Visit>
  void visit_in_flight(Visit visit) {
    for (size_t number = 0; number < in_flight_; ++number) {
      visit(pieces_[(oldest_ + number) % pieces_.size()]);
    }
  }

 private:
  PieceRing(std::unique_ptr<PinnedMemory> memory, uint64_t piece_bytes) noexcept
      : memory_(std::move(memory)), piece_bytes_(piece_bytes) {}

  const std::unique_ptr<PinnedMemory> memory_;
  const uint64_t piece_bytes_;
  std::vector<MovePiece> pieces_;
  size_t oldest_ = 0;
  size_t in_flight_ = 0;
};

}  // namespace kvpool
