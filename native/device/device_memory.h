// Memory of a device that other processes can map: the daemon's arena there, and what its clients see of it.
//
//   allocate: cuMemCreate ─► cuMemAddressReserve ─► cuMemMap ─► cuMemSetAccess (read and write)
//   attach:   cuMemImportFromShareableHandle ─► …the same… ─► cuMemSetAccess (read)
//
// What it is: physical memory and its one mapping in this process. What it is not: bytes that the host may touch: the address is the
// device's, for copies alone.
// Invariant: memory that exists is mapped whole, and stays the exporter's as well as each importer's until the last of them is gone.
// A step that fails undoes those before it. It must outlive the copies that use it: nothing here waits for them.
// Threads: any.
#pragma once

#include <memory>

#include "device/device.h"

namespace kvpool {

class DeviceMemory;

struct DeviceMemoryResult {
  std::shared_ptr<DeviceMemory> memory;
  DeviceStatus status{};
};

class DeviceMemory : public std::enable_shared_from_this<DeviceMemory> {
 public:
  // `size` is rounded up to what the driver can give. REQUIRES: size > 0.
  [[nodiscard]] static DeviceMemoryResult allocate(std::shared_ptr<const Device> device, uint64_t size);
  // Maps another process's export for reading. The descriptor stays the caller's. REQUIRES: size > 0, as the exporter has it.
  [[nodiscard]] static DeviceMemoryResult attach(std::shared_ptr<const Device> device, int fd, uint64_t size);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // A new descriptor, which the caller closes.
  [[nodiscard]] DeviceStatus export_to(int& fd) const;

  [[nodiscard]] cuda::Address address() const noexcept { return address_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] bool is_writable() const noexcept { return is_writable_; }
  [[nodiscard]] const std::shared_ptr<const Device>& device() const noexcept { return device_; }
  [[nodiscard]] bool contains(uint64_t offset, uint64_t length) const noexcept {
    return length <= size_ && offset <= size_ - length;
  }

 private:
  DeviceMemory(std::shared_ptr<const Device> device, uint64_t size, bool is_writable) noexcept
      : device_(std::move(device)), size_(size), is_writable_(is_writable) {}
  DeviceStatus map();

  const std::shared_ptr<const Device> device_;
  const uint64_t size_;
  const bool is_writable_;
  bool has_handle_ = false;
  cuda::MemoryHandle handle_ = 0;  // owned where has_handle_
  cuda::Address address_ = 0;      // reserved where not 0
  bool is_mapped_ = false;
};

}  // namespace kvpool
