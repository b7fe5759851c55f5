// The ring of changes and its descriptor. See change_feed.h.
#include "records/change_feed.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {

std::shared_ptr<ChangeFeed> ChangeFeed::create(uint32_t capacity) {
  KVPOOL_CHECK(capacity > 0);
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd < 0 ? nullptr : std::shared_ptr<ChangeFeed>(new ChangeFeed(capacity, fd));
}

ChangeFeed::ChangeFeed(uint32_t capacity, int fd)
    : capacity_(capacity), ring_(std::make_unique_for_overwrite<Change[]>(capacity)), fd_(fd) {}

ChangeFeed::~ChangeFeed() { ::close(fd_); }

void ChangeFeed::add(const Change& change) noexcept {
  if (count_ == capacity_) {
    first_ = wrapped(first_ + 1);
    --count_;
    ++lost_;
    has_gap_ = true;
  }
  ring_[wrapped(first_ + count_)] = change;
  ++count_;
  signal();
}

void ChangeFeed::mark_gap() noexcept {
  lost_ += count_;
  count_ = 0;
  has_gap_ = true;
  signal();
}

size_t ChangeFeed::take(Change* out, size_t limit, bool& has_gap) noexcept {
  if (is_signalled_) {
    uint64_t ignored = 0;
    static_cast<void>(!::read(fd_, &ignored, sizeof(ignored)));
    is_signalled_ = false;
  }
  has_gap = std::exchange(has_gap_, false);
  const size_t taken = std::min(limit, count_);
  for (size_t index = 0; index < taken; ++index) {
    out[index] = ring_[wrapped(first_ + index)];
  }
  first_ = wrapped(first_ + taken);
  count_ -= taken;
  return taken;
}

void ChangeFeed::signal() noexcept {
  if (!is_signalled_) {
    const uint64_t one = 1;
    is_signalled_ = ::write(fd_, &one, sizeof(one)) == static_cast<ssize_t>(sizeof(one));
  }
}

}  // namespace kvpool
