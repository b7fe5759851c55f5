// Jobs of a device mover: chunks that wait for a lane, each a part of its job, and the ends of those that have ended.
//
//   a chunk:  waiting ──next──► under way ──end──► DONE | BAD_SOURCE | FAILED | CANCELLED
//                └──────────────stop────────────► CANCELLED
//
// Beside what a JobLine guarantees: after `abandon` every chunk has been reported, whatever a lane still does.
// Threads: any. A chunk's progress belongs to its lane.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.h"
#include "threads/job_line.h"

namespace kvpool {

// A chunk to move, as it crosses packed.
struct DeviceMoveRow {
  uint64_t arena_offset;
  uint64_t arena_slot;  // SlotAddress, packed: whose generation and checksums count
  uint64_t generation;  // of that slot
  uint64_t device_offset;
  uint64_t chunk_bytes;
  uint64_t extents;
};
static_assert(sizeof(DeviceMoveRow) == 48);

// The numbers of kvpool.tiers.base.Outcome.
enum class MoveOutcome : uint8_t { DONE = 0, BAD_SOURCE = 1, FAILED = 2, CANCELLED = 3 };

enum class MoveKind : uint8_t { PROMOTE = 0, CHECK = 1 };
inline constexpr size_t MOVE_KINDS = 2;

struct MoveEnd {
  uint64_t job;
  uint32_t chunk;
  MoveOutcome outcome;
};

struct MoveJob;

// One chunk of a job. What follows `row` is its lane's.
struct MovedChunk {
  MoveJob* job = nullptr;  // which has the chunk
  uint32_t number = 0;
  DeviceMoveRow row{};
  uint64_t at = 0;        // bytes that the stream was given
  uint32_t extent = 0;     // whose bytes are summed
  uint64_t extent_at = 0;  // bytes of it that are in `crc`
  uint32_t crc = 0;
  MoveOutcome outcome = MoveOutcome::DONE;  // if it ended now

  [[nodiscard]] uint64_t extent_bytes() const noexcept { return row.chunk_bytes / row.extents; }
  [[nodiscard]] SlotAddress slot() const noexcept { return SlotAddress::unpacked(row.arena_slot); }
  // The first thing that went wrong stays.
  void spoil(MoveOutcome worse) noexcept { outcome = outcome == MoveOutcome::DONE ? worse : outcome; }
};

struct MoveJob : LineJob {
  explicit MoveJob(const std::vector<DeviceMoveRow>& rows);
  std::vector<MovedChunk> chunks;
};

// A kind is an urgency, and a lane each.
class MoveJobs final : public JobLine<MoveJob, MoveEnd> {
 public:
  static constexpr size_t JOBS_MAX = 64;  // of each kind

  // Throws std::system_error where there is no descriptor to be had.
  MoveJobs() : JobLine("kvpool-hbm", MOVE_KINDS, JOBS_MAX) {}

  // A job's number; 0 where the line is full or stopped. REQUIRES: one row at least.
  [[nodiscard]] uint64_t add(MoveKind kind, const std::vector<DeviceMoveRow>& rows);
  [[nodiscard]] size_t jobs_of(MoveKind kind) const { return jobs(static_cast<size_t>(kind)); }

  // Ends everything: the lanes do not answer, and their threads are given up.
  void abandon();
  [[nodiscard]] bool is_abandoned() const noexcept { return is_abandoned_.load(std::memory_order_acquire); }

  using JobLine::is_stopped;
  using JobLine::start;
  using JobLine::threads;

  // For lanes. The next chunk, or nullptr.
  [[nodiscard]] std::shared_ptr<MovedChunk> next(MoveKind kind);
  [[nodiscard]] bool has_next(MoveKind kind) const;
  // Reports a chunk, unless it has been.
  void end(const MovedChunk& chunk, MoveOutcome outcome);
  // Until there is a chunk for the lane, everything is stopped, or the nap is over; may return early.
  void wait(MoveKind kind, std::chrono::microseconds nap) const;

 private:
  void drop(const Rest& rest) override;
  [[nodiscard]] bool is_waiting(MoveKind kind) const;

  std::atomic<bool> is_abandoned_ = false;  // written under the lock
};

}  // namespace kvpool
