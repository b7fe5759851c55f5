// Calls of the emulated driver for memory, of devices and of the host.
#include "calls.h"

using namespace emulated;

// --- memory of devices

EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*, int) {
  BEGIN("cuMemGetAllocationGranularity")
  *granularity = GRANULARITY;
  return SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                            unsigned long long flags) {
  BEGIN("cuMemCreate")
  if (size == 0 || size % GRANULARITY != 0 || flags != 0 || properties->type != 1 || properties->requestedHandleTypes != 1 ||
      properties->location.type != 1 || !is_device(properties->location.id) || properties->win32HandleMetaData != nullptr) {
    return INVALID_VALUE;
  }
  const int device = world().devices[properties->location.id].physical;
  Memory& memory = world().memory;
  const std::lock_guard guard(memory.lock);
  if (memory.created_bytes[device] + size > number_of("KVPOOL_EMULATED_BYTES", uint64_t{1} << 30)) {
    return OUT_OF_MEMORY;
  }
  auto made = Physical::make(size, device);
  if (made == nullptr) {
    return OUT_OF_MEMORY;
  }
  memory.created_bytes[device] += size;
  memory.handles[*handle = ++memory.last_handle] = std::move(made);
  return SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN("cuMemRelease")
  Memory& memory = world().memory;
  const std::lock_guard guard(memory.lock);
  const auto found = memory.handles.find(handle);
  if (found == memory.handles.end()) {
    return INVALID_VALUE;
  }
  const Physical& physical = *found->second;
  memory.created_bytes[physical.device] -= physical.is_imported ? 0 : physical.size;
  memory.handles.erase(found);
  return SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  BEGIN("cuMemAddressReserve")
  if (size == 0 || size % GRANULARITY != 0) {
    return INVALID_VALUE;
  }
  *address = world().memory.reserve(size);
  return *address != 0 ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  BEGIN("cuMemAddressFree")
  return world().memory.free_reserved(address) ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  BEGIN("cuMemMap")
  Memory& memory = world().memory;
  const std::lock_guard guard(memory.lock);
  const auto found = memory.handles.find(handle);
  const auto range = range_of(memory.reserved, address);
  if (found == memory.handles.end() || range == memory.reserved.end() || offset != 0 || size > found->second->size ||
      size > range->second.size || range_of(memory.mapped, address) != memory.mapped.end()) {
    return INVALID_VALUE;
  }
  memory.mapped[address] = {size, offset, found->second, {}};
  return SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t) {
  BEGIN("cuMemUnmap")
  const std::lock_guard guard(world().memory.lock);
  return world().memory.mapped.erase(address) == 1 ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t, const CUmemAccessDesc* access, size_t count) {
  BEGIN("cuMemSetAccess")
  Memory& memory = world().memory;
  const std::lock_guard guard(memory.lock);
  const auto found = memory.mapped.find(address);
  if (found == memory.mapped.end() || count != 1 || access->location.type != 1 || !is_device(access->location.id)) {
    return INVALID_VALUE;
  }
  // A device maps no other device's memory here.
  const int device = world().devices[access->location.id].physical;
  if (found->second.physical->device != device) {
    return INVALID_DEVICE;
  }
  found->second.access[device] = access->flags;
  return SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void* exported, CUmemGenericAllocationHandle handle, int type, unsigned long long) {
  BEGIN("cuMemExportToShareableHandle")
  const std::lock_guard guard(world().memory.lock);
  const auto found = world().memory.handles.find(handle);
  if (found == world().memory.handles.end() || type != 1) {
    return INVALID_VALUE;
  }
  const int fd = fcntl(found->second->fd, F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(exported) = fd;
  return fd >= 0 ? SUCCESS : OPERATING_SYSTEM;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* exported, int type) {
  BEGIN("cuMemImportFromShareableHandle")
  auto imported = Physical::import(static_cast<int>(reinterpret_cast<intptr_t>(exported)));
  if (imported == nullptr || type != 1) {
    return INVALID_VALUE;
  }
  const std::lock_guard guard(world().memory.lock);
  world().memory.handles[*handle = ++world().memory.last_handle] = std::move(imported);
  return SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
  BEGIN_IN_CONTEXT("cuMemAlloc_v2")
  const size_t bytes = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  auto made = Physical::make(bytes, current()->physical);
  *address = made != nullptr && size > 0 ? world().memory.reserve(bytes) : 0;
  if (*address == 0) {
    return OUT_OF_MEMORY;
  }
  const std::lock_guard guard(world().memory.lock);
  Mapped mapped{size, 0, std::move(made), {}};
  std::fill(std::begin(mapped.access), std::end(mapped.access), READS | WRITES);
  world().memory.mapped[*address] = std::move(mapped);
  return SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  BEGIN_RELEASE("cuMemFree_v2")
  {
    const std::lock_guard guard(world().memory.lock);
    if (world().memory.mapped.erase(address) != 1) {
      return INVALID_VALUE;
    }
  }
  return world().memory.free_reserved(address) ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
  BEGIN("cuPointerGetAttribute")
  Memory& memory = world().memory;
  const std::lock_guard guard(memory.lock);
  const auto device = range_of(memory.mapped, address);
  const bool is_device_memory = device != memory.mapped.end();
  const auto allocated = range_of(memory.allocated, address);
  const auto registered = range_of(memory.registered, address);
  const bool is_host_memory = allocated != memory.allocated.end() || registered != memory.registered.end();
  if (!is_device_memory && !is_host_memory) {
    return INVALID_VALUE;
  }
  if (attribute == 2) {
    *static_cast<unsigned*>(value) = is_device_memory ? 2 : 1;
    return SUCCESS;
  }
  if (attribute == 3) {
    if (current() == nullptr) {
      return INVALID_CONTEXT;
    }
    *static_cast<CUdeviceptr*>(value) = address;
    return is_host_memory || (device->second.access[current()->physical] & READS) != 0 ? SUCCESS : INVALID_VALUE;
  }
  if (attribute != 9) {
    return INVALID_VALUE;
  }
  const int physical = is_device_memory                        ? device->second.physical->device
                       : allocated != memory.allocated.end() ? allocated->second.device
                                                             : registered->second.device;
  *static_cast<int*>(value) = world().ordinal_of(physical);
  return SUCCESS;
}

// --- memory of the host

EXPORT CUresult cuMemHostAlloc(void** data, size_t size, unsigned) {
  BEGIN_IN_CONTEXT("cuMemHostAlloc")
  *data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*data == MAP_FAILED) {
    return OUT_OF_MEMORY;
  }
  const std::lock_guard guard(world().memory.lock);
  world().memory.allocated[reinterpret_cast<CUdeviceptr>(*data)] = {size, false, current()->physical};
  return SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void* data) {
  BEGIN_RELEASE("cuMemFreeHost")
  const std::lock_guard guard(world().memory.lock);
  const auto found = world().memory.allocated.find(reinterpret_cast<CUdeviceptr>(data));
  if (found == world().memory.allocated.end()) {
    return INVALID_VALUE;
  }
  munmap(data, found->second.size);
  world().memory.allocated.erase(found);
  return SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void* data, size_t size, unsigned flags) {
  BEGIN_IN_CONTEXT("cuMemHostRegister_v2")
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  const bool is_read_only = (flags & 8U) != 0;
  if (size == 0 || (!is_read_only && !is_writable(address, size))) {
    return INVALID_VALUE;
  }
  const std::lock_guard guard(world().memory.lock);
  if (range_of(world().memory.registered, address) != world().memory.registered.end()) {
    return ALREADY_REGISTERED;
  }
  world().memory.registered[address] = {size, is_read_only, current()->physical};
  return SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void* data) {
  BEGIN_RELEASE("cuMemHostUnregister")
  const std::lock_guard guard(world().memory.lock);
  return world().memory.registered.erase(reinterpret_cast<CUdeviceptr>(data)) == 1 ? SUCCESS : NOT_REGISTERED;
}
