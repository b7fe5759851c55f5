// The driver that this is linked to, as an older one: without the batch call of 12.8 and, with HAS_JIT=0, without a compiler of PTX.
//
// Everything else is looked up in the driver itself, which the loader searches behind this library.
// Threads: any.
#include <cstdint>

namespace {

constexpr int NOT_FOUND = 500;
[[maybe_unused]] constexpr int NO_BINARY_FOR_GPU = 209;

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char*, void** function, int, uint64_t, int*) {
  *function = nullptr;
  return NOT_FOUND;
}

#if !HAS_JIT
__attribute__((visibility("default"))) int cuModuleLoadData(void**, const void*) { return NO_BINARY_FOR_GPU; }
#endif

}  // extern "C"
