// A file system that passes everything on to a directory, until a test tells it to fail.
//
//   fault_filesystem DIRECTORY MOUNT_POINT          runs in the foreground until it is unmounted or gets SIGTERM
//
// Tests talk to it through the file `.faults` in its root. What is written there holds when the write returns, one `name value`
// on a line:
//
//   match TEXT        faults concern paths that contain TEXT alone; without TEXT all
//   below BYTES       ... and accesses that begin before this offset; 0: all
//   read_error N      reads fail with errno N; 0: they do not
//   write_error N     writes and allocations fail with errno N
//   sync_error N      fsync and fdatasync fail with errno N; what they should have kept stays unsynced
//   torn_bytes N      only the first N bytes of each write reach the disk, and success is told; -1: all
//   delay_us N        each read, write and sync takes so much longer
//   record 1          remember writes until they are synced, so that a power cut can drop them
//   cut SEED          power cut: of each write that is not synced all, a part or nothing is kept, as the dice fall; then EIO
//   clear 1           no faults any more (but `record`, and a cut, stay)
//
// Reading `.faults` gives counters as `name value`.
//
// Simplified: names, sizes and allocations count as kept at once; a power cut takes written bytes alone.
// Threads: those of libfuse. All state is guarded by `Faults::lock`; recorded writes are made under it, others are not.

#include <dirent.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

const std::string CONTROL = "/.faults";
constexpr size_t SECTOR_BYTES = 512;

struct Write {
  off_t offset;
  off_t size_before;
  std::string before;
  std::string after;
};

struct Unsynced {
  int fd = -1;  // owned
  std::vector<Write> writes;
};

struct Faults {
  std::mutex lock;
  std::string match;
  std::map<std::string, int64_t> values;
  std::map<std::string, uint64_t> counts;
  std::map<ino_t, Unsynced> unsynced;
  bool is_dark = false;

  int64_t value(const std::string& name, int64_t otherwise = 0) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : found->second;
  }

  bool concerns(const char* path, off_t offset) const {
    const int64_t below = value("below");
    return std::string(path).find(match) != std::string::npos && (below == 0 || offset < below);
  }
};

Faults faults;
std::string root;

std::string backing(const char* path) { return root + path; }

int result_of(int returned) { return returned < 0 ? -errno : 0; }

void drop_record(Unsynced& file) {
  if (file.fd >= 0) {
    close(file.fd);
  }
  file = Unsynced{};
}

// What this access has to do with, decided under the lock; waiting happens outside.
struct Verdict {
  int error = 0;
  int64_t torn_bytes = -1;
  int64_t delay_us = 0;
};

Verdict judge(const char* path, off_t offset, const std::string& kind) {
  const std::lock_guard guard(faults.lock);
  Verdict verdict;
  ++faults.counts[kind + "s"];
  if (faults.is_dark) {
    verdict.error = EIO;
  } else if (faults.concerns(path, offset)) {
    verdict.error = static_cast<int>(faults.value(kind + "_error"));
    verdict.torn_bytes = kind == "write" ? faults.value("torn_bytes", -1) : -1;
    verdict.delay_us = faults.value("delay_us");
  }
  faults.counts["failed"] += verdict.error != 0 ? 1 : 0;
  return verdict;
}

int wait_for(const Verdict& verdict) {
  if (verdict.delay_us > 0) {
    const timespec pause{verdict.delay_us / 1000000, verdict.delay_us % 1000000 * 1000};
    nanosleep(&pause, nullptr);
  }
  return -verdict.error;
}

int dark() { return (std::lock_guard(faults.lock), faults.is_dark) ? -EIO : 0; }

off_t size_of(int fd) {
  struct stat found{};
  return fstat(fd, &found) == 0 ? found.st_size : 0;
}

// REQUIRES: the lock is held.
void record(int fd, const char* data, size_t size, off_t offset) {
  struct stat found{};
  if (fstat(fd, &found) != 0) {
    return;
  }
  Unsynced& file = faults.unsynced[found.st_ino];
  if (file.fd < 0) {
    file.fd = dup(fd);
  }
  std::string before(size, '\0');
  const ssize_t read = pread(fd, before.data(), size, offset);
  before.resize(read < 0 ? 0 : static_cast<size_t>(read));
  file.writes.push_back({offset, found.st_size, std::move(before), std::string(data, size)});
}

void put(int fd, const std::string& bytes, size_t size, off_t offset) {
  if (pwrite(fd, bytes.data(), size, offset) != static_cast<ssize_t>(size)) {
    ++faults.counts["lost_in_cut"];
  }
}

// REQUIRES: the lock is held.
void cut_power(uint64_t seed) {
  std::mt19937_64 dice(seed);
  for (auto& [number, file] : faults.unsynced) {
    for (auto write = file.writes.rbegin(); write != file.writes.rend(); ++write) {
      put(file.fd, write->before, write->before.size(), write->offset);
      if (size_of(file.fd) > write->size_before && ftruncate(file.fd, write->size_before) != 0) {
        ++faults.counts["lost_in_cut"];
      }
    }
    for (const Write& write : file.writes) {
      const size_t sectors = write.after.size() / SECTOR_BYTES;
      const uint64_t roll = dice() % 4;
      const size_t kept = roll == 0 ? write.after.size() : roll == 1 ? dice() % (sectors + 1) * SECTOR_BYTES : 0;
      put(file.fd, write.after, kept, write.offset);
      ++faults.counts[kept == write.after.size() ? "kept" : kept == 0 ? "dropped" : "torn"];
    }
    drop_record(file);
  }
  faults.unsynced.clear();
  faults.is_dark = true;
}

// One line of the control file. REQUIRES: the lock is held.
int obey(const std::string& name, const std::string& text) {
  static const std::vector<std::string> numbers = {"below",      "read_error", "write_error", "sync_error",
                                                   "torn_bytes", "delay_us",   "record"};
  if (name == "match") {
    faults.match = text;
  } else if (name == "cut") {
    cut_power(strtoull(text.c_str(), nullptr, 10));
  } else if (name == "clear") {
    const int64_t is_recording = faults.value("record");
    faults.values = {{"record", is_recording}};
    faults.match.clear();
  } else if (std::find(numbers.begin(), numbers.end(), name) != numbers.end() && !text.empty()) {
    faults.values[name] = strtoll(text.c_str(), nullptr, 10);
  } else {
    return -EINVAL;
  }
  return 0;
}

int obey_all(const char* data, size_t size) {
  std::istringstream lines(std::string(data, size));
  const std::lock_guard guard(faults.lock);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = std::min(line.find(' '), line.size());
    const int error = obey(line.substr(0, space), space < line.size() ? line.substr(space + 1) : "");
    if (error != 0) {
      return error;
    }
  }
  return static_cast<int>(size);
}

std::string counters() {
  const std::lock_guard guard(faults.lock);
  size_t unsynced = 0;
  for (const auto& [number, file] : faults.unsynced) {
    unsynced += file.writes.size();
  }
  std::ostringstream text;
  for (const auto& [name, count] : faults.counts) {
    text << name << ' ' << count << '\n';
  }
  text << "unsynced " << unsynced << '\n';
  return text.str();
}

void* fault_init(fuse_conn_info*, fuse_config* config) {
  config->use_ino = 1;
  config->attr_timeout = 0;
  config->entry_timeout = 0;
  config->negative_timeout = 0;
  return nullptr;
}

int fault_getattr(const char* path, struct stat* found, fuse_file_info*) {
  if (path == CONTROL) {
    *found = {};
    found->st_mode = S_IFREG | 0600;
    found->st_nlink = 1;
    found->st_uid = geteuid();
    return 0;
  }
  const int is_dark = dark();
  return is_dark != 0 ? is_dark : result_of(lstat(backing(path).c_str(), found));
}

int fault_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*, fuse_readdir_flags) {
  DIR* directory = opendir(backing(path).c_str());
  if (directory == nullptr) {
    return -errno;
  }
  while (const dirent* entry = readdir(directory)) {
    fill(buffer, entry->d_name, nullptr, 0, static_cast<fuse_fill_dir_flags>(0));
  }
  closedir(directory);
  return 0;
}

int open_backing(const char* path, int flags, mode_t mode, fuse_file_info* file) {
  if (const int is_dark = dark(); is_dark != 0) {
    return is_dark;
  }
  // Buffers of libfuse are not aligned; what the kernel sends for a direct write is a whole write all the same.
  const int fd = open(backing(path).c_str(), (flags & ~(O_DIRECT | O_APPEND)) | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd < 0) {
    return -errno;
  }
  file->fh = static_cast<uint64_t>(fd);
  return 0;
}

int fault_open(const char* path, fuse_file_info* file) {
  if (path == CONTROL) {
    file->direct_io = 1;
    return 0;
  }
  // The kernel reads around partial pages it writes, also in a file opened for writing alone.
  const int flags = (file->flags & O_ACCMODE) == O_WRONLY ? (file->flags & ~O_ACCMODE) | O_RDWR : file->flags;
  return open_backing(path, flags, 0, file);
}

int fault_create(const char* path, mode_t mode, fuse_file_info* file) {
  return open_backing(path, O_RDWR | O_CREAT | (file->flags & (O_EXCL | O_TRUNC)), mode, file);
}

int fault_read(const char* path, char* data, size_t size, off_t offset, fuse_file_info* file) {
  if (path == CONTROL) {
    const std::string text = counters();
    const size_t begin = std::min(text.size(), static_cast<size_t>(offset));
    return static_cast<int>(text.copy(data, size, begin));
  }
  if (const int error = wait_for(judge(path, offset, "read")); error != 0) {
    return error;
  }
  const ssize_t read = pread(static_cast<int>(file->fh), data, size, offset);
  return read < 0 ? -errno : static_cast<int>(read);
}

int fault_write(const char* path, const char* data, size_t size, off_t offset, fuse_file_info* file) {
  if (path == CONTROL) {
    return obey_all(data, size);
  }
  const Verdict verdict = judge(path, offset, "write");
  if (const int error = wait_for(verdict); error != 0) {
    return error;
  }
  const int fd = static_cast<int>(file->fh);
  const size_t landing = verdict.torn_bytes < 0 ? size : std::min(size, static_cast<size_t>(verdict.torn_bytes));
  std::unique_lock guard(faults.lock);
  if (faults.is_dark) {
    return -EIO;
  }
  if (faults.value("record") != 0) {
    record(fd, data, landing, offset);
  } else {
    guard.unlock();
  }
  if (pwrite(fd, data, landing, offset) != static_cast<ssize_t>(landing)) {
    return -errno;
  }
  const off_t end = offset + static_cast<off_t>(size);
  return landing < size && size_of(fd) < end && ftruncate(fd, end) != 0 ? -errno : static_cast<int>(size);
}

int fault_fsync(const char* path, int, fuse_file_info* file) {
  if (const int error = wait_for(judge(path, 0, "sync")); error != 0) {
    return error;
  }
  struct stat found{};
  const std::lock_guard guard(faults.lock);
  if (faults.is_dark || fstat(static_cast<int>(file->fh), &found) != 0) {
    return -EIO;
  }
  if (const auto recorded = faults.unsynced.find(found.st_ino); recorded != faults.unsynced.end()) {
    drop_record(recorded->second);
    faults.unsynced.erase(recorded);
  }
  return 0;
}

int fault_fallocate(const char* path, int mode, off_t offset, off_t length, fuse_file_info* file) {
  const int error = wait_for(judge(path, offset, "write"));
  return error != 0 ? error : result_of(fallocate(static_cast<int>(file->fh), mode, offset, length));
}

int fault_release(const char* path, fuse_file_info* file) {
  return path == CONTROL ? 0 : result_of(close(static_cast<int>(file->fh)));
}

int fault_truncate(const char* path, off_t size, fuse_file_info* file) {
  if (path == CONTROL) {
    return 0;
  }
  const int is_dark = dark();
  return is_dark != 0       ? is_dark
         : file != nullptr ? result_of(ftruncate(static_cast<int>(file->fh), size))
                            : result_of(truncate(backing(path).c_str(), size));
}

int fault_unlink(const char* path) { return dark() != 0 ? -EIO : result_of(unlink(backing(path).c_str())); }

int fault_mkdir(const char* path, mode_t mode) { return dark() != 0 ? -EIO : result_of(mkdir(backing(path).c_str(), mode)); }

int fault_rmdir(const char* path) { return dark() != 0 ? -EIO : result_of(rmdir(backing(path).c_str())); }

int fault_rename(const char* from, const char* to, unsigned flags) {
  return flags != 0 ? -EINVAL : dark() != 0 ? -EIO : result_of(rename(backing(from).c_str(), backing(to).c_str()));
}

fuse_operations operations() {
  fuse_operations all{};
  all.init = fault_init;
  all.getattr = fault_getattr;
  all.readdir = fault_readdir;
  all.open = fault_open;
  all.create = fault_create;
  all.read = fault_read;
  all.write = fault_write;
  all.fsync = fault_fsync;
  all.fallocate = fault_fallocate;
  all.release = fault_release;
  all.truncate = fault_truncate;
  all.unlink = fault_unlink;
  all.mkdir = fault_mkdir;
  all.rmdir = fault_rmdir;
  all.rename = fault_rename;
  return all;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s DIRECTORY MOUNT_POINT\n", arguments[0]);
    return 2;
  }
  umask(0);
  root = arguments[1];
  char foreground[] = "-f";
  char* passed[] = {arguments[0], arguments[2], foreground, nullptr};
  const fuse_operations all = operations();
  return fuse_main(3, passed, &all, nullptr);
}
