// The daemon's copies to a device and checks of what is there: two lanes on threads of their own, each with a ring of pinned memory.
//
// What it is: the only writer of the device's arena. What it is not: a judge of what is worth a place there, or the one who publishes:
// the owner does, when a chunk is reported DONE.
// Guarantees:
// 1. Every chunk of an accepted job is reported exactly once, as `move_jobs.h` has it, also when the device does not answer.
// 2. Pinned memory, streams and events are made with the mover, and none afterwards.
// 3. A mover whose device did not answer until the end leaves its threads and memory behind: the device may still use them.
//
// Threads: any; `stop` and the destructor one at a time.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "mover/mover_lane.h"

namespace kvpool {

struct DeviceMoverStats {
  uint64_t promoted_bytes = 0;
  uint64_t checked_bytes = 0;
  uint64_t ring_waits = 0;
  uint64_t promotions = 0;  // jobs that have not ended
  uint64_t checks = 0;
  double cpu_seconds = 0;
  bool is_unresponsive = false;
};

class DeviceMover;

struct DeviceMoverResult {
  std::shared_ptr<DeviceMover> mover;
  DeviceStatus status{};
};

class DeviceMover {
 public:
  // `ring_bytes`: of each lane. REQUIRES: ring_bytes >= PieceRing::BYTES_MIN; memory that is written to; answer_s > 0.
  // Throws std::system_error where there are no threads or descriptors to be had.
  [[nodiscard]] static DeviceMoverResult make(MoverMemory memory, uint64_t ring_bytes, double answer_s = DEVICE_ANSWER_S);
  ~DeviceMover();
  DeviceMover(const DeviceMover&) = delete;
  DeviceMover& operator=(const DeviceMover&) = delete;

  // What is wrong with rows, or nullptr: then they lie in the arena, the device's memory and the index.
  [[nodiscard]] const char* fault(MoveKind kind, const std::vector<DeviceMoveRow>& rows) const;
  // A job's number; 0: the line is full or stopped. REQUIRES: fault(kind, rows) == nullptr.
  [[nodiscard]] uint64_t add(MoveKind kind, const std::vector<DeviceMoveRow>& rows) { return core_->jobs.add(kind, rows); }
  [[nodiscard]] std::vector<MoveEnd> take_outcomes(size_t limit = SIZE_MAX) { return core_->jobs.take_outcomes(limit); }
  [[nodiscard]] int event_fd() const noexcept { return core_->jobs.event_fd(); }

  // Cancels what is left and ends the threads. False: the device does not answer; everything is reported, the threads are abandoned.
  bool stop(std::chrono::milliseconds timeout);

  [[nodiscard]] DeviceMoverStats stats() const;

 private:
  struct Core {
    explicit Core(MoverMemory moved) : memory(std::move(moved)) {}
    const MoverMemory memory;
    MoveJobs jobs;
    std::array<std::unique_ptr<MoverLane>, MOVE_KINDS> lanes;
  };
  explicit DeviceMover(std::unique_ptr<Core> core) noexcept : core_(std::move(core)) {}

  const uint32_t life_ = process_life();
  std::unique_ptr<Core> core_;
};

}  // namespace kvpool
