// The system calls behind a wait for landings. See landing_wait.h.
#include "shared_index/landing_wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <utility>

// Older libc headers lack these; the values are kernel ABI.
#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#ifndef FUTEX_32
#define FUTEX_32 2
#endif

namespace kvpool {
namespace {

// The kernel's futex_waitv, which older headers lack.
struct WaitedWord {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(WaitedWord) == 24);

std::atomic<bool> lacks_waitv = false;

timespec split(double seconds) noexcept {
  const auto whole = static_cast<time_t>(seconds);
  return {whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
}

timespec deadline_after(double timeout_s) noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const timespec wait = split(timeout_s);
  const long nanoseconds = now.tv_nsec + wait.tv_nsec;
  return {now.tv_sec + wait.tv_sec + nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
}

}  // namespace

void wake_landing(const uint32_t& word) noexcept {
  static_cast<void>(syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0));
}

void LandingWait::add(std::shared_ptr<const IndexView> index, SlotAddress slot, uint32_t seen) noexcept {
  const uint32_t* const address = index->landing_word(slot);
  if (address != nullptr && !is_full()) {
    words_[count_++] = {std::move(index), address, seen};
  }
}

void LandingWait::clear() noexcept {
  for (; count_ > 0; --count_) {
    words_[count_ - 1] = {};
  }
}

// Waiting needs no right to write. Woken, late, interrupted or refused: the caller looks again in any case.
void LandingWait::wait(double timeout_s) const noexcept {
  if (count_ <= 1 || lacks_waitv.load(std::memory_order_relaxed)) {
    wait_for_first(timeout_s);
    return;
  }
  std::array<WaitedWord, WORDS_MAX> waited;
  for (size_t index = 0; index < count_; ++index) {
    waited[index] = {words_[index].seen, reinterpret_cast<uintptr_t>(words_[index].address), FUTEX_32, 0};
  }
  const timespec deadline = deadline_after(timeout_s);
  const long rc = syscall(SYS_futex_waitv, waited.data(), count_, 0, &deadline, CLOCK_MONOTONIC);
  if (rc < 0 && (errno == ENOSYS || errno == EPERM)) {
    lacks_waitv.store(true, std::memory_order_relaxed);
    wait_for_first(timeout_s);
  }
}

void LandingWait::wait_for_first(double timeout_s) const noexcept {
  if (count_ > 0) {
    const timespec timeout = split(timeout_s);
    static_cast<void>(syscall(SYS_futex, words_[0].address, FUTEX_WAIT, words_[0].seen, &timeout, nullptr, 0));
  }
}

}  // namespace kvpool
