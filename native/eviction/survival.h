// How likely a chunk is to be used again, by its class and its age, learned from the uses themselves.
//
// What it is: for each class a histogram of the ages at which chunks were used again, the number of intervals that could have
// been seen to last so long, and from both the worth of a chunk: the most uses per time that keeping it for some further
// while promises (over the best such while), and how likely it is to be used again at all. What it is not: a list of chunks,
// or a clock.
//
// The share of intervals that end at an age counts only those begun long enough ago to reach it: young ones are no evidence
// against reuse (right-censoring). The chunks of a request come back together, so that bins are far noisier than their counts
// look: they are smoothed over their neighbours, lest the best while be one that ends behind some accident. What a class has
// seen little of, it takes from all classes together, as much more or less likely as its own uses are on the whole.
// Sources: hit density as in LHD (Beckmann et al., 2018), the best while as in Gittins' index.
// Threads: the control thread only. note_* and worth are O(1); `learn` is O(classes x bins), for one request in many.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <vector>

#include "records/chunk_records.h"
#include "eviction/eviction_policy.h"

namespace kvpool {

class SurvivalModel {
 public:
  static constexpr uint32_t CLASSES = EvictionPolicy::QUEUES;
  static constexpr uint32_t BINS = 96;

  SurvivalModel();

  // Chunks of this class were used / used again at this age.
  void note_start(uint8_t of_class, uint32_t chunks = 1) noexcept { started_[of_class] += chunks; }
  // The last use of a chunk turns out to be of another class.
  void move_start(uint8_t from_class, uint8_t to_class) noexcept {
    --started_[from_class];
    ++started_[to_class];
  }
  void note_end(uint8_t of_class, uint64_t age_ns, uint32_t chunks = 1) noexcept {
    ended_[of_class][bin_of(age_ns)] += chunks;
  }
  // Works out anew what chunks are worth.
  void learn(uint64_t now_ns);

  [[nodiscard]] float worth(uint8_t of_class, uint64_t age_ns) const noexcept {
    return worth_[of_class][bin_of(age_ns)];
  }

  // The share of the chunks that have reached this age unused which are used later on, as far as intervals were long enough
  // to measure.
  [[nodiscard]] float chance(uint8_t of_class, uint64_t age_ns) const noexcept {
    return chances_[of_class][bin_of(age_ns)];
  }
  // Whether chances are of something seen.
  [[nodiscard]] bool has_learned() const noexcept { return horizon_ > 0; }

  // Four bins to the octave; those below four ticks are one tick each.
  [[nodiscard]] static uint32_t bin_of(uint64_t age_ns) noexcept {
    const uint64_t ticks = age_ns >> TICK_SHIFT;
    if (ticks < 4) {
      return static_cast<uint32_t>(ticks);
    }
    const auto octave = static_cast<uint32_t>(std::bit_width(ticks)) - 1;
    const uint32_t bin = 4 * (octave - 1) + (static_cast<uint32_t>(ticks >> (octave - 2)) & 3U);
    return bin < BINS ? bin : BINS - 1;
  }
  // The first tick of a bin.
  [[nodiscard]] static uint64_t first_tick(uint32_t bin) noexcept {
    return bin < 4 ? bin : uint64_t{4 + bin % 4} << (bin / 4 - 1);
  }

 private:
  using Row = std::array<double, BINS>;
  // Intervals begun in the while before a `learn`.
  struct Epoch {
    uint64_t now_ns = 0;
    std::array<float, CLASSES> started{};
  };

  void close_epoch(uint64_t now_ns);
  [[nodiscard]] Row intervals_seen(uint32_t of_class, uint64_t now_ns) const noexcept;
  [[nodiscard]] double likelihood_of(uint32_t of_class, const Row& seen, const Row& common) const noexcept;
  void appraise(uint32_t of_class, const Row& share_ended) noexcept;
  void estimate_chances(uint32_t of_class, const Row& share_ended) noexcept;

  std::array<int64_t, CLASSES> started_{};  // since the last `learn`
  std::array<std::array<uint32_t, BINS>, CLASSES> ended_{};
  std::vector<Row> reuses_;  // by class; decayed
  std::deque<Epoch> epochs_;
  std::vector<std::array<float, BINS>> worth_;
  std::vector<std::array<float, BINS>> chances_;
  uint32_t horizon_ = 0;  // bins that enough intervals could have reached
};

}  // namespace kvpool
