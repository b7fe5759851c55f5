// The GIL given back over work that needs no Python object, and taken again behind it.
//
// What it is: nanobind's guard that outlives the interpreter. A daemon thread may come back from its work while the interpreter ends.
// Python up to 3.13 then ends the thread by an unwinding, which a destructor must not pass: the process would abort ("terminate called
// without an active exception"). Later ones park the thread. This parks it with each of them, until the process ends.
// Threads: one. REQUIRES: the thread has the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstddef>
#include <optional>

namespace kvpool {

class ReleasedGil {
 public:
  ReleasedGil() noexcept : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding: it must neither go on nor be forgotten
      for (;;) {
        ::pause();
      }
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// The GIL given back over work on many bytes, and kept over a few: who gives it back may wait milliseconds for it (5 ms, Python's switch
// interval, beside a thread that computes), which is more than all of a short call.
class GilReleasedOver {
 public:
  explicit GilReleasedOver(size_t bytes) noexcept {
    if (bytes > BYTES_KEPT) {
      released_.emplace();
    }
  }

 private:
  static constexpr size_t BYTES_KEPT = size_t{64} << 10;  // hashed in 10 to 60 us, by the length of chunks
  std::optional<ReleasedGil> released_;
};

}  // namespace kvpool
