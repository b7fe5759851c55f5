// Plain reading: what a team needs to look at bytes once and do nothing with them.
//
// What it is: the floor beside which attention and recall are measured. What it is not: a checksum.
// Threads: any; the memory belongs to the caller.
#pragma once

#include <cstdint>
#include <span>

#include "sparse/worker_team.h"

namespace kvpool {

inline constexpr uint64_t PLAIN_READ_STEP_BYTES = 256;

// The sum of all 64-bit words, modulo 2^64, of runs of `bytes` each; a run is one part of the team's work.
// REQUIRES: every run is readable; `bytes` is a multiple of PLAIN_READ_STEP_BYTES.
[[nodiscard]] uint64_t sum_words(WorkerTeam& team, std::span<const uint8_t* const> runs, uint64_t bytes);

}  // namespace kvpool
