#include "mover/piece_ring.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

// A piece is long enough that the driver's work for it does not count, and there are enough of them that the host fills some while the
// device copies others (guesses).
constexpr uint64_t PIECE_BYTES_WANTED = uint64_t{1} << 20;
constexpr uint64_t PIECES_MIN = 8;
constexpr uint64_t PIECES_MAX = 64;

}  // namespace

std::unique_ptr<PieceRing> PieceRing::make(const Device& device, uint64_t bytes, DeviceStatus& status) {
  KVPOOL_CHECK(bytes >= BYTES_MIN);
  const uint64_t count = std::clamp(bytes / PIECE_BYTES_WANTED, PIECES_MIN, PIECES_MAX);
  const uint64_t piece_bytes = bytes / count / PAGE_BYTES * PAGE_BYTES;
  auto allocated = PinnedMemory::allocate(device, count * piece_bytes);
  status = allocated.status;
  if (!status.ok()) {
    return nullptr;
  }
  std::unique_ptr<PieceRing> ring(new PieceRing(std::move(allocated.memory), piece_bytes));
  for (uint64_t number = 0; number < count; ++number) {
    MovePiece piece;
    piece.bytes = ring->memory_->data() + number * piece_bytes;
    piece.event = EventHandle::make(device, status);
    if (!status.ok()) {
      return nullptr;
    }
    ring->pieces_.push_back(std::move(piece));
  }
  return ring;
}

void PieceRing::free_oldest() noexcept {
  KVPOOL_CHECK(in_flight_ > 0);
  MovePiece& piece = pieces_[oldest_];
  piece.filled = 0;
  piece.parts.clear();
  piece.ending.clear();
  oldest_ = (oldest_ + 1) % pieces_.size();
  --in_flight_;
}

}  // namespace kvpool
