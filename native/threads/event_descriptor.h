// A descriptor that is readable while outcomes wait for the control thread, and the list of them.
//
// What it is: an eventfd beside a list. What it is not: a lock: the list's owner has it.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <system_error>
#include <vector>

namespace kvpool {

// Throws std::system_error where there is no descriptor to be had.
[[nodiscard]] inline int new_event_fd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return fd;
}

// It can only fail by being full, and then it is readable.
inline void notify(int event_fd) noexcept {
  const uint64_t one = 1;
  static_cast<void>(!::write(event_fd, &one, sizeof(one)));
}

inline void clear_notices(int event_fd) noexcept {
  uint64_t count = 0;
  static_cast<void>(!::read(event_fd, &count, sizeof(count)));
}

// Takes the first `limit` of a list; the descriptor stays readable where some are left. REQUIRES: the list's lock is held.
template <typename Outcome>
[[nodiscard]] std::vector<Outcome> take_front(std::vector<Outcome>& outcomes, size_t limit, int event_fd) {
  clear_notices(event_fd);
  std::vector<Outcome> taken;
  if (outcomes.size() <= limit) {
    taken.swap(outcomes);
    return taken;
  }
  const auto end = outcomes.begin() + static_cast<std::ptrdiff_t>(limit);
  taken.assign(std::make_move_iterator(outcomes.begin()), std::make_move_iterator(end));
  outcomes.erase(outcomes.begin(), end);
  notify(event_fd);
  return taken;
}

}  // namespace kvpool
