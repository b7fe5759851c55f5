// The SSD tier's I/O through a ring: of writes, out of the tier's own memory. Built only where liburing is; linked statically.
//
// Reads are plain calls: what a ring has under way when its process is killed goes on, and a read would write into slots of the arena
// that the next life of the daemon has given to others by then. A thread that is killed in a plain call ends with the call.
#include <liburing.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <vector>

#include "base/check.h"
#include "ssd/ssd_format.h"
#include "ssd/ssd_io.h"
#include "base/types.h"
#include "ssd/ring_setup.h"

namespace kvpool {
namespace {

constexpr unsigned ENTRIES = SsdIo::STEPS_AT_ONCE;
// Less goes by plain calls: a write does not end on one of the kernel's threads then. Measured: at 64 KiB rings write a quarter
// slower and save nothing.
constexpr uint64_t TRANSFER_BYTES_MIN = 256 << 10;
// More at a time than any piece has; a run's length is 32 bits.
constexpr uint64_t TRANSFER_BYTES_MAX = 1ULL << 30;
// The kernel took nothing, or sent a piece back unmoved: tried again after a nap. A guess, about a tenth of a second.
constexpr unsigned RETRIES_MAX = 100;
constexpr int UNDER_WAY = INT_MIN;  // no errno, no count of bytes
constexpr timespec NAP = {0, 1'000'000};

// One contiguous range of memory on its way, shrinking as it moves.
struct Run {
  uint8_t* address;
  uint64_t at;  // in the file
  uint32_t length;
};

class RingIo final : public SsdIo {
 public:
  // Takes the ring over.
  RingIo(const io_uring& ring, std::shared_ptr<SsdFiles> files)
      : ring_(ring), files_(std::move(files)), calls_(make_call_io(files_)) {
    std::vector<int> descriptors;
    for (uint32_t segment = 0; segment < files_->segments(); ++segment) {
      descriptors.push_back(files_->place(segment * files_->segment_bytes()).fd);
    }
    // Refused where there are more than a process may open: then without.
    has_files_ = io_uring_register_files(&ring_, descriptors.data(), files_->segments()) == 0;
  }

  ~RingIo() override {
    if (has_files_) {
      static_cast<void>(io_uring_unregister_files(&ring_));
    }
    close_ring(ring_);
  }

  int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept override {
    return calls_->read(offset, bytes, size);
  }

  int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept override {
    return calls_->read_slot(offset, header, bytes, size);
  }

  int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept override {
    if (by_calls(size)) {
      return calls_->write(offset, bytes, size);
    }
    // The kernel only reads them.
    runs_[0] = {const_cast<uint8_t*>(bytes), files_->place(offset).at, static_cast<uint32_t>(size)};
    const int error = transfer(offset);
    files_->note_write(offset);
    return error;
  }

  int write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept override;

  bool is_ring() const noexcept override { return !is_broken_; }

 private:
  [[nodiscard]] bool by_calls(uint64_t bytes) const noexcept {
    return is_broken_ || bytes < TRANSFER_BYTES_MIN || bytes > TRANSFER_BYTES_MAX;
  }
  int transfer(uint64_t offset) noexcept;
  void prepare(uint64_t offset, unsigned number) noexcept;
  unsigned complete(unsigned least, unsigned under_way) noexcept;
  int settle(Run& run, int moved, unsigned& retries) const noexcept;
  int finish_by_calls(uint64_t offset, unsigned number) noexcept;

  io_uring ring_;
  const std::shared_ptr<SsdFiles> files_;
  const std::unique_ptr<SsdIo> calls_;
  bool has_files_ = false;
  bool is_broken_ = false;
  std::array<Run, ENTRIES> runs_{};
  std::array<int, ENTRIES> results_{};
};

// The first run, in rounds. Nothing is under way between two of them.
int RingIo::transfer(uint64_t offset) noexcept {
  unsigned retries = 0;
  while (runs_[0].length > 0) {
    prepare(offset, 0);
    if (complete(1, 1) < 1) {
      return finish_by_calls(offset, 0);
    }
    const int error = settle(runs_[0], results_[0], retries);
    if (error != 0) {
      return error;
    }
  }
  return 0;
}

void RingIo::prepare(uint64_t offset, unsigned number) noexcept {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  KVPOOL_CHECK(entry != nullptr);
  const Run& run = runs_[number];
  const SsdPlace place = files_->place(offset);
  io_uring_prep_write(entry, has_files_ ? static_cast<int>(place.segment) : place.fd, run.address, run.length, run.at);
  if (has_files_) {
    io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  }
  io_uring_sqe_set_data64(entry, number);
  results_[number] = UNDER_WAY;
}

// Submits what was prepared and waits for so many to end, as long as it takes: the memory is the kernel's until then. Returns how
// many have ended; fewer if the kernel takes no more and has nothing under way: this ring cannot be used any more.
unsigned RingIo::complete(unsigned least, unsigned under_way) noexcept {
  unsigned completed = 0;
  unsigned retries = 0;
  while (completed < least) {
    const int submitted = io_uring_submit_and_wait(&ring_, 1);
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      results_[entry->user_data] = entry->res;
      ++seen;
    }
    io_uring_cq_advance(&ring_, seen);
    completed += seen;
    if (submitted >= 0 || seen > 0 || submitted == -EINTR) {
      continue;
    }
    const bool has_none = completed + io_uring_sq_ready(&ring_) == under_way;
    if (has_none && ++retries > RETRIES_MAX) {
      is_broken_ = true;
      return completed;
    }
    nanosleep(&NAP, nullptr);
  }
  return completed;
}

// Two steps take turns: while the disk has one, the other is made and handed over.
int RingIo::write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept {
  if (by_calls(size)) {
    return calls_->write_steps(offset, size, step, fill);
  }
  uint64_t at = 0;
  unsigned under_way = 0;
  unsigned retries = 0;
  int error = 0;
  std::array<bool, ENTRIES> is_busy{};
  while (true) {
    for (unsigned number = 0; number < ENTRIES; ++number) {
      if (is_busy[number] || error != 0 || at >= size) {
        continue;
      }
      const uint64_t length = std::min(step, size - at);
      const uint8_t* const bytes = fill(number, at, length);
      if (bytes == nullptr) {
        at = size;
        continue;
      }
      runs_[number] = {const_cast<uint8_t*>(bytes), files_->place(offset).at + at, static_cast<uint32_t>(length)};
      at += length;
      prepare(offset, number);
      static_cast<void>(io_uring_submit(&ring_));  // what could not be submitted is by `complete`
      is_busy[number] = true;
      ++under_way;
    }
    if (under_way == 0) {
      break;
    }
    if (complete(1, under_way) == 0) {
      for (unsigned number = 0; number < ENTRIES && error == 0; ++number) {
        error = is_busy[number] ? finish_by_calls(offset, number) : 0;
      }
      const Fill rest = [&](unsigned place, uint64_t behind, uint64_t length) { return fill(place, at + behind, length); };
      return error != 0 || at >= size ? error : calls_->write_steps(offset + at, size - at, step, rest);
    }
    for (unsigned number = 0; number < ENTRIES; ++number) {
      if (is_busy[number] && results_[number] != UNDER_WAY) {
        is_busy[number] = false;
        --under_way;
        const int failed = settle(runs_[number], results_[number], retries);
        error = error == 0 ? failed : error;
        if (error == 0 && runs_[number].length > 0) {
          prepare(offset, number);
          is_busy[number] = true;
          ++under_way;
        }
      }
    }
  }
  files_->note_write(offset);
  return error;
}

// Runs again, whole, without the ring.
int RingIo::finish_by_calls(uint64_t offset, unsigned number) noexcept {
  const uint64_t start = offset / files_->segment_bytes() * files_->segment_bytes();
  const Run& run = runs_[number];
  return calls_->write(start + run.at, run.address, run.length);
}

// Records the outcome of a run. Returns 0 if it is done or goes on, otherwise the errno.
int RingIo::settle(Run& run, int moved, unsigned& retries) const noexcept {
  if (moved == -EAGAIN || moved == -EINTR) {
    if (++retries > RETRIES_MAX) {
      return -moved;
    }
    nanosleep(&NAP, nullptr);
    return 0;
  }
  if (moved <= 0) {
    return moved < 0 ? -moved : NO_MORE_BYTES;
  }
  const auto bytes = static_cast<uint32_t>(moved);
  KVPOOL_CHECK(bytes <= run.length);
  run = {run.address + bytes, run.at + bytes, run.length - bytes};
  return run.length > 0 && !files_->can_go_on_at(run.at) ? NO_MORE_BYTES : 0;
}

}  // namespace

SsdRingResult make_ring_io(std::shared_ptr<SsdFiles> files) {
  io_uring ring{};
  int error = open_ring(ring, ENTRIES);
  if (error != 0) {
    return {nullptr, error};
  }
  error = try_ring(ring);
  if (error != 0) {
    close_ring(ring);
    return {nullptr, error};
  }
  return {std::make_unique<RingIo>(ring, std::move(files)), 0};
}

}  // namespace kvpool
