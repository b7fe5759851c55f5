// A CUDA driver without a device: the calls that kvpool makes, and a few for tests, on memory that the host must not touch.
//
// Devices, streams and copies; calls for memory: `memory_calls.cpp`. Copies are done later, on threads of their own: `streams.h`. What can
// be ordered to fail: `faults.h`. Settings: `world.h`. The kernel `gather` is interpreted here. For tests:
//
//   kvpool_emulated_control(text)     orders, as in `faults.h`
//   kvpool_emulated_live(kind)        what lives now: contexts memory reservations mappings host registrations streams events modules
//   kvpool_emulated_calls(name)       how often a call was made
#include <cstring>
#include <optional>

#include "calls.h"

using namespace emulated;

namespace {

const std::map<CUresult, const char*> NAMES = {
    {SUCCESS, "CUDA_SUCCESS"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
    {JIT_COMPILER_NOT_FOUND, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {909, "CUDA_ERROR_TIMEOUT"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

const CUfunction GATHER = reinterpret_cast<CUfunction>(0x600D);

uint64_t new_handle() {
  const std::lock_guard guard(world().lock);
  return world().last_handle += 16;
}

CUresult wait_until_done(const std::shared_ptr<Event>& event, uint64_t mark) {
  std::unique_lock guard(world().marks.lock);
  world().marks.changed.wait(guard, [&] { return event->completed >= mark; });
  return event->device->failure;
}

CUresult record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
  uint64_t mark = 0;
  {
    const std::lock_guard guard(world().marks.lock);
    mark = ++event->recorded;
  }
  stream->add([event, mark](Stream&) {
    const std::lock_guard guard(world().marks.lock);
    event->completed = std::max(event->completed, mark);
    world().marks.changed.notify_all();
  });
  return SUCCESS;
}

CUresult synchronize(const std::shared_ptr<Stream>& stream) {
  const auto event = std::make_shared<Event>();
  event->device = &stream->device();
  record(event, stream);
  return wait_until_done(event, 1);
}

// A copy to be queued; nullopt where its addresses are nowhere.
std::optional<QueuedCopy> queued(CUdeviceptr target, CUdeviceptr source, size_t size) {
  const int device = current()->physical;
  const Place into = world().memory.find(target, size, 0, device, false);
  const Place from = world().memory.find(source, size, 0, device, false);
  if (into.bytes == nullptr || from.bytes == nullptr) {
    return std::nullopt;
  }
  return QueuedCopy{{target, source, size}, into.memory(), from.memory()};
}

CUresult queue_copy(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream handle) {
  const auto stream = world().find(handle, current());
  if (stream == nullptr || &stream->device() != current()) {
    return INVALID_HANDLE;
  }
  const auto copy = queued(target, source, size);
  if (!copy) {
    return INVALID_VALUE;
  }
  stream->add([copy = *copy](Stream& on) { on.copy_one(copy); });
  return SUCCESS;
}

CUresult copy_batch(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                    size_t* firsts, size_t attribute_count, size_t* failed, CUstream handle) {
  BEGIN_IN_CONTEXT("cuMemcpyBatchAsync")
  const auto stream = world().find(handle, current());
  if (stream == nullptr || &stream->device() != current() || reinterpret_cast<uintptr_t>(handle) < 2) {
    return INVALID_HANDLE;
  }
  if (count == 0 || attribute_count == 0 || attribute_count > count || firsts[0] != 0) {
    return INVALID_VALUE;
  }
  for (size_t number = 0; number < attribute_count; ++number) {
    if (attributes[number].srcAccessOrder < 1 || attributes[number].srcAccessOrder > 3) {
      return INVALID_VALUE;
    }
  }
  std::vector<QueuedCopy> copies;
  for (size_t number = 0; number < count; ++number) {
    const auto copy = queued(targets[number], sources[number], sizes[number]);
    if (!copy) {
      *failed = number;
      return INVALID_VALUE;
    }
    copies.push_back(*copy);
  }
  stream->add([copies](Stream& on) { on.copy_all(copies); });
  return SUCCESS;
}

// The kernel: descriptors are read when it runs, from memory that the device reaches.
void gather(Stream& stream, CUdeviceptr descriptors, unsigned count) {
  const Place place = stream.memory().find(descriptors, count * sizeof(Copy), READS, stream.device().physical, true);
  if (place.bytes == nullptr) {
    stream.device().failure = ILLEGAL_ADDRESS;
    return;
  }
  std::vector<Copy> copies(count);
  std::memcpy(copies.data(), place.bytes, count * sizeof(Copy));
  stream.pause();
  stream.copy_all(std::move(copies));
}

}  // namespace

// --- the driver and its devices

EXPORT CUresult cuInit(unsigned flags) {
  if (const CUresult ordered = world().faults.on_call("cuInit"); ordered != SUCCESS) {
    return ordered;
  }
  world().is_initialized = true;
  return flags == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(number_of("KVPOOL_EMULATED_VERSION", 13000));
  return world().faults.on_call("cuDriverGetVersion");
}

EXPORT CUresult cuGetErrorName(CUresult code, const char** name) {
  const auto found = NAMES.find(code);
  *name = found == NAMES.end() ? nullptr : found->second;
  return found == NAMES.end() ? INVALID_VALUE : SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t, int* status) {
  const bool is_there = std::strcmp(symbol, "cuMemcpyBatchAsync") == 0 && version == 12080 &&
                        number_of("KVPOOL_EMULATED_VERSION", 13000) >= 12080;
  *function = is_there ? reinterpret_cast<void*>(&copy_batch) : nullptr;
  if (status != nullptr) {
    *status = is_there ? 0 : 1;
  }
  return is_there ? SUCCESS : NOT_FOUND;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount")
  *count = world().count;
  return SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN("cuDeviceGet")
  *device = ordinal;
  return is_device(ordinal) ? SUCCESS : INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  BEGIN("cuDeviceGetName")
  if (!is_device(device)) {
    return INVALID_DEVICE;
  }
  std::snprintf(name, static_cast<size_t>(size), "Emulated Device %d", world().devices[device].physical);
  return SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  BEGIN("cuDeviceGetUuid_v2")
  if (!is_device(device)) {
    return INVALID_DEVICE;
  }
  const std::string text = "emulated-device" + std::to_string(world().devices[device].physical);
  std::memcpy(uuid->bytes, text.data(), sizeof(uuid->bytes));
  return SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, int, CUdevice device) {
  BEGIN("cuDeviceGetAttribute")
  *value = 1;
  return is_device(device) ? SUCCESS : INVALID_DEVICE;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN("cuDevicePrimaryCtxRetain")
  if (!is_device(device)) {
    return INVALID_DEVICE;
  }
  ++world().devices[device].retained;
  *context = reinterpret_cast<CUcontext>(&world().devices[device]);
  return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  BEGIN("cuDevicePrimaryCtxRelease_v2")
  if (!is_device(device) || world().devices[device].retained == 0) {
    return INVALID_CONTEXT;
  }
  if (--world().devices[device].retained == 0) {
    world().devices[device].failure = SUCCESS;
  }
  return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  BEGIN("cuCtxPushCurrent_v2")
  auto* const device = reinterpret_cast<Device*>(context);
  if (device == nullptr || device->retained == 0) {
    return CONTEXT_IS_DESTROYED;
  }
  contexts().push_back(device);
  return SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  BEGIN("cuCtxPopCurrent_v2")
  if (contexts().empty()) {
    return INVALID_CONTEXT;
  }
  *context = reinterpret_cast<CUcontext>(contexts().back());
  contexts().pop_back();
  return SUCCESS;
}

// --- streams and events

EXPORT CUresult cuStreamCreate(CUstream* handle, unsigned) {
  BEGIN_IN_CONTEXT("cuStreamCreate")
  const uint64_t number = new_handle();
  auto stream = Stream::start(*current(), world().memory, world().faults, world().seed + number);
  *handle = reinterpret_cast<CUstream>(number);
  const std::lock_guard guard(world().lock);
  world().streams[*handle] = std::move(stream);
  return SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  BEGIN_RELEASE("cuStreamDestroy_v2")
  const std::lock_guard guard(world().lock);
  const auto found = world().streams.find(handle);
  if (found == world().streams.end()) {
    return INVALID_HANDLE;
  }
  found->second->end();
  world().streams.erase(found);
  return SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  BEGIN_IN_CONTEXT("cuStreamSynchronize")
  const auto stream = world().find(handle, current());
  return stream == nullptr ? INVALID_HANDLE : synchronize(stream);
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
  BEGIN_IN_CONTEXT("cuStreamWaitEvent")
  const auto stream = world().find(handle, current());
  const auto event = world().find(event_handle);
  if (stream == nullptr || event == nullptr) {
    return INVALID_HANDLE;
  }
  uint64_t mark = 0;
  {
    const std::lock_guard guard(world().marks.lock);
    mark = event->recorded;
  }
  stream->add([event, mark](Stream&) { static_cast<void>(wait_until_done(event, mark)); });
  return SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent* handle, unsigned) {
  BEGIN_IN_CONTEXT("cuEventCreate")
  *handle = reinterpret_cast<CUevent>(new_handle());
  auto event = std::make_shared<Event>();
  event->device = current();
  const std::lock_guard guard(world().lock);
  world().events[*handle] = std::move(event);
  return SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  BEGIN_RELEASE("cuEventDestroy_v2")
  const std::lock_guard guard(world().lock);
  return world().events.erase(handle) == 1 ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  BEGIN_IN_CONTEXT("cuEventRecord")
  const auto event = world().find(handle);
  const auto stream = world().find(stream_handle, current());
  if (event == nullptr || stream == nullptr || event->device != &stream->device()) {
    return INVALID_HANDLE;
  }
  return record(event, stream);
}

EXPORT CUresult cuEventQuery(CUevent handle) {
  BEGIN_IN_CONTEXT("cuEventQuery")
  const auto event = world().find(handle);
  if (event == nullptr) {
    return INVALID_HANDLE;
  }
  const std::lock_guard guard(world().marks.lock);
  return event->completed >= event->recorded ? SUCCESS : NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
  BEGIN_IN_CONTEXT("cuEventSynchronize")
  const auto event = world().find(handle);
  if (event == nullptr) {
    return INVALID_HANDLE;
  }
  std::unique_lock guard(world().marks.lock);
  const uint64_t mark = event->recorded;
  guard.unlock();
  return wait_until_done(event, mark);
}

// --- copies and the kernel

EXPORT CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  BEGIN_IN_CONTEXT("cuMemcpyAsync")
  return queue_copy(target, source, size, stream);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t size) {
  BEGIN_IN_CONTEXT("cuMemcpyHtoD_v2")
  const CUresult queued = queue_copy(target, reinterpret_cast<CUdeviceptr>(source), size, nullptr);
  return queued == SUCCESS ? synchronize(world().find(CUstream{}, current())) : queued;
}

EXPORT CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t size) {
  BEGIN_IN_CONTEXT("cuMemcpyDtoH_v2")
  const CUresult queued = queue_copy(reinterpret_cast<CUdeviceptr>(target), source, size, nullptr);
  return queued == SUCCESS ? synchronize(world().find(CUstream{}, current())) : queued;
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  BEGIN_IN_CONTEXT("cuModuleLoadData")
  if (number_of("KVPOOL_EMULATED_JIT", 1) == 0) {
    return JIT_COMPILER_NOT_FOUND;
  }
  const std::string text(static_cast<const char*>(image));
  if (text.find(".version 6.3") == std::string::npos || text.find(".visible .entry gather(") == std::string::npos) {
    return INVALID_PTX;
  }
  *module = reinterpret_cast<CUmodule>(new_handle());
  const std::lock_guard guard(world().lock);
  world().modules.insert(*module);
  return SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  BEGIN_RELEASE("cuModuleUnload")
  const std::lock_guard guard(world().lock);
  return world().modules.erase(module) == 1 ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  BEGIN_IN_CONTEXT("cuModuleGetFunction")
  const std::lock_guard guard(world().lock);
  if (world().modules.count(module) == 0 || std::strcmp(name, "gather") != 0) {
    return NOT_FOUND;
  }
  *function = GATHER;
  return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned, CUstream handle, void** arguments, void**) {
  BEGIN_IN_CONTEXT("cuLaunchKernel")
  const auto stream = world().find(handle, current());
  if (function != GATHER || stream == nullptr || grid_x == 0 || grid_y * grid_z * block_y * block_z != 1 || block_x == 0 ||
      block_x > 1024) {
    return INVALID_VALUE;
  }
  CUdeviceptr descriptors = 0;
  unsigned count = 0;
  std::memcpy(&descriptors, arguments[0], sizeof(descriptors));
  std::memcpy(&count, arguments[1], sizeof(count));
  stream->add([descriptors, count](Stream& on) { gather(on, descriptors, count); });
  return SUCCESS;
}

// --- for tests

EXPORT void kvpool_emulated_control(const char* text) { world().faults.order(text); }

EXPORT uint64_t kvpool_emulated_calls(const char* name) { return world().faults.calls(name); }

EXPORT uint64_t kvpool_emulated_live(const char* kind) {
  World& all = world();
  const std::scoped_lock guard(all.lock, all.memory.lock);
  uint64_t contexts = 0;
  for (const Device& device : all.devices) {
    contexts += static_cast<uint64_t>(device.retained.load());
  }
  const std::map<std::string, uint64_t> counts = {
      {"contexts", contexts},
      {"memory", all.memory.handles.size()},
      {"reservations", all.memory.reserved.size()},
      {"mappings", all.memory.mapped.size()},
      {"host", all.memory.allocated.size()},
      {"registrations", all.memory.registered.size()},
      {"streams", all.streams.size()},
      {"events", all.events.size()},
      {"modules", all.modules.size()},
  };
  const auto found = counts.find(kind);
  return found == counts.end() ? UINT64_MAX : found->second;
}
