// Types of the CUDA driver's C interface as its header declares them, apart from the product's own declarations: where the two differ,
// tests fail.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;

typedef struct CUuuid_st {
  char bytes[16];
} CUuuid;

typedef struct CUmemLocation_st {
  int type;
  int id;
} CUmemLocation;

typedef struct CUmemAllocationProp_st {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc_st {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;

typedef struct CUmemcpyAttributes_st {
  int srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned int flags;
} CUmemcpyAttributes;

}  // extern "C"

namespace emulated {

inline constexpr CUresult SUCCESS = 0;
inline constexpr CUresult INVALID_VALUE = 1;
inline constexpr CUresult OUT_OF_MEMORY = 2;
inline constexpr CUresult NOT_INITIALIZED = 3;
inline constexpr CUresult INVALID_DEVICE = 101;
inline constexpr CUresult INVALID_CONTEXT = 201;
inline constexpr CUresult INVALID_PTX = 218;
inline constexpr CUresult JIT_COMPILER_NOT_FOUND = 221;
inline constexpr CUresult OPERATING_SYSTEM = 304;
inline constexpr CUresult INVALID_HANDLE = 400;
inline constexpr CUresult NOT_FOUND = 500;
inline constexpr CUresult NOT_READY = 600;
inline constexpr CUresult ILLEGAL_ADDRESS = 700;
inline constexpr CUresult CONTEXT_IS_DESTROYED = 709;
inline constexpr CUresult ALREADY_REGISTERED = 712;
inline constexpr CUresult NOT_REGISTERED = 713;

}  // namespace emulated
