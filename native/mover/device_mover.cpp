#include "mover/device_mover.h"

#include "base/check.h"
#include "device/left_behind.h"

namespace kvpool {
namespace {

// How long a mover that nobody has stopped waits for its device.
constexpr std::chrono::milliseconds LAST_WAIT{5000};

}  // namespace

DeviceMoverResult DeviceMover::make(MoverMemory memory, uint64_t ring_bytes, double answer_s) {
  KVPOOL_CHECK(memory.memory->is_writable());
  KVPOOL_CHECK(answer_s > 0);
  const std::shared_ptr<DeviceMover> mover(new DeviceMover(std::make_unique<Core>(std::move(memory))));
  Core& core = *mover->core_;
  for (const MoveKind kind : {MoveKind::PROMOTE, MoveKind::CHECK}) {
    DeviceStatus status;
    auto ring = PieceRing::make(*core.memory.device, ring_bytes, status);
    if (!status.ok()) {
      return {nullptr, status};
    }
    DeviceStreamResult made = DeviceStream::make(core.memory.device);
    if (!made.status.ok()) {
      return {nullptr, made.status};
    }
    core.lanes[static_cast<size_t>(kind)] =
        std::make_unique<MoverLane>(core.memory, core.jobs, kind, std::move(ring), std::move(made.stream), answer_s);
  }
  core.jobs.start(MOVE_KINDS, [&core](unsigned number) { core.lanes[number]->run(); });
  return {mover, {}};
}

DeviceMover::~DeviceMover() {
  const bool is_inherited = process_life() != life_;
  if (is_inherited) {
    leave_behind(std::move(core_));  // its threads are the parent's
  } else if (!stop(LAST_WAIT)) {
    core_->jobs.threads().detach();
    leave_behind(std::move(core_));
  }
}

const char* DeviceMover::fault(MoveKind kind, const std::vector<DeviceMoveRow>& rows) const {
  if (rows.empty()) {
    return "there must be one row at least";
  }
  for (const DeviceMoveRow& row : rows) {
    if (row.extents == 0 || row.extents > UINT32_MAX || row.chunk_bytes == 0 || row.chunk_bytes % row.extents != 0) {
      return "extents must be positive, and a chunk's bytes a multiple of them";
    }
    if (row.generation == 0) {
      return "a chunk has no generation";
    }
    if (kind == MoveKind::PROMOTE && !core_->memory.arena->contains(row.arena_offset, row.chunk_bytes)) {
      return "a chunk lies outside the arena";
    }
    if (!core_->memory.memory->contains(row.device_offset, row.chunk_bytes)) {
      return "a chunk lies outside the device's memory";
    }
    if (!core_->memory.index->covers(SlotAddress::unpacked(row.arena_slot), static_cast<uint32_t>(row.extents))) {
      return "a slot has no words in the index";
    }
  }
  return nullptr;
}

bool DeviceMover::stop(std::chrono::milliseconds timeout) {
  if (core_->jobs.is_abandoned()) {
    return false;
  }
  const bool has_ended = core_->jobs.stop(timeout);
  if (!has_ended) {
    core_->jobs.abandon();
  }
  return has_ended;
}

DeviceMoverStats DeviceMover::stats() const {
  DeviceMoverStats stats;
  stats.promoted_bytes = core_->lanes[0]->figures().bytes;
  stats.checked_bytes = core_->lanes[1]->figures().bytes;
  stats.promotions = core_->jobs.jobs_of(MoveKind::PROMOTE);
  stats.checks = core_->jobs.jobs_of(MoveKind::CHECK);
  for (const auto& lane : core_->lanes) {
    stats.ring_waits += lane->figures().ring_waits;
    stats.cpu_seconds += static_cast<double>(lane->figures().cpu_ns) * 1e-9;
    stats.is_unresponsive = stats.is_unresponsive || lane->figures().is_unresponsive;
  }
  return stats;
}

}  // namespace kvpool
