// Host memory that a device copies from and to without another copy in between.
//
// What it is: memory of its own (PinnedMemory), and a shared mapping, pinned as long as somebody holds the pin (PinnedMapping). What it is
// not: needed for right bytes: copies of memory that is not pinned are slower, and not made by the kernel (copier.h).
// A mapping that the driver refuses to pin stays usable: `is_pinned` is false, `fault` says why. One that somebody else has pinned
// counts as pinned, and stays theirs. Both must outlive the copies that use them: nothing here waits.
// Threads: any.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/memory.h"
#include "device/device.h"

namespace kvpool {

class PinnedMemory;

struct PinnedMemoryResult {
  std::unique_ptr<PinnedMemory> memory;
  DeviceStatus status{};
};

// Held by what belongs to the device: it does not keep the device itself.
class PinnedMemory {
 public:
  // REQUIRES: size > 0; the device outlives the memory.
  [[nodiscard]] static PinnedMemoryResult allocate(const Device& device, uint64_t size);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  [[nodiscard]] uint8_t* data() const noexcept { return data_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }

 private:
  PinnedMemory(const Device& device, uint8_t* data, uint64_t size) noexcept : device_(device), data_(data), size_(size) {}

  const Device& device_;
  uint8_t* const data_;
  const uint64_t size_;
};

class PinnedMapping : public std::enable_shared_from_this<PinnedMapping> {
 public:
  // `is_written`: the device writes to it too. REQUIRES: the mapping is writable then.
  [[nodiscard]] static std::shared_ptr<PinnedMapping> pin(std::shared_ptr<const Device> device,
                                                          std::shared_ptr<const Mapping> mapping, bool is_written);
  ~PinnedMapping();
  PinnedMapping(const PinnedMapping&) = delete;
  PinnedMapping& operator=(const PinnedMapping&) = delete;

  [[nodiscard]] bool is_pinned() const noexcept { return fault_.empty(); }
  [[nodiscard]] const std::string& fault() const noexcept { return fault_; }

 private:
  PinnedMapping(std::shared_ptr<const Device> device, std::shared_ptr<const Mapping> mapping, std::string fault,
                bool is_owner) noexcept
      : device_(std::move(device)), mapping_(std::move(mapping)), fault_(std::move(fault)), is_owner_(is_owner) {}

  const std::shared_ptr<const Device> device_;
  const std::shared_ptr<const Mapping> mapping_;
  const std::string fault_;
  const bool is_owner_;
};

}  // namespace kvpool
