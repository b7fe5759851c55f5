#include "device/pinned_memory.h"

#include <utility>

#include "base/check.h"

namespace kvpool {

PinnedMemoryResult PinnedMemory::allocate(const Device& device, uint64_t size) {
  const CurrentContext current(device);
  if (!current.ok()) {
    return {nullptr, current.status()};
  }
  void* data = nullptr;
  const DeviceStatus status =
      device.driver().allocate_host(&data, size, cuda::HOST_ALLOCATION_PORTABLE | cuda::HOST_ALLOCATION_MAPPED);
  if (!status.ok()) {
    return {nullptr, status};
  }
  return {std::unique_ptr<PinnedMemory>(new PinnedMemory(device, static_cast<uint8_t*>(data), size)), status};
}

PinnedMemory::~PinnedMemory() {
  if (!device_.is_inherited()) {
    const CurrentContext current(device_);
    device_.note_release(device_.driver().free_host(data_));
  }
}

std::shared_ptr<PinnedMapping> PinnedMapping::pin(std::shared_ptr<const Device> device, std::shared_ptr<const Mapping> mapping,
                                                  bool is_written) {
  KVPOOL_CHECK(mapping->is_writable() || !is_written);
  if (!mapping->is_writable() && !device->registers_read_only()) {
    return std::shared_ptr<PinnedMapping>(new PinnedMapping(std::move(device), std::move(mapping),
                                                            "the device registers no memory that is mapped read-only", false));
  }
  DeviceStatus status;
  {
    const CurrentContext current(*device);
    const unsigned access = is_written || !device->registers_read_only() ? 0U : cuda::REGISTRATION_READ_ONLY;
    status = current.ok() ? device->driver().register_host(mapping->data(), mapping->size(),
                                                           cuda::REGISTRATION_PORTABLE | cuda::REGISTRATION_MAPPED | access)
                          : current.status();
  }
  const bool is_others = status.code == cuda::HOST_MEMORY_ALREADY_REGISTERED;
  std::string fault = status.ok() || is_others ? "" : device->text(status);
  return std::shared_ptr<PinnedMapping>(new PinnedMapping(std::move(device), std::move(mapping), std::move(fault), status.ok()));
}

PinnedMapping::~PinnedMapping() {
  if (is_owner_ && !device_->is_inherited()) {
    const CurrentContext current(*device_);
    device_->note_release(device_->driver().unregister_host(mapping_->data()));
  }
}

}  // namespace kvpool
