// One device: its primary context, which an engine in the same process shares, and how copies go on it.
//
// What it is: what everything else of a device hangs on: memory, streams and events hold it, so that it is released last. What it is
// not: the thread's current context: each call that needs one makes it current for itself (CurrentContext).
// How many pieces are copied at once, in this order (copier.h): BATCH where the driver has cuMemcpyBatchAsync (12.8), KERNEL where it
// compiles the gather kernel, SINGLE else. Found once, when the device is opened.
// A forked child has no context: objects that it inherited release nothing there.
// Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/process_life.h"
#include "device/driver.h"

namespace kvpool {

enum class CopyMethod : uint8_t { BATCH, KERNEL, SINGLE };

[[nodiscard]] const char* name_of(CopyMethod method) noexcept;

class Device;
class DescriptorRing;

struct DeviceResult {
  std::shared_ptr<Device> device;
  std::string missing;  // a library or symbol, and what to do
  std::string fault;    // of a call
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  [[nodiscard]] static DeviceResult open(const std::string& driver, int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const Driver& driver() const noexcept { return *driver_; }
  [[nodiscard]] cuda::Context context() const noexcept { return context_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] const cuda::Uuid& uuid() const noexcept { return uuid_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int driver_version() const noexcept { return version_; }
  [[nodiscard]] CopyMethod copy_method() const noexcept { return method_; }
  [[nodiscard]] bool registers_read_only() const noexcept { return registers_read_only_; }
  // REQUIRES: the method is BATCH, or KERNEL.
  [[nodiscard]] cuda::BatchCall batch() const noexcept { return batch_; }
  [[nodiscard]] cuda::Function gather() const noexcept { return gather_; }

  // Whether kernels of the device can read memory at this address: its own, or pinned. REQUIRES: its context is current.
  [[nodiscard]] bool reaches(cuda::Address address) const noexcept;

  // Descriptors for one stream's launches, which it gives back; nothing where there is no pinned memory to be had.
  // REQUIRES: the context is current.
  [[nodiscard]] std::unique_ptr<DescriptorRing> take_ring(DeviceStatus& status);
  void give_back(std::unique_ptr<DescriptorRing> ring);

  [[nodiscard]] std::string text(DeviceStatus status) const { return driver_->text(status); }
  // For destructors, which can do no more about a call that failed than count it.
  void note_release(DeviceStatus status) const noexcept;
  [[nodiscard]] uint64_t failed_releases() const noexcept { return failed_releases_.load(std::memory_order_relaxed); }
  // Whether this is a forked child's copy.
  [[nodiscard]] bool is_inherited() const noexcept { return process_life() != life_; }

 private:
  Device(std::shared_ptr<const Driver> driver, cuda::DeviceHandle handle, int ordinal, cuda::Context context) noexcept;
  DeviceStatus describe();
  void choose_method();

  const std::shared_ptr<const Driver> driver_;
  const cuda::DeviceHandle handle_;
  const int ordinal_;
  const cuda::Context context_;
  const uint32_t life_ = process_life();
  cuda::Uuid uuid_{};
  std::string name_;
  int version_ = 0;
  bool registers_read_only_ = false;
  CopyMethod method_ = CopyMethod::SINGLE;
  cuda::BatchCall batch_ = nullptr;
  cuda::Module module_ = nullptr;  // owned
  cuda::Function gather_ = nullptr;
  mutable std::atomic<uint64_t> failed_releases_ = 0;
  std::mutex lock_;
  std::vector<std::unique_ptr<DescriptorRing>> rings_;       // guarded by lock_
  std::vector<std::unique_ptr<DescriptorRing>> lost_rings_;  // guarded by lock_; a launch may still read them
};

// A device's context as the thread's current one, for the life of this object.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device) noexcept;
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  [[nodiscard]] bool ok() const noexcept { return status_.ok(); }
  [[nodiscard]] DeviceStatus status() const noexcept { return status_; }

 private:
  const Device& device_;
  DeviceStatus status_;
};

// The ordinal of the device that an address belongs to; nothing for host memory. `fault`: why it cannot be found out.
struct FoundOrdinal {
  std::optional<int> ordinal;
  std::string missing;
  std::string fault;
};
[[nodiscard]] FoundOrdinal find_ordinal(const std::string& driver, cuda::Address address);

}  // namespace kvpool
