// One direction of a device mover: chunks of the arena on their way to the device, or chunks of the device that are checked.
//
//   PROMOTE   arena ─copied and summed in one pass─► piece ─stream─► device   verdict before the stream gets the last extent
//   CHECK     device ─stream─► piece ─summed─► nothing                        verdict behind the piece's event
//
// An extent counts when its CRC-32C is the index's, and the slot still has its generation afterwards: then all bytes were this chunk's.
// Each chunk ends once, behind the event of the last piece that has bytes of it: nothing is written to its slot afterwards. Where an
// event fails, or none comes, its chunks have FAILED at once, and may still be written to: there the stream's order has to do (what comes
// into a slot later is written by the same stream, behind it). Their pieces are not used again before the device has answered.
//
//   answering ──no piece done within the time──► unresponsive: what is in flight has failed, and so does all that comes
//       ▲────────the last of those pieces is done──────┘
//
// Threads: one, but `figures`, which any may read.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "device/device_memory.h"
#include "device/device_stream.h"
#include "mover/move_jobs.h"
#include "mover/piece_ring.h"
#include "shared_index/chunk_table.h"

namespace kvpool {

// What a mover moves between.
struct MoverMemory {
  std::shared_ptr<Device> device;
  std::shared_ptr<DeviceMemory> memory;
  std::shared_ptr<const Mapping> arena;
  std::shared_ptr<const IndexView> index;
};

struct LaneFigures {
  std::atomic<uint64_t> bytes = 0;       // of extents that were in order
  std::atomic<uint64_t> ring_waits = 0;  // times that a chunk waited for a piece
  std::atomic<uint64_t> cpu_ns = 0;
  std::atomic<bool> is_unresponsive = false;
};

class MoverLane {
 public:
  // `answer_s`: for how long no piece may be done before the device counts as unresponsive.
  MoverLane(const MoverMemory& memory, MoveJobs& jobs, MoveKind kind, std::unique_ptr<PieceRing> ring,
            std::shared_ptr<DeviceStream> stream, double answer_s) noexcept;

  // Moves until the jobs are stopped and nothing is in flight, or they are abandoned.
  void run();
  [[nodiscard]] const LaneFigures& figures() const noexcept { return figures_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool fill();
  bool take_next();
  bool add_part(MovePiece& piece);
  DeviceStatus give(const MovedChunk& chunk, const uint8_t* bytes, uint64_t size);
  MoveOutcome copy_in(MovedChunk& chunk, uint8_t* target, uint64_t size);
  void sum(MovedChunk& chunk, const uint8_t* bytes, uint64_t size);
  [[nodiscard]] MoveOutcome verdict(const MovedChunk& chunk) const;
  void end_current(MovePiece& filling, MoveOutcome outcome);
  void launch(MovePiece& piece);
  void retire();
  [[nodiscard]] bool is_done(MovePiece& piece);
  void settle(MovePiece& piece);
  void fail(MovePiece& piece);
  void give_up();
  void wait();
  void nap(std::chrono::microseconds time) const;

  const MoverMemory& memory_;
  MoveJobs& jobs_;
  const MoveKind kind_;
  const std::unique_ptr<PieceRing> ring_;
  const std::shared_ptr<DeviceStream> stream_;
  const Clock::duration answer_;
  std::shared_ptr<MovedChunk> current_;  // whose bytes come next
  Clock::time_point progress_;           // when a piece was done last, or the first one began
  std::chrono::microseconds nap_;
  bool waits_for_piece_ = false;
  LaneFigures figures_;
};

}  // namespace kvpool
