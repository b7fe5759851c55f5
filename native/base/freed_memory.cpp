#include "base/freed_memory.h"

#include <malloc.h>

namespace kvpool {

bool keep_freed_memory(size_t kept_bytes, size_t block_bytes) noexcept {
#ifdef __GLIBC__
  return ::mallopt(M_TRIM_THRESHOLD, static_cast<int>(kept_bytes)) == 1 &&
         ::mallopt(M_MMAP_THRESHOLD, static_cast<int>(block_bytes)) == 1;
#else
  static_cast<void>(kept_bytes + block_bytes);
  return false;
#endif
}

}  // namespace kvpool
