// I/O that reports when each of its transfers begins, so that the watch over a disk measures one transfer and not the sum of all
// transfers of a piece.
//
// Threads: as SsdIo.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "ssd/ssd_io.h"

namespace kvpool {

class SsdStampedIo final : public SsdIo {
 public:
  SsdStampedIo(std::unique_ptr<SsdIo> io, std::function<void()> stamp) : io_(std::move(io)), stamp_(std::move(stamp)) {}

  int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return io_->read(offset, bytes, size);
  }
  int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return io_->write(offset, bytes, size);
  }
  int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept override {
    stamp_();
    return io_->read_slot(offset, header, bytes, size);
  }
  int write_steps(uint64_t offset, uint64_t size, uint64_t step, const Fill& fill) noexcept override {
    return io_->write_steps(offset, size, step, [&](unsigned place, uint64_t at, uint64_t length) {
      stamp_();
      return fill(place, at, length);
    });
  }
  bool is_ring() const noexcept override { return io_->is_ring(); }

  // Replaces the I/O that moves the bytes.
  void replace(std::unique_ptr<SsdIo> io) noexcept { io_ = std::move(io); }

 private:
  std::unique_ptr<SsdIo> io_;
  const std::function<void()> stamp_;
};

}  // namespace kvpool
