#include "device/device_stream.h"

#include <algorithm>

namespace kvpool {

DeviceStreamResult DeviceStream::make(std::shared_ptr<Device> device) {
  const CurrentContext current(*device);
  if (!current.ok()) {
    return {nullptr, current.status()};
  }
  cuda::Stream stream = nullptr;
  const DeviceStatus status = device->driver().create_stream(&stream, cuda::STREAM_NON_BLOCKING);
  if (!status.ok()) {
    return {nullptr, status};
  }
  return {std::shared_ptr<DeviceStream>(new DeviceStream(std::move(device), stream)), status};
}

// What it was given goes on: the driver takes the stream away when that is through.
DeviceStream::~DeviceStream() {
  if (!device_->is_inherited()) {
    const CurrentContext current(*device_);
    device_->note_release(device_->driver().destroy_stream(stream_));
  }
}

DeviceStatus DeviceStream::wait_for(const DeviceEvent& event) {
  const CurrentContext current(*device_);
  return current.ok() ? device_->driver().wait_event(stream_, event.get(), 0) : current.status();
}

DeviceEventResult DeviceStream::record() { return DeviceEvent::record(device_, stream_); }

template <typename Add>
DeviceStatus DeviceStream::copy_extent(const ExtentCopy& copy, Add add) {
  const CurrentContext current(*device_);
  if (!current.ok()) {
    return current.status();
  }
  const auto reaches = [this](uint64_t address) { return device_->reaches(address); };
  const bool is_reachable = device_->copy_method() == CopyMethod::KERNEL &&
                            reaches(reinterpret_cast<uintptr_t>(copy.view.bases[copy.extent])) &&
                            std::all_of(copy.chunks.begin(), copy.chunks.end(), reaches);
  const std::lock_guard guard(lock_);
  runs_.clear();
  add(runs_, copy);
  return copier_.copy_many(runs_, is_reachable, stream_);
}

DeviceStatus DeviceStream::scatter(const ExtentCopy& copy) { return copy_extent(copy, add_scatter); }

DeviceStatus DeviceStream::gather(const ExtentCopy& copy) { return copy_extent(copy, add_gather); }

DeviceStatus DeviceStream::copy(std::span<const uint64_t> targets, std::span<const uint64_t> sources, std::span<const uint64_t> sizes) {
  const CurrentContext current(*device_);
  if (!current.ok()) {
    return current.status();
  }
  const auto reaches = [this](uint64_t address) { return device_->reaches(address); };
  const bool is_reachable = device_->copy_method() == CopyMethod::KERNEL && std::all_of(targets.begin(), targets.end(), reaches) &&
                            std::all_of(sources.begin(), sources.end(), reaches);
  const std::lock_guard guard(lock_);
  runs_.clear();
  for (size_t row = 0; row < sizes.size(); ++row) {
    runs_.add(targets[row], sources[row], sizes[row]);
  }
  return copier_.copy_many(runs_, is_reachable, stream_);
}

}  // namespace kvpool
