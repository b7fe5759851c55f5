// Memory of the SSD tier's own that chunks pass through on their way to the files, and from there when they are read a second
// time: one for each I/O thread.
//
// What it is: pages that no client can reach, huge where the kernel has them. What it is not: a cache; what it holds means
// something during one piece of work alone.
//
// Why bytes take this way: a client may write to the arena and punch holes in it at any time, also while a disk does, and
// pages that the kernel was given before a hole was made are not the arena's any more. What is checked here is what the disk
// has read or written. Copying costs 0.01 to 0.02 s of CPU for each GB more than computing the checksum alone, which happens
// in the same pass (measured; see ARCHITECTURE.md).
//
// Invariant: mapped for its whole life. Threads: the one that works with it.
#pragma once

#include <cstdint>

namespace kvpool {

class SsdBounce {
 public:
  // Two steps of a write, each with room for the longest header of a slot.
  static constexpr uint64_t HALF_BYTES = (2 << 20) + 9 * 4096;
  static constexpr uint64_t BYTES = 2 * HALF_BYTES;

  // Throws std::system_error where there is no memory.
  SsdBounce();
  ~SsdBounce();
  SsdBounce(const SsdBounce&) = delete;
  SsdBounce& operator=(const SsdBounce&) = delete;

  // Whole pages from here on.
  [[nodiscard]] uint8_t* data() const noexcept { return data_; }

 private:
  uint8_t* data_ = nullptr;
};

}  // namespace kvpool
