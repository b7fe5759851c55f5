// The segment files of an SSD tier: a directory of preallocated files of one size, and nothing else of it.
//
// What it is: descriptors, opened once and kept. What it is not: a judge of what the bytes mean, or of which are in use.
// Invariant: every file that exists has been allocated whole, is this user's own regular file and is never resized, so the
// tier never takes more of the disk than segments * segment_bytes.
// Threads: `open` and `sync` from one thread at a time; reading and writing from any.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvpool {

class SsdFiles;

struct SsdFilesResult {
  std::shared_ptr<SsdFiles> files;
  int error = 0;       // errno
  std::string detail;  // what failed, on which path, what was expected
};

class SsdFiles {
 public:
  // Opens the directory (made with rights 0700 where it is absent), takes its lock, and opens or makes every segment file.
  // Files of another size, owner or kind are refused and left alone. `is_direct` wanted: past the page cache where the
  // file system can do that.
  [[nodiscard]] static SsdFilesResult open(const std::string& path, uint64_t segment_bytes, uint32_t segments,
                                           bool wants_direct);

  ~SsdFiles();
  SsdFiles(const SsdFiles&) = delete;
  SsdFiles& operator=(const SsdFiles&) = delete;

  [[nodiscard]] uint64_t segment_bytes() const noexcept { return segment_bytes_; }
  [[nodiscard]] uint32_t segments() const noexcept { return static_cast<uint32_t>(segments_.size()); }
  [[nodiscard]] bool is_direct() const noexcept { return is_direct_; }
  [[nodiscard]] bool contains(uint64_t offset, uint64_t length) const noexcept;

  // Reads or writes at an offset counted over all files, whole or not at all. Returns 0, an errno, or NO_MORE_BYTES where the file
  // ends before. REQUIRES: the range lies in one segment; addresses, lengths and offset are whole pages.
  static constexpr int NO_MORE_BYTES = -1;
  [[nodiscard]] int read(uint64_t offset, iovec* parts, int count) const noexcept;
  [[nodiscard]] int write(uint64_t offset, iovec* parts, int count) noexcept;

  // Has the disk keep what was written since the last call. Returns 0 or the first errno; a failure is never tried again:
  // what was written since the last success counts as lost.
  [[nodiscard]] int sync() noexcept;

 private:
  struct Segment {
    int fd = -1;
    std::atomic<bool> is_dirty = false;
  };

  SsdFiles(int directory, int lock, uint64_t segment_bytes, uint32_t segments);

  SsdFilesResult open_segment(uint32_t number, const std::string& path, bool wants_direct);

  const int directory_;  // owned
  const int lock_;       // owned
  const uint64_t segment_bytes_;
  bool is_direct_ = true;
  std::vector<Segment> segments_;
};

}  // namespace kvpool
