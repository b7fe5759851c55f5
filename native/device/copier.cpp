#include "device/copier.h"

#include <algorithm>

#include "device/left_behind.h"

namespace kvpool {
namespace {

constexpr unsigned THREADS = 256;
// Blocks of threads of a launch: enough to keep a link to the host busy, few enough to leave an engine its processors (guess).
constexpr unsigned BLOCKS_MAX = 128;
// How long a ring that goes waits for the launches that read it (guess).
constexpr double LAST_WAIT_S = 1.0;

}  // namespace

std::unique_ptr<DescriptorRing> DescriptorRing::make(const Device& device, DeviceStatus& status) {
  auto allocated = PinnedMemory::allocate(device, LAUNCHES * DESCRIPTORS * sizeof(CopyDescriptor));
  status = allocated.status;
  if (!status.ok()) {
    return nullptr;
  }
  std::unique_ptr<DescriptorRing> ring(new DescriptorRing(std::move(allocated.memory)));
  for (Launch& launch : ring->launches_) {
    launch.event = EventHandle::make(device, status);
    if (!status.ok()) {
      return nullptr;
    }
  }
  return ring;
}

DescriptorRing::~DescriptorRing() {
  for (const Launch& launch : launches_) {
    bool is_done = launch.event == nullptr;
    if (launch.event != nullptr && launch.is_recorded && !launch.event->wait(LAST_WAIT_S, is_done).ok()) {
      is_done = true;  // a device that has failed runs nothing more
    }
    if (!is_done) {
      leave_behind(std::move(memory_));
      return;
    }
  }
}

CopyDescriptor* DescriptorRing::claim(cuda::Stream stream, DeviceStatus& status) {
  Launch& launch = launches_[next_];
  if (!launch.is_recorded) {
    status = launch.event->record(stream);
    if (!status.ok()) {
      return nullptr;
    }
    launch.is_recorded = true;
  }
  bool is_done = false;
  status = launch.event->wait(DEVICE_ANSWER_S, is_done);
  if (status.ok() && !is_done) {
    status = {cuda::TIMEOUT, "cuEventQuery"};
  }
  return is_done ? reinterpret_cast<CopyDescriptor*>(memory_->data()) + next_ * DESCRIPTORS : nullptr;
}

DeviceStatus DescriptorRing::commit(cuda::Stream stream) {
  Launch& launch = launches_[next_];
  const DeviceStatus status = launch.event->record(stream);
  launch.is_recorded = status.ok();
  next_ = (next_ + 1) % LAUNCHES;
  return status;
}

bool DescriptorRing::is_recorded() const noexcept {
  return std::all_of(launches_.begin(), launches_.end(), [](const Launch& launch) { return launch.is_recorded; });
}

Copier::~Copier() {
  if (ring_ != nullptr) {
    device_->give_back(std::move(ring_));
  }
}

DeviceStatus Copier::copy_many(CopyRuns& runs, bool is_reachable, cuda::Stream stream) {
  switch (device_->copy_method()) {
    case CopyMethod::BATCH:
      return copy_batches(runs, stream);
    case CopyMethod::KERNEL:
      return is_reachable ? copy_pieces(runs, stream) : copy_singly(runs, stream);
    default:
      return copy_singly(runs, stream);
  }
}

DeviceStatus Copier::copy_batches(CopyRuns& runs, cuda::Stream stream) const {
  for (size_t first = 0; first < runs.count(); first += BATCH_COPIES_MAX) {
    const size_t count = std::min(BATCH_COPIES_MAX, runs.count() - first);
    cuda::CopyAttributes attributes{};
    attributes.source_order = cuda::SOURCE_IN_STREAM_ORDER;
    size_t attributes_from = 0;
    size_t failed = 0;
    const cuda::Result code = device_->batch()(runs.targets() + first, runs.sources() + first, runs.sizes() + first, count, &attributes,
                                               &attributes_from, 1, &failed, stream);
    if (code == cuda::INVALID_VALUE) {
      return copy_singly(runs, stream);  // the same once more, and what it refuses has a name
    }
    if (code != cuda::SUCCESS) {
      return {code, cuda::BATCH_NAME};
    }
  }
  return {};
}

DeviceStatus Copier::copy_singly(const CopyRuns& runs, cuda::Stream stream) const {
  for (size_t run = 0; run < runs.count(); ++run) {
    const DeviceStatus status = device_->driver().copy(runs.target(run), runs.source(run), runs.size(run), stream);
    if (!status.ok()) {
      return status;
    }
  }
  return {};
}

DeviceStatus Copier::copy_pieces(const CopyRuns& runs, cuda::Stream stream) {
  DeviceStatus status;
  if (ring_ == nullptr) {
    ring_ = device_->take_ring(status);
  }
  CopyDescriptor* room = nullptr;
  unsigned filled = 0;
  for (size_t run = 0; status.ok() && run < runs.count(); ++run) {
    for (uint64_t at = 0; status.ok() && at < runs.size(run); at += PIECE_BYTES) {
      if (room == nullptr) {
        room = ring_->claim(stream, status);
        if (!status.ok()) {
          return status;
        }
      }
      room[filled++] = {runs.target(run) + at, runs.source(run) + at, std::min(PIECE_BYTES, runs.size(run) - at)};
      if (filled == DescriptorRing::DESCRIPTORS) {
        status = launch(room, filled, stream);
        room = nullptr;
        filled = 0;
      }
    }
  }
  return status.ok() && filled > 0 ? launch(room, filled, stream) : status;
}

DeviceStatus Copier::launch(CopyDescriptor* descriptors, unsigned count, cuda::Stream stream) {
  auto address = reinterpret_cast<cuda::Address>(descriptors);
  void* arguments[] = {&address, &count};
  const DeviceStatus status = device_->driver().launch(device_->gather(), std::min(count, BLOCKS_MAX), 1, 1, THREADS, 1, 1, 0, stream,
                                                       arguments, nullptr);
  return status.ok() ? ring_->commit(stream) : status;
}

}  // namespace kvpool
