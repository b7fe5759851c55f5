#include "ssd/ssd_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/types.h"

namespace kvpool {
namespace {

constexpr int SAFE = O_CLOEXEC | O_NOFOLLOW;

SsdFilesResult failure(int error, const std::string& what, const std::string& path) {
  return {nullptr, error, what + " " + path + ": " + std::strerror(error)};
}

std::string name_of(uint32_t segment) {
  char name[32];
  std::snprintf(name, sizeof(name), "segment-%06u.kvs", segment);
  return name;
}

// Why an existing file is not one of ours; empty where it is.
std::string refusal(const struct stat& found, uint64_t segment_bytes) {
  if (!S_ISREG(found.st_mode)) {
    return "is no regular file";
  }
  if (found.st_uid != geteuid()) {
    return "belongs to user " + std::to_string(found.st_uid) + ", expected " + std::to_string(geteuid());
  }
  if (static_cast<uint64_t>(found.st_size) != segment_bytes) {
    return "has " + std::to_string(found.st_size) + " bytes, expected " + std::to_string(segment_bytes);
  }
  return "";
}

// A new file is allocated and synced under another name before it gets its own: a file that has its name has all its bytes,
// after a power cut too.
int create_segment(int directory, const std::string& name, uint64_t segment_bytes) noexcept {
  const std::string unfinished = name + ".new";
  const int fd = openat(directory, unfinished.c_str(), O_RDWR | O_CREAT | O_TRUNC | SAFE, 0600);
  if (fd < 0) {
    return errno;
  }
  int error = posix_fallocate(fd, 0, static_cast<off_t>(segment_bytes));
  if (error == 0 && (fsync(fd) != 0 || renameat(directory, unfinished.c_str(), directory, name.c_str()) != 0 ||
                     fsync(directory) != 0)) {
    error = errno;
  }
  if (error != 0) {
    unlinkat(directory, unfinished.c_str(), 0);
  }
  close(fd);
  return error;
}

}  // namespace

SsdFiles::SsdFiles(int directory, int lock, uint64_t segment_bytes, uint32_t segments)
    : directory_(directory), lock_(lock), segment_bytes_(segment_bytes), segments_(segments) {}

SsdFiles::~SsdFiles() {
  for (const Segment& segment : segments_) {
    if (segment.fd >= 0) {
      close(segment.fd);
    }
  }
  close(lock_);
  close(directory_);
}

SsdFilesResult SsdFiles::open(const std::string& path, uint64_t segment_bytes, uint32_t segments, bool wants_direct) {
  KVPOOL_CHECK(segment_bytes != 0);
  KVPOOL_CHECK(segment_bytes % PAGE_BYTES == 0);
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return failure(errno, "cannot make directory", path);
  }
  const int directory = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | SAFE);
  if (directory < 0) {
    return failure(errno, "cannot open directory", path);
  }
  struct stat found{};
  if (fstat(directory, &found) != 0 || found.st_uid != geteuid() || (found.st_mode & 0077) != 0) {
    close(directory);
    return {nullptr, EPERM, "directory " + path + " must belong to this user with rights 0700"};
  }
  const int lock = openat(directory, "lock", O_RDWR | O_CREAT | SAFE, 0600);
  if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const SsdFilesResult refused = failure(errno, "cannot lock, another daemon may use", path);
    if (lock >= 0) {
      close(lock);
    }
    close(directory);
    return refused;
  }
  std::shared_ptr<SsdFiles> files(new SsdFiles(directory, lock, segment_bytes, segments));
  for (uint32_t number = 0; number < segments; ++number) {
    SsdFilesResult opened = files->open_segment(number, path, wants_direct);
    if (opened.error != 0) {
      return opened;
    }
  }
  return {files, 0, ""};
}

SsdFilesResult SsdFiles::open_segment(uint32_t number, const std::string& path, bool wants_direct) {
  const std::string name = name_of(number);
  struct stat found{};
  if (fstatat(directory_, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
    const int error = errno == ENOENT ? create_segment(directory_, name, segment_bytes_) : errno;
    if (error != 0 || fstatat(directory_, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
      return failure(error != 0 ? error : errno, "cannot make segment file", path + "/" + name);
    }
  }
  const std::string refused = refusal(found, segment_bytes_);
  if (!refused.empty()) {
    return {nullptr, S_ISREG(found.st_mode) && found.st_uid == geteuid() ? EEXIST : EPERM, path + "/" + name + " " + refused};
  }
  int fd = wants_direct ? openat(directory_, name.c_str(), O_RDWR | O_DIRECT | SAFE) : -1;
  if (fd < 0 && (!wants_direct || errno == EINVAL)) {
    is_direct_ = false;
    fd = openat(directory_, name.c_str(), O_RDWR | SAFE);
  }
  if (fd < 0) {
    return failure(errno, "cannot open", path + "/" + name);
  }
  // For example a copy that left holes out: a write into missing room would fail some day.
  const bool has_holes = static_cast<uint64_t>(found.st_blocks) * 512 < segment_bytes_;
  const int error = has_holes ? posix_fallocate(fd, 0, static_cast<off_t>(segment_bytes_)) : 0;
  if (error != 0) {
    close(fd);
    return failure(error, "has holes, and cannot be given all its " + std::to_string(segment_bytes_) + " bytes:",
                   path + "/" + name);
  }
  segments_[number].fd = fd;
  return {};
}

bool SsdFiles::contains(uint64_t offset, uint64_t length) const noexcept {
  const uint64_t inside = offset % segment_bytes_;
  return offset / segment_bytes_ < segments_.size() && length <= segment_bytes_ - inside;
}

SsdPlace SsdFiles::place(uint64_t offset) const noexcept {
  const auto segment = static_cast<uint32_t>(offset / segment_bytes_);
  return {segment, segments_[segment].fd, offset % segment_bytes_};
}

void SsdFiles::note_write(uint64_t offset) noexcept { segments_[offset / segment_bytes_].is_dirty.store(true); }

int SsdFiles::sync() noexcept {
  int error = 0;
  for (Segment& segment : segments_) {
    if (segment.is_dirty.exchange(false) && fdatasync(segment.fd) != 0 && error == 0) {
      error = errno;
    }
  }
  return error;
}

}  // namespace kvpool
