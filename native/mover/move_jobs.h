// Jobs of a device mover: chunks that wait for a lane, and the ends of those that have ended.
//
//   a chunk:  waiting ──next──► under way ──end──► DONE | BAD_SOURCE | FAILED | CANCELLED
//                └──────────────stop────────────► CANCELLED
//
// Guarantees:
// 1. Every chunk of an accepted job is reported exactly once.
// 2. The line before each lane is bounded: a full one refuses.
// 3. After `abandon` every chunk has been reported, whatever a lane still does.
//
// Threads: any. A chunk's progress belongs to its lane.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/types.h"

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

// One chunk of a job. What follows `row` is its lane's.
struct MovedChunk {
  uint64_t job = 0;
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

class MoveJobs {
 public:
  static constexpr size_t JOBS_MAX = 64;  // of each kind that have not ended

  // Throws std::system_error where there is no descriptor to be had.
  MoveJobs();
  ~MoveJobs();
  MoveJobs(const MoveJobs&) = delete;
  MoveJobs& operator=(const MoveJobs&) = delete;

  // A job's number; 0 where the line is full or stopped. REQUIRES: one row at least.
  [[nodiscard]] uint64_t add(MoveKind kind, const std::vector<DeviceMoveRow>& rows);
  // What has ended since the last call. The descriptor is readable while there is something.
  [[nodiscard]] std::vector<MoveEnd> take_ends();
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
  [[nodiscard]] size_t jobs(MoveKind kind) const;

  // Ends what waits, and takes nothing any more.
  void stop();
  // Ends everything: the lanes do not answer.
  void abandon();
  [[nodiscard]] bool is_stopped() const noexcept { return is_stopped_.load(std::memory_order_acquire); }
  [[nodiscard]] bool is_abandoned() const noexcept { return is_abandoned_.load(std::memory_order_acquire); }

  // For lanes. The next chunk, or nullptr.
  [[nodiscard]] std::shared_ptr<MovedChunk> next(MoveKind kind);
  [[nodiscard]] bool has_next(MoveKind kind) const;
  // Reports a chunk, unless it has been.
  void end(const std::shared_ptr<MovedChunk>& chunk, MoveOutcome outcome);
  // Until there is a chunk for the lane, everything is stopped, or the nap is over.
  void wait(MoveKind kind, std::chrono::microseconds nap) const;

 private:
  struct Job {
    MoveKind kind;
    size_t left;  // chunks that have not ended
  };
  void end_locked(const std::shared_ptr<MovedChunk>& chunk, MoveOutcome outcome);
  [[nodiscard]] std::deque<std::shared_ptr<MovedChunk>>& line(MoveKind kind) { return lines_[static_cast<size_t>(kind)]; }
  [[nodiscard]] const std::deque<std::shared_ptr<MovedChunk>>& line(MoveKind kind) const {
    return lines_[static_cast<size_t>(kind)];
  }

  const int event_fd_;  // owned
  mutable std::mutex lock_;
  mutable std::condition_variable wake_;
  std::deque<std::shared_ptr<MovedChunk>> lines_[MOVE_KINDS];  // guarded by lock_
  std::set<std::shared_ptr<MovedChunk>> unreported_;           // guarded by lock_
  std::map<uint64_t, Job> jobs_;                               // guarded by lock_
  std::vector<MoveEnd> ends_;                                  // guarded by lock_
  uint64_t last_job_ = 0;                                      // guarded by lock_
  std::atomic<bool> is_stopped_ = false;                       // written under lock_
  std::atomic<bool> is_abandoned_ = false;                     // written under lock_
};

}  // namespace kvpool
