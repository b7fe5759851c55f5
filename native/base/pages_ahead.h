// Pages ahead: brings in the pages that are about to be written, on a thread of its own, while their writer does something else.
//
// What it is: time, nothing depends on it. What it does not bring, because it has ended or there is no further thread to be had, page
// faults bring. Bytes stay as they are.
// Huge pages are taken where the kernel has some at hand, for an eighth of the time; not where it has to move others before, or the
// hypervisor has to find memory for them first.
// Threads: made and ended by one; the mappings live as long.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory.h"

namespace kvpool {

class PagesAhead {
 public:
  explicit PagesAhead(std::vector<WrittenSoon> wanted) noexcept : wanted_(std::move(wanted)) {
    try {
      thread_ = std::thread([this] { bring(); });
      pthread_setname_np(thread_.native_handle(), "kvpool-ahead");
    } catch (const std::system_error&) {
      is_ending_ = true;
    }
  }
  // Waits for one step at most.
  ~PagesAhead() {
    is_ending_ = true;
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

 private:
  void bring() const noexcept {
    HugePageBudget budget;
    for (const WrittenSoon& one : wanted_) {
      for (uint64_t at = one.bytes.begin; at < one.bytes.end && !is_ending_;) {
        at = one.mapping->expect_writes(at, one.bytes.end, budget);
      }
    }
  }

  const std::vector<WrittenSoon> wanted_;
  std::atomic<bool> is_ending_ = false;
  std::thread thread_;
};

}  // namespace kvpool
