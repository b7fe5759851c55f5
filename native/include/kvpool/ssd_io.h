// How a thread of the SSD tier reads and writes its files: by plain calls, or through a ring of the kernel's (io_uring).
//
// What it is: one transfer at a time, whole or not at all, waited for. What it is not: a queue, or a judge of the bytes.
//
// 1. When `read` or `write` returns nothing of it is under way: the memory may go.
// 2. A ring that cannot be had, or fails later, is replaced by plain calls; what is said is then said by those. What is too
//    short to gain by a ring goes by plain calls too.
// 3. Memory is pinned (registered) only when `register_next` is called, a slice of the arena at a time. A transfer that
//    lies in a pinned slice spares the kernel looking its pages up; everything else goes without, with the same result.
//
// Pinned pages stay what the ring writes to for its whole life. The arena is never resized, but a client that may write it
// can punch holes in it; what is then read or written through the old pages does not fit its checksums and is a miss.
//
// Threads: an object belongs to the thread that made it, which uses and destroys it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "kvpool/memory.h"
#include "kvpool/ssd_files.h"

namespace kvpool {

class SsdIo {
 public:
  SsdIo() = default;
  virtual ~SsdIo() = default;
  SsdIo(const SsdIo&) = delete;
  SsdIo& operator=(const SsdIo&) = delete;

  // Moves bytes at an offset counted over all files. Returns 0, an errno, or NO_MORE_BYTES where the file ends before.
  // `parts` is used up. REQUIRES: the range lies in one segment; addresses, lengths and offset are whole pages where the
  // files are direct.
  static constexpr int NO_MORE_BYTES = -1;
  [[nodiscard]] virtual int read(uint64_t offset, iovec* parts, int count) noexcept = 0;
  [[nodiscard]] virtual int write(uint64_t offset, iovec* parts, int count) noexcept = 0;
  // The same, and calls `meanwhile` once, beside the disk's work where this way of I/O can, before it otherwise. It may read
  // what is being written, and change nothing of it.
  [[nodiscard]] virtual int write_beside(uint64_t offset, iovec* parts, int count,
                                         const std::function<void()>& meanwhile) noexcept {
    meanwhile();
    return write(offset, parts, count);
  }

  // Writes one long range in steps, two of them under way at a time where this way of I/O can. `handed_over` is called for each
  // step with the bytes handed over by then, as `meanwhile` above; where it returns false no further step is begun.
  [[nodiscard]] virtual int write_long(uint64_t offset, const iovec& range, uint64_t step,
                                       const std::function<bool(uint64_t)>& handed_over) noexcept;

  [[nodiscard]] virtual bool is_ring() const noexcept { return false; }

  // Pins the next slice of the arena: one or two milliseconds for 62 MiB that have their pages; REQUIRES that they do, since
  // it gives them pages otherwise, at 2 s for each GiB. Returns whether there is more to pin.
  [[nodiscard]] virtual bool register_next() noexcept { return false; }
  // Whether the whole arena is pinned; otherwise the errno that ended it, 0 where none has.
  [[nodiscard]] virtual bool has_registered_all() const noexcept { return false; }
  [[nodiscard]] virtual int register_error() const noexcept { return 0; }
};

// Plain calls.
[[nodiscard]] std::unique_ptr<SsdIo> make_call_io(std::shared_ptr<SsdFiles> files);

// A ring, or why there is none: ENOSYS where the kernel or this build does not have them, EPERM where they are refused.
struct SsdRingResult {
  std::unique_ptr<SsdIo> io;
  int error = 0;
};
[[nodiscard]] SsdRingResult make_ring_io(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena);

}  // namespace kvpool
