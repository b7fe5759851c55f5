// How a thread of the SSD tier reads and writes its files: by plain calls, or through a ring of the kernel's (io_uring).
//
// What it is: one transfer at a time, complete or failed when the call returns. What it is not: a queue, or a check of the bytes.
//
// 1. When a call returns, no part of it is under way: its memory may be freed.
// 2. A ring that cannot be made, or fails later, is replaced by plain calls; errors are then those of the plain calls. A transfer
//    that is too short to gain by a ring uses plain calls too.
// 3. Reads are plain calls, which end with their thread also where the process is killed.
// 4. No memory is registered with the kernel beyond a call: a client can remove pages under a registration, and the disk would
//    go on reading and writing the old pages for as long as the registration lives.
//
// Threads: an object belongs to the thread that made it, which uses and destroys it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "ssd/ssd_files.h"
#include "ssd/ssd_format.h"

namespace kvpool {

class SsdIo {
 public:
  SsdIo() = default;
  virtual ~SsdIo() = default;
  SsdIo(const SsdIo&) = delete;
  SsdIo& operator=(const SsdIo&) = delete;

  // Moves bytes at an offset counted over all files. Returns 0, an errno, or NO_MORE_BYTES where the file ends before.
  // REQUIRES: the range lies in one segment; address, size and offset are whole pages where the files are direct.
  static constexpr int NO_MORE_BYTES = -1;
  [[nodiscard]] virtual int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept = 0;
  [[nodiscard]] virtual int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept = 0;
  // Reads a slot's header and `size` bytes behind it, each to its own place, in one call.
  [[nodiscard]] virtual int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept = 0;

  // The bytes of a step of a longer write, `at` bytes behind its start, made in one of STEPS_AT_ONCE places; null: no more.
  // A place is asked for again when nothing is written from it any more.
  using Fill = std::function<const uint8_t*(unsigned place, uint64_t at, uint64_t size)>;
  static constexpr unsigned STEPS_AT_ONCE = 2;
  // Writes one range in steps: where this way of I/O can, the disk has one while the next is made. REQUIRES: as `write`.
  [[nodiscard]] virtual int write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept;

  [[nodiscard]] virtual bool is_ring() const noexcept { return false; }
};

// What became of a read that returned this.
[[nodiscard]] constexpr SsdStatus read_status_of(int error) noexcept {
  if (error == 0) {
    return SsdStatus::OK;
  }
  return error == SsdIo::NO_MORE_BYTES ? SsdStatus::SHORT_READ : SsdStatus::IO_ERROR;
}

// Plain calls.
[[nodiscard]] std::unique_ptr<SsdIo> make_call_io(std::shared_ptr<SsdFiles> files);

// A ring, or why there is none: ENOSYS where the kernel or this build does not have them, EPERM where they are refused.
struct SsdRingResult {
  std::unique_ptr<SsdIo> io;
  int error = 0;
};
[[nodiscard]] SsdRingResult make_ring_io(std::shared_ptr<SsdFiles> files);

}  // namespace kvpool
