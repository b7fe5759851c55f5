// The sample of written chunks that are read back, through the device, before they are reported to be on disk.
//
// What it is: the choice of chunks, and what was written of those being read back. What it is not: the reading itself, which is
// a job like any check. Once a chunk comes back different, or had to be read twice to be good, the path to the disk is not
// trusted any more, and every chunk is chosen from then on.
//
// The choice is random: no client can arrange that its chunks are never read back.
// Threads: under its owner's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <unordered_map>

#include "ssd/ssd_job.h"

namespace kvpool {

class SsdReadBacks {
 public:
  // One of so many: 1.6 % more for the disk to do. A guess.
  static constexpr uint32_t SAMPLE = 64;

  // Whether a chunk that has been written now is to be read back. The first one is.
  [[nodiscard]] bool wants_next();
  // The chunk of `written` is read back by a job of this number.
  void begin(uint64_t job, const SsdOutcome& written);
  // The outcome of a chunk whose reading back has ended with this one; nothing where the job does not read back.
  [[nodiscard]] std::optional<SsdOutcome> end(const SsdOutcome& read);

  void distrust() noexcept { is_distrusted_ = true; }
  [[nodiscard]] bool is_distrusted() const noexcept { return is_distrusted_; }

 private:
  std::mt19937 random_{std::random_device{}()};
  std::unordered_map<uint64_t, SsdOutcome> under_way_;  // by job; as many as writers at most
  bool has_begun_ = false;
  bool is_distrusted_ = false;
};

}  // namespace kvpool
