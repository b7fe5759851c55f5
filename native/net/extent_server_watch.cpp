// The thread that accepts connections, reads their hellos and ends offers by their deadlines. See extent_server.h.
#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "threads/event_descriptor.h"
#include "net/extent_server.h"

namespace kvpool {
namespace {

// Where no descriptor is free, those who wait stay in the listener's backlog for so long.
constexpr std::chrono::milliseconds ACCEPT_PAUSE{100};
constexpr size_t ACCEPTED_PER_TURN = 64;

void wait_for_any(std::vector<pollfd>& polls, StreamClock::time_point until) {
  if (until == StreamClock::time_point::max()) {
    static_cast<void>(poll(polls.data(), polls.size(), -1));
    return;
  }
  const auto left = std::max(StreamClock::duration::zero(), until - StreamClock::now());
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec timeout{whole.count(), std::chrono::nanoseconds(left - whole).count()};
  static_cast<void>(ppoll(polls.data(), polls.size(), &timeout, nullptr));
}

}  // namespace

void ExtentServer::watch() {
  HelloDesk desk(options_.strangers_max, options_.hello_timeout, tls_.get());
  auto accepts_from = StreamClock::time_point::min();
  std::vector<pollfd> polls;
  while (true) {
    const bool accepts = accepts_from <= StreamClock::now();
    auto until = std::min(desk.next_deadline(), accepts ? StreamClock::time_point::max() : accepts_from);
    {
      const std::lock_guard guard(lock_);
      if (is_stopped_) {
        return;
      }
      until = std::min(until, next_deadline());
      watched_until_ = until;
    }
    polls = {{watch_fd_, POLLIN, 0}, {listener_.fd(), static_cast<short>(accepts ? POLLIN : 0), 0}};
    const size_t first = polls.size();
    desk.watch(polls);
    wait_for_any(polls, until);
    if (polls[0].revents != 0) {
      clear_notices(watch_fd_);
    }
    StrangerCounts counts;
    {
      const std::lock_guard guard(lock_);
      counts = stats_.strangers;
    }
    auto presented = desk.read(polls, first, counts);
    {
      const std::lock_guard guard(lock_);
      stats_.strangers = counts;
      for (HelloDesk::Presented& one : presented) {
        admit(one);
      }
      expire();
    }
    if ((polls[1].revents & POLLIN) != 0 && !accept_all(desk)) {
      accepts_from = StreamClock::now() + ACCEPT_PAUSE;
    }
  }
}

// Whether there were descriptors for all.
bool ExtentServer::accept_all(HelloDesk& desk) {
  for (size_t accepted = 0; accepted < ACCEPTED_PER_TURN; ++accepted) {
    const int fd = listener_.accept();
    if (fd == -EAGAIN || fd == -EWOULDBLOCK) {
      return true;
    }
    const std::lock_guard guard(lock_);
    if (fd < 0) {
      ++stats_.accept_failures;
      return fd != -EMFILE && fd != -ENFILE && fd != -ENOBUFS && fd != -ENOMEM;
    }
    desk.add(fd, stats_.strangers);
  }
  return true;
}

}  // namespace kvpool
