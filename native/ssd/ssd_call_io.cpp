// The SSD tier's I/O by preadv and pwrite; and the answer of a build that has no rings.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ssd/ssd_format.h"
#include "ssd/ssd_io.h"

namespace kvpool {
namespace {

// Goes on where a call stopped short. Returns 0, an errno, or NO_MORE_BYTES.
template <typename Call>
int transfer_all(const SsdFiles& files, uint64_t at, uint64_t size, Call call) noexcept {
  uint64_t done = 0;
  while (done < size) {
    const ssize_t moved = call(done, size - done, static_cast<off_t>(at + done));
    if (moved < 0 && errno == EINTR) {
      continue;
    }
    if (moved <= 0) {
      return moved < 0 ? errno : SsdIo::NO_MORE_BYTES;
    }
    done += static_cast<uint64_t>(moved);
    if (done < size && !files.can_go_on_at(at + done)) {
      return SsdIo::NO_MORE_BYTES;
    }
  }
  return 0;
}

class CallIo final : public SsdIo {
 public:
  explicit CallIo(std::shared_ptr<SsdFiles> files) : files_(std::move(files)) {}

  int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept override {
    const SsdPlace place = files_->place(offset);
    return transfer_all(*files_, place.at, size,
                        [&](uint64_t done, uint64_t left, off_t at) { return pread(place.fd, bytes + done, left, at); });
  }

  int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept override {
    const SsdPlace place = files_->place(offset);
    return transfer_all(*files_, place.at, header.size() + size, [&](uint64_t done, uint64_t left, off_t at) {
      if (done >= header.size()) {
        return pread(place.fd, bytes + (done - header.size()), left, at);
      }
      const iovec parts[2] = {{header.data() + done, header.size() - done}, {bytes, size}};
      return preadv(place.fd, parts, 2, at);
    });
  }

  int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept override {
    const SsdPlace place = files_->place(offset);
    const int error = transfer_all(*files_, place.at, size, [&](uint64_t done, uint64_t left, off_t at) {
      return pwrite(place.fd, bytes + done, left, at);
    });
    files_->note_write(offset);
    return error;
  }

 private:
  const std::shared_ptr<SsdFiles> files_;
};

}  // namespace

int SsdIo::write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept {
  for (uint64_t at = 0; at < size; at += step) {
    const uint64_t length = std::min(step, size - at);
    const uint8_t* const bytes = fill(0, at, length);
    if (bytes == nullptr) {
      return 0;
    }
    const int error = write(offset + at, bytes, length);
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
SsdRingResult make_ring_io(std::shared_ptr<SsdFiles>) { return {nullptr, ENOSYS}; }
#endif

}  // namespace kvpool
