// Shared memory regions: a memfd and its mapping, as one object that unmaps when its last user is gone.
//
// What it is: the daemon creates regions (arena, index, staging) and hands their descriptors to clients, which
// attach them. What it is not: an allocator, or a judge of what the bytes mean.
// Invariant: a Mapping that exists is mapped for its whole life, and its memfd can neither shrink nor grow, so no
// access inside [0, size()) can raise SIGBUS. That is why a region without these seals is refused by `attach`.
// Shares itself, so that a binding hands out this one count: a native thread that drops the last job of a mapping needs no Python.
// Threads: create/attach/seal on the owner's thread; populate, collapse and the bytes from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/process_life.h"
#include "base/types.h"

namespace kvpool {

class Mapping;

// A stretch of a mapping, in bytes. Empty: there is none.
struct Stretch {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// What is about to be written of a mapping.
struct WrittenSoon {
  const Mapping* mapping;
  Stretch bytes;
};

// How much time huge pages may take: no more than the page faults that they are in place of.
struct HugePageBudget {
  uint64_t used_ns = 0;
  uint64_t pages = 0;
  bool is_spent = false;
};

// A mapping, or the errno of the step that failed and the step's name.
struct MappingResult {
  std::shared_ptr<Mapping> mapping;
  int error = 0;
  const char* step = "";
};

class Mapping : public std::enable_shared_from_this<Mapping> {
 public:
  // A new zeroed region of `size` bytes, mapped writable, mode 0600, sealed against resizing. `hugetlb` takes
  // reserved huge pages (and fails with ENOMEM where none are reserved); `size` must then be a multiple of 2 MiB.
  [[nodiscard]] static MappingResult create(const std::string& name, uint64_t size, bool hugetlb);

  // Maps a region that another process created. The descriptor is duplicated, the caller keeps its own.
  // Fails with EPERM if the region could shrink, with EINVAL if it is smaller than `size`.
  [[nodiscard]] static MappingResult attach(int fd, uint64_t size, bool writable);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] uint8_t* data() const noexcept { return data_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool is_writable() const noexcept { return writable_; }
  [[nodiscard]] bool contains(uint64_t offset, uint64_t length) const noexcept {
    return length <= size_ && offset <= size_ - length;
  }

  // Brings the pages of a range into memory without changing their bytes. Returns 0 or an errno.
  // REQUIRES: contains(offset, length); both multiples of PAGE_BYTES.
  [[nodiscard]] int populate(uint64_t offset, uint64_t length) const noexcept;

  // Asks the kernel to turn a populated range into huge pages. Returns whether it did; nothing depends on it.
  // REQUIRES: as populate.
  [[nodiscard]] bool collapse(uint64_t offset, uint64_t length) const noexcept;

  // Brings the pages of the first part of a range that is about to be written into memory, as one huge page where that is quick; where
  // the rest of it begins. Bytes stay as they are. REQUIRES: offset < end <= size().
  [[nodiscard]] uint64_t expect_writes(uint64_t offset, uint64_t end, HugePageBudget& budget) const noexcept;

  // The first stretch at or behind `offset` that has pages; what lies between stretches reads as zeros, and reading it would take
  // pages for it. All the rest where the kernel does not report it.
  [[nodiscard]] Stretch next_pages(uint64_t offset) const noexcept;

  // From now on nobody can map the region writable or write to it; mappings that exist keep their rights.
  // Returns 0 or an errno.
  [[nodiscard]] int seal_read_only() const noexcept;

 private:
  Mapping(uint8_t* data, uint64_t size, int fd, bool writable) noexcept
      : data_(data), size_(size), fd_(fd), writable_(writable) {}

  static MappingResult map(int fd, uint64_t size, bool writable);

  uint8_t* const data_;
  const uint64_t size_;
  const int fd_;  // owned
  const bool writable_;
  const uint32_t life_ = process_life();  // a forked child has not inherited the mapping
};

}  // namespace kvpool
