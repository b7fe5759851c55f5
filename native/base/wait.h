// Waiting on a condition with a timeout in seconds, without the overflow that a long one would bring.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace kvpool {

inline constexpr double WAIT_S_MAX = 86400.0;

// Whether the condition held within the time. REQUIRES: the lock is held, and guards the condition.
template <typename Condition>
[[nodiscard]] bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double timeout_s,
                            Condition condition) {
  const std::chrono::duration<double> bounded(std::clamp(timeout_s, 0.0, WAIT_S_MAX));
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(bounded);
  return changed.wait_until(lock, deadline, condition);
}

}  // namespace kvpool
