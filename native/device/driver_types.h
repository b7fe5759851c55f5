// The part of the CUDA driver's C interface that kvpool calls: types and constants, as of CUDA 12.8.
//
// What it is: declarations of what another library defines, so that nothing of CUDA is needed to build. What it is not: calls
// (driver.h). The layouts are the driver's ABI, which never changes for a symbol's version; each is asserted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool::cuda {

using Result = int;         // CUresult
using DeviceHandle = int;   // CUdevice
using Address = uint64_t;   // CUdeviceptr; with unified addressing a host address is one too
using MemoryHandle = uint64_t;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

inline constexpr Result SUCCESS = 0;
inline constexpr Result INVALID_VALUE = 1;
inline constexpr Result NOT_READY = 600;
inline constexpr Result HOST_MEMORY_ALREADY_REGISTERED = 712;
inline constexpr Result TIMEOUT = 909;

struct Uuid {
  uint8_t bytes[16];
};
static_assert(sizeof(Uuid) == 16);

inline constexpr int LOCATION_DEVICE = 1;
struct Location {
  int type;
  int id;
};
static_assert(sizeof(Location) == 8);

inline constexpr int ALLOCATION_PINNED = 1;
inline constexpr int HANDLE_POSIX_DESCRIPTOR = 1;
struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* win32;
  struct {
    uint8_t compression;
    uint8_t rdma_capable;
    uint16_t usage;
    uint8_t reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32);
static_assert(offsetof(AllocationProperties, win32) == 16);
static_assert(offsetof(AllocationProperties, flags) == 24);

inline constexpr int ACCESS_READ = 1;
inline constexpr int ACCESS_READ_WRITE = 3;
struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Access) == 12);

inline constexpr int SOURCE_IN_STREAM_ORDER = 1;
struct CopyAttributes {
  int source_order;
  Location source_hint;
  Location target_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);
static_assert(offsetof(CopyAttributes, flags) == 20);

inline constexpr int GRANULARITY_MINIMUM = 0;
inline constexpr int ATTRIBUTE_VIRTUAL_MEMORY = 102;
inline constexpr int ATTRIBUTE_POSIX_DESCRIPTORS = 103;
inline constexpr int ATTRIBUTE_READ_ONLY_REGISTRATION = 113;
inline constexpr int POINTER_MEMORY_TYPE = 2;
inline constexpr int POINTER_DEVICE_ADDRESS = 3;
inline constexpr int POINTER_DEVICE_ORDINAL = 9;
inline constexpr unsigned MEMORY_TYPE_DEVICE = 2;
inline constexpr unsigned HOST_ALLOCATION_PORTABLE = 1;
inline constexpr unsigned HOST_ALLOCATION_MAPPED = 2;
inline constexpr unsigned REGISTRATION_PORTABLE = 1;
inline constexpr unsigned REGISTRATION_MAPPED = 2;
inline constexpr unsigned REGISTRATION_READ_ONLY = 8;
inline constexpr unsigned STREAM_NON_BLOCKING = 1;
inline constexpr unsigned EVENT_WITHOUT_TIMES = 2;

// Copies that the driver takes all at once. It exists in two versions under one name: this one, of 12.8, is got by asking for it.
inline constexpr int BATCH_VERSION = 12080;
inline constexpr const char* BATCH_NAME = "cuMemcpyBatchAsync";
using BatchCall = Result (*)(Address* targets, Address* sources, size_t* sizes, size_t count, CopyAttributes* attributes,
                             size_t* attribute_firsts, size_t attribute_count, size_t* failed, Stream stream);

}  // namespace kvpool::cuda
