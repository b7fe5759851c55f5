#include "ssd/file_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/types.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvpool {

FilePagesResult FilePages::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    return {nullptr, errno};
  }
  struct stat found{};
  void* data = MAP_FAILED;
  int error = 0;
  if (fstat(fd, &found) != 0 ||
      (data = mmap(nullptr, static_cast<size_t>(found.st_size), PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED) {
    error = errno;
  }
  close(fd);
  if (error != 0) {
    return {nullptr, error};
  }
  return {std::shared_ptr<FilePages>(new FilePages(path, data, static_cast<uint64_t>(found.st_size))), 0};
}

FilePages::~FilePages() { munmap(data_, size_); }

int FilePages::load(uint64_t bytes) const noexcept {
  const uint64_t length = round_up(std::min(bytes, size_), PAGE_BYTES);
  while (madvise(data_, length, MADV_POPULATE_READ) != 0) {
    switch (errno) {
      case EINTR:
      case EAGAIN:
        continue;
      case EINVAL:  // an older kernel
        return 0;
      default:  // EFAULT where reading would be SIGBUS
        return EIO;
    }
  }
  return 0;
}

}  // namespace kvpool
