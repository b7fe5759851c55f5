// The SSD tier's I/O through a ring. Built only where liburing is; linked statically.
#include <liburing.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <optional>
#include <vector>

#include "kvpool/check.h"
#include "kvpool/ssd_io.h"
#include "kvpool/types.h"
#include "ring_setup.h"

namespace kvpool {
namespace {

// A piece is a header and a payload that crosses one slice at most; longer ones go in several rounds.
constexpr unsigned ENTRIES = 8;
// Small slices, so that an urgent read that comes while one is being pinned waits 2 ms at most (measured with base pages).
// The kernel keeps 16 bytes for each page and rounds a slice's up to a power of two: just below 64 MiB wastes the least.
constexpr uint64_t SLICE_BYTES_MIN = 62ULL << 20;
// Less goes by plain calls: there header and payload are one transfer, and a write does not end on one of the kernel's
// threads. Measured: at 64 KiB rings write a quarter slower and save nothing, from 256 KiB on they save a third of the CPU.
constexpr uint64_t TRANSFER_BYTES_MIN = 256 << 10;
// The kernel's limits: bytes of a slice, and slices of a ring.
constexpr uint64_t SLICE_BYTES_MAX = 1ULL << 30;
constexpr uint64_t SLICES_MAX = 1 << 14;
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

uint64_t slice_bytes_for(uint64_t arena_bytes) noexcept {
  const uint64_t least = (arena_bytes + SLICES_MAX - 1) / SLICES_MAX;
  return std::max(SLICE_BYTES_MIN, round_up(least, 2ULL << 20));
}

class RingIo final : public SsdIo {
 public:
  // Takes the ring over.
  RingIo(const io_uring& ring, std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena)
      : ring_(ring),
        files_(std::move(files)),
        arena_(std::move(arena)),
        calls_(make_call_io(files_)),
        slice_bytes_(slice_bytes_for(arena_->size())),
        slices_(static_cast<unsigned>((arena_->size() + slice_bytes_ - 1) / slice_bytes_)) {
    KVPOOL_CHECK(slice_bytes_ <= SLICE_BYTES_MAX);
    std::vector<int> descriptors;
    for (uint32_t segment = 0; segment < files_->segments(); ++segment) {
      descriptors.push_back(files_->place(segment * files_->segment_bytes()).fd);
    }
    // Refused where there are more than a process may open: then without.
    has_files_ = io_uring_register_files(&ring_, descriptors.data(), files_->segments()) == 0;
  }

  // Unpinned at once: the kernel closes a ring when it comes to it.
  ~RingIo() override {
    if (registered_ > 0) {
      static_cast<void>(io_uring_unregister_buffers(&ring_));
    }
    if (has_files_) {
      static_cast<void>(io_uring_unregister_files(&ring_));
    }
    close_ring(ring_);
  }

  int read(uint64_t offset, iovec* parts, int count) noexcept override {
    return by_calls(parts, count) ? calls_->read(offset, parts, count) : transfer(false, offset, parts, count);
  }

  int write(uint64_t offset, iovec* parts, int count) noexcept override {
    return write_beside(offset, parts, count, nullptr);
  }

  int write_beside(uint64_t offset, iovec* parts, int count, const std::function<void()>& meanwhile) noexcept override {
    if (by_calls(parts, count)) {
      return meanwhile ? calls_->write_beside(offset, parts, count, meanwhile) : calls_->write(offset, parts, count);
    }
    const int error = transfer(true, offset, parts, count, meanwhile);
    files_->note_write(offset);
    return error;
  }

  int write_long(uint64_t offset, const iovec& range, uint64_t step,
                 const std::function<bool(uint64_t)>& handed_over) noexcept override;

  bool is_ring() const noexcept override { return !is_broken_; }
  bool register_next() noexcept override;
  bool has_registered_all() const noexcept override { return registered_ == slices_; }
  int register_error() const noexcept override { return register_error_; }

 private:
  [[nodiscard]] bool by_calls(const iovec* parts, int count) const noexcept;
  int transfer(bool is_write, uint64_t offset, iovec* parts, int count,
               const std::function<void()>& meanwhile = nullptr) noexcept;
  bool cut(iovec*& parts, int& count, uint64_t& at, Run& run) const noexcept;
  [[nodiscard]] std::optional<uint64_t> place_in_arena(const uint8_t* address) const noexcept;
  void prepare(bool is_write, uint64_t offset, unsigned number) noexcept;
  bool complete_all(unsigned count) noexcept { return complete(count, count) == count; }
  unsigned complete(unsigned least, unsigned under_way) noexcept;
  int settle(Run& run, int moved, unsigned& retries) const noexcept;
  int finish_by_calls(bool is_write, uint64_t offset, unsigned first, unsigned count) noexcept;
  bool cut_step(iovec& rest, uint64_t step, uint64_t& at, Run& run) const noexcept;

  io_uring ring_;
  const std::shared_ptr<SsdFiles> files_;
  const std::shared_ptr<const Mapping> arena_;
  const std::unique_ptr<SsdIo> calls_;
  const uint64_t slice_bytes_;
  const unsigned slices_;
  bool has_files_ = false;
  bool is_broken_ = false;
  unsigned registered_ = 0;  // slices, from the arena's start
  int register_error_ = 0;
  std::array<Run, ENTRIES> runs_{};
  std::array<int, ENTRIES> results_{};
};

bool RingIo::by_calls(const iovec* parts, int count) const noexcept {
  uint64_t bytes = 0;
  for (int number = 0; number < count; ++number) {
    bytes += parts[number].iov_len;
  }
  return is_broken_ || bytes < TRANSFER_BYTES_MIN;
}

// In rounds, each submitted and waited for together. Nothing is under way between two rounds.
int RingIo::transfer(bool is_write, uint64_t offset, iovec* parts, int count,
                     const std::function<void()>& meanwhile) noexcept {
  uint64_t at = files_->place(offset).at;
  unsigned waiting = 0;
  unsigned retries = 0;
  bool has_more_to_do = meanwhile != nullptr;
  while (true) {
    while (waiting < ENTRIES && cut(parts, count, at, runs_[waiting])) {
      ++waiting;
    }
    if (waiting == 0) {
      return 0;
    }
    for (unsigned number = 0; number < waiting; ++number) {
      prepare(is_write, offset, number);
    }
    if (has_more_to_do) {
      // What could not be submitted is by complete_all.
      static_cast<void>(io_uring_submit(&ring_));
      meanwhile();
      has_more_to_do = false;
    }
    if (!complete_all(waiting)) {
      const int error = finish_by_calls(is_write, offset, 0, waiting);
      const uint64_t from = offset / files_->segment_bytes() * files_->segment_bytes() + at;
      if (error != 0 || count == 0) {
        return error;
      }
      return is_write ? calls_->write(from, parts, count) : calls_->read(from, parts, count);
    }
    unsigned left = 0;
    for (unsigned number = 0; number < waiting; ++number) {
      const int error = settle(runs_[number], results_[number], retries);
      if (error != 0) {
        return error;
      }
      if (runs_[number].length > 0) {
        runs_[left++] = runs_[number];
      }
    }
    waiting = left;
  }
}

// The next range to move: to the end of its part, or of its slice. False when all has been cut.
bool RingIo::cut(iovec*& parts, int& count, uint64_t& at, Run& run) const noexcept {
  while (count > 0 && parts->iov_len == 0) {
    ++parts;
    --count;
  }
  if (count == 0) {
    return false;
  }
  auto* const address = static_cast<uint8_t*>(parts->iov_base);
  const uint64_t in_slice = place_in_arena(address).value_or(0) % slice_bytes_;
  const uint64_t length = std::min<uint64_t>(parts->iov_len, slice_bytes_ - in_slice);
  run = {address, at, static_cast<uint32_t>(length)};
  parts->iov_base = address + length;
  parts->iov_len -= length;
  at += length;
  return true;
}

std::optional<uint64_t> RingIo::place_in_arena(const uint8_t* address) const noexcept {
  const uint64_t from = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(arena_->data());
  return from < arena_->size() ? std::optional(from) : std::nullopt;
}

void RingIo::prepare(bool is_write, uint64_t offset, unsigned number) noexcept {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  KVPOOL_CHECK(entry != nullptr);
  const Run& run = runs_[number];
  const SsdPlace place = files_->place(offset);
  const int file = has_files_ ? static_cast<int>(place.segment) : place.fd;
  const std::optional<uint64_t> from = place_in_arena(run.address);
  const bool is_fixed = from && *from / slice_bytes_ < registered_ && run.length <= arena_->size() - *from;
  const int slice = is_fixed ? static_cast<int>(*from / slice_bytes_) : 0;
  if (is_fixed && is_write) {
    io_uring_prep_write_fixed(entry, file, run.address, run.length, run.at, slice);
  } else if (is_fixed) {
    io_uring_prep_read_fixed(entry, file, run.address, run.length, run.at, slice);
  } else if (is_write) {
    io_uring_prep_write(entry, file, run.address, run.length, run.at);
  } else {
    io_uring_prep_read(entry, file, run.address, run.length, run.at);
  }
  if (has_files_) {
    io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  }
  io_uring_sqe_set_data64(entry, number);
  results_[number] = UNDER_WAY;
}

// Submits what was prepared and waits for so many to end, as long as it takes: the memory is the kernel's until then. Returns how
// many have; fewer when the kernel takes nothing any more and has nothing: this ring is of no use from now on.
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

// Two runs take turns: while the disk has one, the other is handed over.
int RingIo::write_long(uint64_t offset, const iovec& range, uint64_t step,
                       const std::function<bool(uint64_t)>& handed_over) noexcept {
  if (is_broken_) {
    return SsdIo::write_long(offset, range, step, handed_over);
  }
  iovec rest = range;
  uint64_t at = files_->place(offset).at;
  unsigned under_way = 0;
  unsigned retries = 0;
  int error = 0;
  bool goes_on = true;
  std::array<bool, 2> is_busy{};
  while (true) {
    for (unsigned number = 0; number < is_busy.size(); ++number) {
      if (!is_busy[number] && error == 0 && goes_on && cut_step(rest, step, at, runs_[number])) {
        prepare(true, offset, number);
        static_cast<void>(io_uring_submit(&ring_));
        is_busy[number] = true;
        ++under_way;
        goes_on = handed_over(range.iov_len - rest.iov_len);
      }
    }
    if (under_way == 0) {
      break;
    }
    if (complete(1, under_way) == 0) {
      for (unsigned number = 0; number < is_busy.size() && error == 0; ++number) {
        error = is_busy[number] ? finish_by_calls(true, offset, number, 1) : 0;
      }
      const uint64_t done = range.iov_len - rest.iov_len;
      return error != 0 || !goes_on ? error : SsdIo::write_long(offset + done, rest, step, [&](uint64_t end) {
        return handed_over(done + end);
      });
    }
    for (unsigned number = 0; number < is_busy.size(); ++number) {
      if (is_busy[number] && results_[number] != UNDER_WAY) {
        is_busy[number] = false;
        --under_way;
        const int failed = settle(runs_[number], results_[number], retries);
        error = error == 0 ? failed : error;
        if (error == 0 && runs_[number].length > 0) {
          prepare(true, offset, number);
          is_busy[number] = true;
          ++under_way;
        }
      }
    }
  }
  files_->note_write(offset);
  return error;
}

bool RingIo::cut_step(iovec& rest, uint64_t step, uint64_t& at, Run& run) const noexcept {
  iovec part{rest.iov_base, std::min<uint64_t>(rest.iov_len, step)};
  iovec* parts = &part;
  int count = 1;
  const bool is_cut = cut(parts, count, at, run);
  rest.iov_base = static_cast<uint8_t*>(rest.iov_base) + (is_cut ? run.length : 0);
  rest.iov_len -= is_cut ? run.length : 0;
  return is_cut;
}

// Runs again, whole, without the ring.
int RingIo::finish_by_calls(bool is_write, uint64_t offset, unsigned first, unsigned count) noexcept {
  const uint64_t start = offset / files_->segment_bytes() * files_->segment_bytes();
  int error = 0;
  for (unsigned number = first; number < first + count && error == 0; ++number) {
    iovec run{runs_[number].address, runs_[number].length};
    const uint64_t from = start + runs_[number].at;
    error = is_write ? calls_->write(from, &run, 1) : calls_->read(from, &run, 1);
  }
  return error;
}

// Notes what became of a run. Returns 0 where it is done or goes on, otherwise why it cannot.
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

bool RingIo::register_next() noexcept {
  if (is_broken_ || register_error_ != 0 || registered_ == slices_) {
    return false;
  }
  int result = registered_ == 0 ? io_uring_register_buffers_sparse(&ring_, slices_) : 0;
  if (result == 0) {
    const uint64_t start = registered_ * slice_bytes_;
    const iovec slice{arena_->data() + start, std::min(slice_bytes_, arena_->size() - start)};
    result = io_uring_register_buffers_update_tag(&ring_, registered_, &slice, nullptr, 1);
  }
  if (result < 0) {
    // All or nothing: what is left of the limit may serve others.
    register_error_ = -result;
    registered_ = 0;
    static_cast<void>(io_uring_unregister_buffers(&ring_));
    return false;
  }
  ++registered_;
  return registered_ < slices_;
}

}  // namespace

SsdRingResult make_ring_io(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena) {
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
  return {std::make_unique<RingIo>(ring, std::move(files), std::move(arena)), 0};
}

}  // namespace kvpool
