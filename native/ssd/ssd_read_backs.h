// The sample of written chunks that are read back, through the device, before they are reported to be on disk.
//
// What it is: the choice of chunks, and the verdict on those that were read back. What it is not: the reading itself, which is a job
// like any check. Once a chunk comes back different, or had to be read twice to be good, the path to the disk is not trusted any
// more, and every chunk is chosen from then on.
//
// The choice is random: no client can arrange that its chunks are never read back.
// Threads: under its owner's lock.
#pragma once

#include <cstdint>
#include <random>

#include "ssd/ssd_job.h"

namespace kvpool {

class SsdReadBacks {
 public:
  // One of so many: 1.6 % more for the disk to do. A guess.
  static constexpr uint32_t SAMPLE = 64;

  // Whether a chunk that has been written now is to be read back. The first one is.
  [[nodiscard]] bool wants_next();
  // What became of a chunk that was written, and whose reading back has ended so.
  [[nodiscard]] SsdStatus verdict(SsdStatus read);

  void distrust() noexcept { is_distrusted_ = true; }
  [[nodiscard]] bool is_distrusted() const noexcept { return is_distrusted_; }

 private:
  std::mt19937 random_{std::random_device{}()};
  bool has_begun_ = false;
  bool is_distrusted_ = false;
};

}  // namespace kvpool
