#include "sparse/worker_team.h"

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {
namespace {

// Some 20 microseconds: longer than a phase of a recall leaves a thread without work. A guess.
constexpr unsigned SPINS = 5000;

void pause_briefly() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until the word is no longer `old`.
void wait_while(const std::atomic<uint32_t>& word, uint32_t old) noexcept {
  for (unsigned i = 0; i < SPINS; ++i) {
    if (word.load(std::memory_order_acquire) != old) {
      return;
    }
    pause_briefly();
  }
  word.wait(old, std::memory_order_acquire);
}

}  // namespace

WorkerTeam::WorkerTeam(unsigned threads) : team_(threads) {
  KVPOOL_CHECK(threads > 0);
  try {
    for (unsigned i = 1; i < threads; ++i) {
      threads_.add([this] { serve(); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

WorkerTeam::~WorkerTeam() { stop(); }

void WorkerTeam::stop() {
  stops_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  static_cast<void>(threads_.join(ThreadGroup::FOR_GOOD));
}

void WorkerTeam::run_parts(uint32_t parts, Function function, const void* closure) {
  if (team_ == 1 || parts < 2 || threads_.is_inherited()) {
    for (uint32_t part = 0; part < parts; ++part) {
      function(closure, part);
    }
    return;
  }
  const std::lock_guard guard(run_lock_);
  KVPOOL_CHECK(inside_.load(std::memory_order_relaxed) == 0);
  function_ = function;
  closure_ = closure;
  parts_ = parts;
  next_.store(0, std::memory_order_relaxed);
  inside_.store(OPEN, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  work_on();
  uint32_t others = inside_.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
  while (others != 0) {
    wait_while(inside_, others);
    others = inside_.load(std::memory_order_acquire);
  }
}

void WorkerTeam::work_on() noexcept {
  for (;;) {
    const uint32_t part = next_.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts_) {
      return;
    }
    function_(closure_, part);
  }
}

void WorkerTeam::serve() noexcept {
  uint32_t seen = 0;
  while (!stops_.load(std::memory_order_relaxed)) {
    wait_while(round_, seen);
    seen = round_.load(std::memory_order_acquire);
    join_round();
  }
}

void WorkerTeam::join_round() noexcept {
  uint32_t inside = inside_.load(std::memory_order_relaxed);
  while ((inside & OPEN) != 0) {
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      work_on();
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) {  // closed, and the last
        inside_.notify_all();
      }
      return;
    }
  }
}

}  // namespace kvpool
