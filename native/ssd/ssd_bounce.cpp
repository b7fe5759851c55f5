#include "ssd/ssd_bounce.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "base/types.h"

namespace kvpool {

static_assert(SsdBounce::HALF_BYTES % PAGE_BYTES == 0);

SsdBounce::SsdBounce() {
  void* const pages = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "bounce memory of an I/O thread");
  }
  static_cast<void>(madvise(pages, BYTES, MADV_HUGEPAGE));  // nothing depends on it
  data_ = static_cast<uint8_t*>(pages);
}

SsdBounce::~SsdBounce() { munmap(data_, BYTES); }

}  // namespace kvpool
