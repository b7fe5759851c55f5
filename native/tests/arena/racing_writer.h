// Another process that flips the bytes of a shared region for as long as this lives: a client with the arena mapped
// writable, at its worst.
//
// A process and not a thread: it is one in the field, and what two processes do to the same bytes is no data race of either.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "base/check.h"

namespace kvpool::testing {

class RacingWriter {
 public:
  static constexpr size_t BYTES = 1024;

  RacingWriter() {
    void* shared = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KVPOOL_CHECK(shared != MAP_FAILED);
    bytes_ = static_cast<uint8_t*>(shared);
    child_ = fork();
    KVPOOL_CHECK(child_ >= 0);
    if (child_ == 0) {
      flip_for_ever();
    }
    while (*static_cast<volatile uint8_t*>(bytes_) == 0) {
    }
  }
  ~RacingWriter() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    munmap(bytes_, BYTES);
  }
  RacingWriter(const RacingWriter&) = delete;
  RacingWriter& operator=(const RacingWriter&) = delete;

  [[nodiscard]] const uint8_t* bytes() const noexcept { return bytes_; }

 private:
  [[noreturn]] void flip_for_ever() const noexcept {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto* const words = reinterpret_cast<volatile uint64_t*>(bytes_);
    for (uint64_t pattern = 0x0101010101010101U;; pattern = pattern * 6364136223846793005U + 1442695040888963407U) {
      for (size_t i = 0; i < BYTES / sizeof(pattern); ++i) {
        words[i] = pattern | 1U;
      }
    }
  }

  uint8_t* bytes_ = nullptr;
  pid_t child_ = -1;
};

}  // namespace kvpool::testing
