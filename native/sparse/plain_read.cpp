#include "sparse/plain_read.h"

#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/processor.h"

namespace kvpool {
namespace {

// Four of the widest vectors: sums that do not wait for one another. The compiler cuts them to what the machine has.
using Words [[gnu::vector_size(64)]] = uint64_t;
constexpr uint64_t VECTORS = PLAIN_READ_STEP_BYTES / sizeof(Words);
constexpr uint64_t WORDS = sizeof(Words) / sizeof(uint64_t);

[[gnu::always_inline]] inline uint64_t sum_run(const uint8_t* run, uint64_t bytes) noexcept {
  Words sums[VECTORS] = {};
  for (uint64_t at = 0; at < bytes; at += PLAIN_READ_STEP_BYTES) {
#pragma GCC unroll 4
    for (uint64_t vector = 0; vector < VECTORS; ++vector) {
      Words words;
      std::memcpy(&words, run + at + vector * sizeof(words), sizeof(words));
      sums[vector] += words;
    }
  }
  uint64_t sum = 0;
  for (const Words& words : sums) {
    for (uint64_t word = 0; word < WORDS; ++word) {
      sum += words[word];
    }
  }
  return sum;
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t sum_run_avx2(const uint8_t* run, uint64_t bytes) noexcept { return sum_run(run, bytes); }
#endif

uint64_t sum_run_best(const uint8_t* run, uint64_t bytes) noexcept {
#if defined(__x86_64__)
  if (processor_features().avx2) {
    return sum_run_avx2(run, bytes);
  }
#endif
  return sum_run(run, bytes);
}

}  // namespace

uint64_t sum_words(WorkerTeam& team, std::span<const uint8_t* const> runs, uint64_t bytes) {
  KVPOOL_CHECK(bytes % PLAIN_READ_STEP_BYTES == 0);
  std::atomic<uint64_t> sum = 0;
  team.run(static_cast<uint32_t>(runs.size()),
           [&](uint32_t part) { sum.fetch_add(sum_run_best(runs[part], bytes), std::memory_order_relaxed); });
  return sum.load(std::memory_order_relaxed);
}

}  // namespace kvpool
