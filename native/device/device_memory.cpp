#include "device/device_memory.h"

#include <utility>

#include "base/types.h"

namespace kvpool {
namespace {

cuda::AllocationProperties properties_of(const Device& device) noexcept {
  cuda::AllocationProperties properties{};
  properties.type = cuda::ALLOCATION_PINNED;
  properties.handle_types = cuda::HANDLE_POSIX_DESCRIPTOR;
  properties.location = {cuda::LOCATION_DEVICE, device.ordinal()};
  return properties;
}

}  // namespace

DeviceMemoryResult DeviceMemory::allocate(std::shared_ptr<const Device> device, uint64_t size) {
  const CurrentContext current(*device);
  if (!current.ok()) {
    return {nullptr, current.status()};
  }
  const Driver& driver = device->driver();
  const cuda::AllocationProperties properties = properties_of(*device);
  size_t unit = 0;
  if (const DeviceStatus status = driver.granularity(&unit, &properties, cuda::GRANULARITY_MINIMUM); !status.ok()) {
    return {nullptr, status};
  }
  if (unit == 0 || size > UINT64_MAX - unit) {
    return {nullptr, {cuda::INVALID_VALUE, driver.granularity.name()}};
  }
  const std::shared_ptr<DeviceMemory> memory(new DeviceMemory(device, round_up(size, unit), true));
  DeviceStatus status = driver.create(&memory->handle_, memory->size_, &properties, 0);
  memory->has_handle_ = status.ok();
  if (status.ok()) {
    status = memory->map();
  }
  return {status.ok() ? memory : nullptr, status};
}

DeviceMemoryResult DeviceMemory::attach(std::shared_ptr<const Device> device, int fd, uint64_t size) {
  const CurrentContext current(*device);
  if (!current.ok()) {
    return {nullptr, current.status()};
  }
  const std::shared_ptr<DeviceMemory> memory(new DeviceMemory(device, size, false));
  void* const shared = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  DeviceStatus status = device->driver().import_handle(&memory->handle_, shared, cuda::HANDLE_POSIX_DESCRIPTOR);
  memory->has_handle_ = status.ok();
  if (status.ok()) {
    status = memory->map();
  }
  return {status.ok() ? memory : nullptr, status};
}

DeviceStatus DeviceMemory::map() {
  const Driver& driver = device_->driver();
  cuda::Address reserved = 0;
  if (const DeviceStatus status = driver.reserve(&reserved, size_, 0, 0, 0); !status.ok()) {
    return status;
  }
  address_ = reserved;
  if (const DeviceStatus status = driver.map(address_, size_, 0, handle_, 0); !status.ok()) {
    return status;
  }
  is_mapped_ = true;
  const cuda::Access access{{cuda::LOCATION_DEVICE, device_->ordinal()}, is_writable_ ? cuda::ACCESS_READ_WRITE : cuda::ACCESS_READ};
  return driver.set_access(address_, size_, &access, 1);
}

DeviceStatus DeviceMemory::export_to(int& fd) const {
  const CurrentContext current(*device_);
  return current.ok() ? device_->driver().export_handle(&fd, handle_, cuda::HANDLE_POSIX_DESCRIPTOR, 0) : current.status();
}

DeviceMemory::~DeviceMemory() {
  if (device_->is_inherited()) {
    return;
  }
  const CurrentContext current(*device_);
  const Driver& driver = device_->driver();
  if (is_mapped_) {
    device_->note_release(driver.unmap(address_, size_));
  }
  if (address_ != 0) {
    device_->note_release(driver.free_reserved(address_, size_));
  }
  if (has_handle_) {
    device_->note_release(driver.release(handle_));
  }
}

}  // namespace kvpool
