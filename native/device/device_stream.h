// A stream of one device: copies in the order in which they are given to it, behind events of others.
//
// What it is: the queue that a client's loads and saves go on, apart from the engine's own streams. What it is not: done with anything
// when a call returns: an event says so. What a copy reads and writes must stay, and stay unchanged, until the event behind it is done.
// Guarantees:
// 1. A call that was refused before anything was queued says so by a fault; one that failed on the way, by a status.
// 2. The host touches no byte that is copied.
// Threads: any; the calls of one stream wait for one another. The lock is held while the driver is called.
#pragma once

#include <memory>
#include <mutex>

#include "device/copier.h"
#include "device/device_event.h"

namespace kvpool {

class DeviceStream;

struct DeviceStreamResult {
  std::shared_ptr<DeviceStream> stream;
  DeviceStatus status{};
};

class DeviceStream : public std::enable_shared_from_this<DeviceStream> {
 public:
  [[nodiscard]] static DeviceStreamResult make(std::shared_ptr<Device> device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // What comes afterwards begins after the event.
  [[nodiscard]] DeviceStatus wait_for(const DeviceEvent& event);
  [[nodiscard]] DeviceEventResult record();

  // One extent of chunks into an engine's blocks, and back. REQUIRES: extent_fault(copy) == nullptr.
  [[nodiscard]] DeviceStatus scatter(const ExtentCopy& copy);
  [[nodiscard]] DeviceStatus gather(const ExtentCopy& copy);
  // REQUIRES: three columns of one length.
  [[nodiscard]] DeviceStatus copy(std::span<const uint64_t> targets, std::span<const uint64_t> sources, std::span<const uint64_t> sizes);

  [[nodiscard]] const Device& device() const noexcept { return *device_; }
  [[nodiscard]] cuda::Stream get() const noexcept { return stream_; }

 private:
  DeviceStream(std::shared_ptr<Device> device, cuda::Stream stream) noexcept
      : device_(std::move(device)), stream_(stream), copier_(device_) {}
  template <typename Add>
  DeviceStatus copy_extent(const ExtentCopy& copy, Add add);

  const std::shared_ptr<Device> device_;
  const cuda::Stream stream_;  // owned
  std::mutex lock_;
  CopyRuns runs_;   // guarded by lock_
  Copier copier_;   // guarded by lock_
};

}  // namespace kvpool
