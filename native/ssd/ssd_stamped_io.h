// I/O that reports when each of its transfers begins, so that the watch over a disk measures one transfer and not the sum of all
// transfers of a piece; and which of them the system has failed, with its error.
//
// Threads: as SsdIo.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "ssd/ssd_io.h"

namespace kvpool {

// A failed transfer: an errno, the offset over all files where the transfer began.
struct SsdFault {
  int error = 0;
  bool is_write = false;
  uint64_t offset = 0;
};

class SsdStampedIo final : public SsdIo {
 public:
  using OnFault = std::function<void(const SsdFault&)>;
  SsdStampedIo(std::unique_ptr<SsdIo> io, std::function<void()> stamp, OnFault on_fault)
      : io_(std::move(io)), stamp_(std::move(stamp)), on_fault_(std::move(on_fault)) {}

  int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return noted({io_->read(offset, bytes, size), false, offset});
  }
  int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return noted({io_->write(offset, bytes, size), true, offset});
  }
  int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return noted({io_->read_slot(offset, header, bytes, size), false, offset});
  }
  int write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept override {
    const int error = io_->write_steps(offset, size, step, [&](unsigned place, uint64_t at, uint64_t length) {
      stamp_();
      return fill(place, at, length);
    });
    return noted({error, true, offset});
  }
  bool is_ring() const noexcept override { return io_->is_ring(); }

  // Replaces the I/O that moves the bytes.
  void replace(std::unique_ptr<SsdIo> io) noexcept { io_ = std::move(io); }

 private:
  int noted(const SsdFault& outcome) noexcept {
    if (outcome.error > 0) {  // not the end of a file, which is no fault of the disk
      on_fault_(outcome);
    }
    return outcome.error;
  }

  std::unique_ptr<SsdIo> io_;
  const std::function<void()> stamp_;
  const OnFault on_fault_;
};

}  // namespace kvpool
