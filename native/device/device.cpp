#include "device/device.h"

#include <utility>

#include "device/copier.h"
#include "device/gather_kernel.h"

namespace kvpool {
namespace {

constexpr int NAME_BYTES = 256;

}  // namespace

const char* name_of(CopyMethod method) noexcept {
  switch (method) {
    case CopyMethod::BATCH:
      return "batch";
    case CopyMethod::KERNEL:
      return "kernel";
    default:
      return "single";
  }
}

CurrentContext::CurrentContext(const Device& device) noexcept
    : device_(device), status_(device.driver().push_context(device.context())) {}

CurrentContext::~CurrentContext() {
  if (status_.ok()) {
    cuda::Context popped = nullptr;
    device_.note_release(device_.driver().pop_context(&popped));
  }
}

Device::Device(std::shared_ptr<const Driver> driver, cuda::DeviceHandle handle, int ordinal, cuda::Context context) noexcept
    : driver_(std::move(driver)), handle_(handle), ordinal_(ordinal), context_(context) {}

DeviceResult Device::open(const std::string& path, int ordinal) {
  DriverResult loaded = Driver::load(path);
  if (loaded.driver == nullptr) {
    return {nullptr, std::move(loaded.fault), ""};
  }
  const Driver& driver = *loaded.driver;
  if (const DeviceStatus status = driver.init(0); !status.ok()) {
    return {nullptr, "", driver.text(status)};
  }
  cuda::DeviceHandle handle = 0;
  if (const DeviceStatus status = driver.get_device(&handle, ordinal); !status.ok()) {
    return {nullptr, "", driver.text(status)};
  }
  cuda::Context context = nullptr;
  if (const DeviceStatus status = driver.retain_context(&context, handle); !status.ok()) {
    return {nullptr, "", driver.text(status)};
  }
  const std::shared_ptr<Device> device(new Device(loaded.driver, handle, ordinal, context));
  const CurrentContext current(*device);
  const DeviceStatus status = current.ok() ? device->describe() : current.status();
  if (!status.ok()) {
    return {nullptr, "", driver.text(status)};
  }
  device->choose_method();
  return {device, "", ""};
}

DeviceStatus Device::describe() {
  char name[NAME_BYTES] = {};
  if (const DeviceStatus status = driver_->device_name(name, NAME_BYTES - 1, handle_); !status.ok()) {
    return status;
  }
  name_ = name;
  if (const DeviceStatus status = driver_->device_uuid(&uuid_, handle_); !status.ok()) {
    return status;
  }
  int supported = 0;
  if (const DeviceStatus status = driver_->device_attribute(&supported, cuda::ATTRIBUTE_READ_ONLY_REGISTRATION, handle_);
      !status.ok()) {
    return status;
  }
  registers_read_only_ = supported != 0;
  return driver_->version(&version_);
}

// A method that cannot be had is none: the next one copies as well.
void Device::choose_method() {
  batch_ = reinterpret_cast<cuda::BatchCall>(driver_->find_version(cuda::BATCH_NAME, cuda::BATCH_VERSION));
  if (batch_ != nullptr) {
    method_ = CopyMethod::BATCH;
  } else if (driver_->load_module(&module_, GATHER_KERNEL).ok() &&
             driver_->find_function(&gather_, module_, GATHER_NAME).ok()) {
    method_ = CopyMethod::KERNEL;
  }
}

Device::~Device() {
  if (is_inherited()) {
    return;
  }
  {
    const CurrentContext current(*this);
    rings_.clear();
    lost_rings_.clear();
    if (module_ != nullptr && current.ok()) {
      note_release(driver_->unload_module(module_));
    }
  }
  note_release(driver_->release_context(handle_));
}

bool Device::reaches(cuda::Address address) const noexcept {
  cuda::Address seen = 0;
  return driver_->pointer_attribute(&seen, cuda::POINTER_DEVICE_ADDRESS, address).ok() && seen == address;
}

std::unique_ptr<DescriptorRing> Device::take_ring(DeviceStatus& status) {
  {
    const std::lock_guard guard(lock_);
    if (!rings_.empty()) {
      auto ring = std::move(rings_.back());
      rings_.pop_back();
      return ring;
    }
  }
  return DescriptorRing::make(*this, status);
}

void Device::give_back(std::unique_ptr<DescriptorRing> ring) {
  const std::lock_guard guard(lock_);
  (ring->is_recorded() ? rings_ : lost_rings_).push_back(std::move(ring));
}

void Device::note_release(DeviceStatus status) const noexcept {
  if (!status.ok()) {
    failed_releases_.fetch_add(1, std::memory_order_relaxed);
  }
}

FoundOrdinal find_ordinal(const std::string& path, cuda::Address address) {
  DriverResult loaded = Driver::load(path);
  if (loaded.driver == nullptr) {
    return {std::nullopt, std::move(loaded.fault), ""};
  }
  const Driver& driver = *loaded.driver;
  if (const DeviceStatus status = driver.init(0); !status.ok()) {
    return {std::nullopt, "", driver.text(status)};
  }
  unsigned type = 0;
  const DeviceStatus status = driver.pointer_attribute(&type, cuda::POINTER_MEMORY_TYPE, address);
  if (!status.ok()) {  // an address that the driver does not know is the host's
    return {std::nullopt, "", status.code == cuda::INVALID_VALUE ? "" : driver.text(status)};
  }
  if (type != cuda::MEMORY_TYPE_DEVICE) {
    return {};
  }
  int ordinal = 0;
  if (const DeviceStatus found = driver.pointer_attribute(&ordinal, cuda::POINTER_DEVICE_ORDINAL, address); !found.ok()) {
    return {std::nullopt, "", driver.text(found)};
  }
  return {ordinal, "", ""};
}

}  // namespace kvpool
