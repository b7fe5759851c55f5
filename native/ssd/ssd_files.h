// The segment files of an SSD tier: a directory of preallocated files of one size, and nothing else of it.
//
// What it is: descriptors, opened once and held open. What it does not know: what the bytes mean, and which of them are in use.
// Invariant: every file that exists has been allocated whole, is this user's own regular file and is never resized, so the
// tier never takes more of the disk than segments * segment_bytes.
// ssd_io.h reads and writes the bytes.
// Threads: `open` and `sync` from one thread at a time; the rest from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"

namespace kvpool {

class SsdFiles;

// An offset over all files, as a file and an offset in it.
struct SsdPlace {
  uint32_t segment;
  int fd;
  uint64_t at;  // in the file
};

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

  // REQUIRES: contains(offset, 1).
  [[nodiscard]] SsdPlace place(uint64_t offset) const noexcept;
  // Whether a transfer that stopped here can go on: direct I/O stops between pages only where a file has been cut short.
  [[nodiscard]] bool can_go_on_at(uint64_t at) const noexcept { return !is_direct_ || at % PAGE_BYTES == 0; }
  // Has the next `sync` see to the offset's segment. To be called when a write has ended, before the end is reported.
  void note_write(uint64_t offset) noexcept;

  // Makes the writes noted since the last call durable. Returns 0 or the first errno; a failed sync is never retried: what was
  // written since the last success counts as lost.
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
