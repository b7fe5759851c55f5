// memfd creation, sealing, mapping and pre-faulting. See memory.h.
#include "base/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>

#include "base/check.h"

// Older libc headers lack these; the values are kernel ABI.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvpool {
namespace {

// What 512 page faults and freeing their pages cost (measured: 1.6 ms, against 0.2 ms for a huge page), and what may be lost by trying.
constexpr uint64_t HUGE_PAGE_NS_MAX = 1'600'000;
constexpr uint64_t HUGE_PAGES_NS_EXTRA = 10'000'000;

uint64_t thread_cpu_ns() noexcept {
  timespec used = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(used.tv_nsec);
}

constexpr int SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW;

MappingResult failure(int fd, int error, const char* step) {
  if (fd >= 0) {
    close(fd);
  }
  return {nullptr, error, step};
}

// For kernels before 5.14: touches each page. Adding nothing keeps the bytes and is safe beside other writers.
void touch_pages(uint8_t* first, uint64_t length, bool writable) noexcept {
  for (uint64_t offset = 0; offset < length; offset += PAGE_BYTES) {
    std::atomic_ref<uint8_t> byte(first[offset]);
    if (writable) {
      byte.fetch_or(0, std::memory_order_relaxed);
    } else {
      static_cast<void>(byte.load(std::memory_order_relaxed));
    }
  }
}

}  // namespace

MappingResult Mapping::create(const std::string& name, uint64_t size, bool hugetlb) {
  const uint64_t unit = hugetlb ? HUGE_PAGE_BYTES : PAGE_BYTES;
  if (size == 0 || size % unit != 0) {
    return failure(-1, EINVAL, "size");
  }
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB : 0U);
  const int fd = memfd_create(name.c_str(), flags);
  if (fd < 0) {
    return failure(-1, errno, "memfd_create");
  }
  if (fchmod(fd, 0600) != 0) {
    return failure(fd, errno, "fchmod");
  }
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) {
    return failure(fd, errno, "ftruncate");
  }
  if (fcntl(fd, F_ADD_SEALS, SIZE_SEALS) != 0) {
    return failure(fd, errno, "F_ADD_SEALS");
  }
  return map(fd, size, true);
}

MappingResult Mapping::attach(int fd, uint64_t size, bool writable) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    return failure(-1, errno, "dup");
  }
  const int seals = fcntl(own, F_GET_SEALS);
  if (seals < 0) {
    return failure(own, errno, "F_GET_SEALS");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return failure(own, EPERM, "region is not sealed against shrinking");
  }
  struct stat status = {};
  if (fstat(own, &status) != 0) {
    return failure(own, errno, "fstat");
  }
  if (size == 0 || status.st_size < 0 || static_cast<uint64_t>(status.st_size) < size) {
    return failure(own, EINVAL, "size");
  }
  return map(own, size, writable);
}

namespace {

// Maps at an address that is a multiple of a huge page: only then can the kernel use huge pages for it.
void* map_aligned(int fd, uint64_t size, int protection) noexcept {
  const uint64_t reserved_bytes = size + HUGE_PAGE_BYTES;
  void* reserved = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* const start = static_cast<uint8_t*>(reserved);
  const uint64_t skipped = round_up(reinterpret_cast<uintptr_t>(start), HUGE_PAGE_BYTES) -
                           reinterpret_cast<uintptr_t>(start);
  void* address = mmap(start + skipped, size, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, reserved_bytes);
    errno = error;
    return MAP_FAILED;
  }
  const uint64_t end = skipped + round_up(size, PAGE_BYTES);
  if (skipped > 0) {
    munmap(start, skipped);
  }
  if (end < reserved_bytes) {
    munmap(start + end, reserved_bytes - end);
  }
  return address;
}

}  // namespace

MappingResult Mapping::map(int fd, uint64_t size, bool writable) {
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* address = map_aligned(fd, size, protection);
  if (address == MAP_FAILED) {
    return failure(fd, errno, "mmap");
  }
  // A forked child has no business with the pool, and a core dump none with the prompts in it. A kernel that
  // refuses either is no reason to refuse service.
  static_cast<void>(madvise(address, size, MADV_DONTFORK));
  static_cast<void>(madvise(address, size, MADV_DONTDUMP));
  return {std::shared_ptr<Mapping>(new Mapping(static_cast<uint8_t*>(address), size, fd, writable)), 0, ""};
}

Mapping::~Mapping() {
  if (process_life() == life_) {
    KVPOOL_CHECK(munmap(data_, size_) == 0);
  }
  close(fd_);
}

int Mapping::populate(uint64_t offset, uint64_t length) const noexcept {
  KVPOOL_CHECK(contains(offset, length));
  KVPOOL_CHECK(offset % PAGE_BYTES == 0);
  if (length == 0) {
    return 0;
  }
  const int advice = writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  int rc;
  do {
    rc = madvise(data_ + offset, length, advice);
  } while (rc != 0 && errno == EINTR);
  if (rc != 0 && errno == EINVAL) {
    touch_pages(data_ + offset, length, writable_);
    return 0;
  }
  return rc == 0 ? 0 : errno;
}

bool Mapping::collapse(uint64_t offset, uint64_t length) const noexcept {
  KVPOOL_CHECK(contains(offset, length));
  KVPOOL_CHECK(offset % PAGE_BYTES == 0);
  return length != 0 && madvise(data_ + offset, length, MADV_COLLAPSE) == 0;
}

uint64_t Mapping::expect_writes(uint64_t offset, uint64_t end, HugePageBudget& budget) const noexcept {
  KVPOOL_CHECK(writable_ && offset < end && end <= size_);
  const uint64_t first = offset / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, next = first + HUGE_PAGE_BYTES;
  const bool is_most = std::min(end, next) - offset > HUGE_PAGE_BYTES / 2;
  if (is_most && next <= size_ && !budget.is_spent) {
    const uint64_t begun_ns = thread_cpu_ns();
    const bool has_huge = populate(first, PAGE_BYTES) == 0 && collapse(first, HUGE_PAGE_BYTES);
    budget.used_ns += thread_cpu_ns() - begun_ns;
    ++budget.pages;
    budget.is_spent = !has_huge || budget.used_ns > budget.pages * HUGE_PAGE_NS_MAX + HUGE_PAGES_NS_EXTRA;
    if (has_huge) {
      return next;
    }
  }
  const uint64_t begin = offset / PAGE_BYTES * PAGE_BYTES, last = std::min(round_up(end, PAGE_BYTES), next);
  static_cast<void>(populate(begin, last - begin));
  return last;
}

Stretch Mapping::next_pages(uint64_t offset) const noexcept {
  if (offset >= size_) {
    return {};
  }
  const off_t begin = lseek(fd_, static_cast<off_t>(offset), SEEK_DATA);
  if (begin < 0) {
    return errno == ENXIO ? Stretch{} : Stretch{offset, size_};
  }
  const off_t end = lseek(fd_, begin, SEEK_HOLE);
  return {static_cast<uint64_t>(begin), end < 0 ? size_ : std::min(static_cast<uint64_t>(end), size_)};
}

int Mapping::seal_read_only() const noexcept {
  return fcntl(fd_, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0 ? 0 : errno;
}

}  // namespace kvpool
