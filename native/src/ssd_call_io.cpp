// The SSD tier's I/O by preadv and pwritev; and the answer of a build that has no rings.
#include <algorithm>
#include <cerrno>

#include "kvpool/ssd_io.h"

namespace kvpool {
namespace {

// Goes on where a call stopped short. Returns 0, an errno, or NO_MORE_BYTES.
template <typename Call>
int transfer_all(const SsdFiles& files, iovec* parts, int count, uint64_t at, Call call) noexcept {
  while (count > 0) {
    const ssize_t moved = call(parts, count, static_cast<off_t>(at));
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    if (moved <= 0) {
      return moved < 0 ? errno : SsdIo::NO_MORE_BYTES;
    }
    auto left = static_cast<uint64_t>(moved);
    at += left;
    while (count > 0 && left >= parts->iov_len) {
      left -= parts->iov_len;
      ++parts;
      --count;
    }
    if (left > 0) {
      parts->iov_base = static_cast<uint8_t*>(parts->iov_base) + left;
      parts->iov_len -= left;
    }
    if (count > 0 && !files.can_go_on_at(at)) {
      return SsdIo::NO_MORE_BYTES;
    }
  }
  return 0;
}

class CallIo final : public SsdIo {
 public:
  explicit CallIo(std::shared_ptr<SsdFiles> files) : files_(std::move(files)) {}

  int read(uint64_t offset, iovec* parts, int count) noexcept override {
    const SsdPlace place = files_->place(offset);
    return transfer_all(*files_, parts, count, place.at,
                        [&](iovec* p, int n, off_t at) { return preadv(place.fd, p, n, at); });
  }

  int write(uint64_t offset, iovec* parts, int count) noexcept override {
    const SsdPlace place = files_->place(offset);
    const int error = transfer_all(*files_, parts, count, place.at,
                                   [&](iovec* p, int n, off_t at) { return pwritev(place.fd, p, n, at); });
    files_->note_write(offset);
    return error;
  }

 private:
  const std::shared_ptr<SsdFiles> files_;
};

}  // namespace

int SsdIo::write_long(uint64_t offset, const iovec& range, uint64_t step,
                      const std::function<bool(uint64_t)>& handed_over) noexcept {
  bool goes_on = true;
  for (uint64_t at = 0; at < range.iov_len && goes_on; at += step) {
    const uint64_t end = std::min<uint64_t>(at + step, range.iov_len);
    iovec part{static_cast<uint8_t*>(range.iov_base) + at, end - at};
    const int error = write_beside(offset + at, &part, 1, [&] { goes_on = handed_over(end); });
    if (error != 0) {
      return error;
    }
  }
  return 0;
}

std::unique_ptr<SsdIo> make_call_io(std::shared_ptr<SsdFiles> files) {
  return std::make_unique<CallIo>(std::move(files));
}

#ifndef KVPOOL_LIBURING
SsdRingResult make_ring_io(std::shared_ptr<SsdFiles>, std::shared_ptr<const Mapping>) { return {nullptr, ENOSYS}; }
#endif

}  // namespace kvpool
