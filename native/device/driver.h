// The CUDA driver, loaded when a device is first used: its calls, each of which names itself in what it answers.
//
// What it is: the one place where symbols of the driver's library are looked up. What it is not: linked to it, or tied to NVIDIA's:
// any library that exports the same symbols is a driver.
// A library stays loaded until the process ends: nothing may unload a driver whose threads run. A path is loaded once.
// Invariant: a Driver that exists has all calls of its table; `get_address_` alone may be absent, in drivers before 12.0.
// Threads: any.
#pragma once

#include <memory>
#include <string>

#include "device/driver_types.h"

namespace kvpool {

// What a call of the driver answered, or that it was not made.
struct [[nodiscard]] DeviceStatus {
  cuda::Result code = cuda::SUCCESS;
  const char* call = "";

  [[nodiscard]] bool ok() const noexcept { return code == cuda::SUCCESS; }
};

// Symbols of one library; remembers the first that it lacks.
class DriverSymbols {
 public:
  explicit DriverSymbols(void* library) noexcept : library_(library) {}
  // nullptr: the library has no such symbol.
  [[nodiscard]] void* find(const char* name) const noexcept;
  // The same, and it is missing.
  [[nodiscard]] void* require(const char* name) noexcept;
  [[nodiscard]] const char* missing() const noexcept { return missing_; }

 private:
  void* const library_;
  const char* missing_ = nullptr;
};

template <typename... Arguments>
class DriverCall {
 public:
  DriverCall(DriverSymbols& symbols, const char* name) noexcept
      : function_(reinterpret_cast<cuda::Result (*)(Arguments...)>(symbols.require(name))), name_(name) {}

  DeviceStatus operator()(Arguments... arguments) const noexcept { return {function_(arguments...), name_}; }
  [[nodiscard]] const char* name() const noexcept { return name_; }

 private:
  cuda::Result (*const function_)(Arguments...);
  const char* const name_;
};

class Driver;
struct DriverResult {
  std::shared_ptr<const Driver> driver;
  std::string fault;  // what is missing and what to do, where there is no driver
};

class Driver {
 public:
  // Loads a library by its name or path, and has it initialized by `init`, which the caller checks.
  [[nodiscard]] static DriverResult load(const std::string& path);
  // The one that a process names in KVPOOL_CUDA_DRIVER, or libcuda.so.1.
  [[nodiscard]] static std::string default_path();

  // "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)". REQUIRES: !status.ok().
  [[nodiscard]] std::string text(DeviceStatus status) const;
  // The function of a version, or nullptr.
  [[nodiscard]] void* find_version(const char* name, int cuda_version) const noexcept;

 private:
  explicit Driver(void* library) noexcept;
  DriverSymbols symbols_;  // first: the table is made from it

 public:
  const DriverCall<unsigned> init{symbols_, "cuInit"};
  const DriverCall<int*> version{symbols_, "cuDriverGetVersion"};
  const DriverCall<cuda::Result, const char**> error_name{symbols_, "cuGetErrorName"};

  const DriverCall<cuda::DeviceHandle*, int> get_device{symbols_, "cuDeviceGet"};
  const DriverCall<char*, int, cuda::DeviceHandle> device_name{symbols_, "cuDeviceGetName"};
  const DriverCall<cuda::Uuid*, cuda::DeviceHandle> device_uuid{symbols_, "cuDeviceGetUuid_v2"};
  const DriverCall<int*, int, cuda::DeviceHandle> device_attribute{symbols_, "cuDeviceGetAttribute"};
  const DriverCall<cuda::Context*, cuda::DeviceHandle> retain_context{symbols_, "cuDevicePrimaryCtxRetain"};
  const DriverCall<cuda::DeviceHandle> release_context{symbols_, "cuDevicePrimaryCtxRelease_v2"};
  const DriverCall<cuda::Context> push_context{symbols_, "cuCtxPushCurrent_v2"};
  const DriverCall<cuda::Context*> pop_context{symbols_, "cuCtxPopCurrent_v2"};

  const DriverCall<size_t*, const cuda::AllocationProperties*, int> granularity{symbols_, "cuMemGetAllocationGranularity"};
  const DriverCall<cuda::MemoryHandle*, size_t, const cuda::AllocationProperties*, unsigned long long> create{symbols_, "cuMemCreate"};
  const DriverCall<cuda::MemoryHandle> release{symbols_, "cuMemRelease"};
  const DriverCall<cuda::Address*, size_t, size_t, cuda::Address, unsigned long long> reserve{symbols_, "cuMemAddressReserve"};
  const DriverCall<cuda::Address, size_t> free_reserved{symbols_, "cuMemAddressFree"};
  const DriverCall<cuda::Address, size_t, size_t, cuda::MemoryHandle, unsigned long long> map{symbols_, "cuMemMap"};
  const DriverCall<cuda::Address, size_t> unmap{symbols_, "cuMemUnmap"};
  const DriverCall<cuda::Address, size_t, const cuda::Access*, size_t> set_access{symbols_, "cuMemSetAccess"};
  const DriverCall<void*, cuda::MemoryHandle, int, unsigned long long> export_handle{symbols_, "cuMemExportToShareableHandle"};
  const DriverCall<cuda::MemoryHandle*, void*, int> import_handle{symbols_, "cuMemImportFromShareableHandle"};
  const DriverCall<void*, int, cuda::Address> pointer_attribute{symbols_, "cuPointerGetAttribute"};

  const DriverCall<void**, size_t, unsigned> allocate_host{symbols_, "cuMemHostAlloc"};
  const DriverCall<void*> free_host{symbols_, "cuMemFreeHost"};
  const DriverCall<void*, size_t, unsigned> register_host{symbols_, "cuMemHostRegister_v2"};
  const DriverCall<void*> unregister_host{symbols_, "cuMemHostUnregister"};

  const DriverCall<cuda::Stream*, unsigned> create_stream{symbols_, "cuStreamCreate"};
  const DriverCall<cuda::Stream> destroy_stream{symbols_, "cuStreamDestroy_v2"};
  const DriverCall<cuda::Stream, cuda::Event, unsigned> wait_event{symbols_, "cuStreamWaitEvent"};
  const DriverCall<cuda::Event*, unsigned> create_event{symbols_, "cuEventCreate"};
  const DriverCall<cuda::Event> destroy_event{symbols_, "cuEventDestroy_v2"};
  const DriverCall<cuda::Event, cuda::Stream> record_event{symbols_, "cuEventRecord"};
  const DriverCall<cuda::Event> query_event{symbols_, "cuEventQuery"};

  const DriverCall<cuda::Address, cuda::Address, size_t, cuda::Stream> copy{symbols_, "cuMemcpyAsync"};
  const DriverCall<cuda::Module*, const void*> load_module{symbols_, "cuModuleLoadData"};
  const DriverCall<cuda::Module> unload_module{symbols_, "cuModuleUnload"};
  const DriverCall<cuda::Function*, cuda::Module, const char*> find_function{symbols_, "cuModuleGetFunction"};
  const DriverCall<cuda::Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cuda::Stream, void**, void**>
      launch{symbols_, "cuLaunchKernel"};

 private:
  using GetAddress = cuda::Result(const char*, void**, int, uint64_t, int*);
  GetAddress* const get_address_;
};

}  // namespace kvpool
