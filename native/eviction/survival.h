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
// What it has learned lies in memory that may outlive the process (kept_region.h), in a form that a kill at any store leaves whole: what
// was known after each of the last two times of learning, sealed, and what has been counted since. Opinions follow from these.
// Threads: the control thread only. note_* and worth are O(1); `learn` is O(classes x bins), for one request in many.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "records/chunk_records.h"
#include "eviction/eviction_policy.h"

namespace kvpool {

class SurvivalModel {
 public:
  static constexpr uint32_t CLASSES = EvictionPolicy::QUEUES;
  static constexpr uint32_t BINS = 96;
  // Requests from one learning to the next.
  static constexpr uint64_t LEARN_EVERY = 100;

  using Row = std::array<double, BINS>;
  // Intervals begun in the while before a `learn`.
  struct Epoch {
    uint64_t now_ns;
    std::array<float, CLASSES> started;
  };
  // Beyond so many learnings the oldest starts are taken for as young as the next.
  static constexpr uint32_t EPOCHS_MAX = 256;
  // What is known after so many times of learning.
  struct History {
    uint32_t crc;  // of what follows
    uint32_t epoch_count;
    uint64_t number;                // 0: nothing is known
    std::array<Row, CLASSES> uses;  // ages at uses; decayed
    std::array<Epoch, EPOCHS_MAX> epochs;
  };
  // What was counted since. Has no seal: any counts in range might have been.
  struct Counts {
    uint64_t number;  // of the history that they follow
    uint64_t requests;
    std::array<int64_t, CLASSES> started;
    std::array<std::array<uint32_t, BINS>, CLASSES> ended;
  };
  // All zeros: nothing is known.
  struct Memory {
    Counts counts;
    History histories[2];  // the one of an odd number is the second
  };

  // REQUIRES: `memory` is zeroed and lives as long; nullptr: the model has its own.
  explicit SurvivalModel(Memory* memory = nullptr);
  // Goes on with what a model knew whose memory may say anything by now. REQUIRES: this one knows nothing.
  void restore(const Memory& former) noexcept;
  // A request more; how many since the last `learn`.
  uint64_t count_request() noexcept { return ++memory_->counts.requests; }

  // Chunks of this class were used / used again at this age.
  void note_start(uint8_t of_class, uint32_t chunks = 1) noexcept { memory_->counts.started[of_class] += chunks; }
  // The last use of a chunk turns out to be of another class.
  void move_start(uint8_t from_class, uint8_t to_class) noexcept {
    --memory_->counts.started[from_class];
    ++memory_->counts.started[to_class];
  }
  void note_end(uint8_t of_class, uint64_t age_ns, uint32_t chunks = 1) noexcept {
    memory_->counts.ended[of_class][bin_of(age_ns)] += chunks;
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
  [[nodiscard]] const History& history() const noexcept { return memory_->histories[memory_->counts.number % 2]; }
  void close_epoch(uint64_t now_ns) noexcept;
  void form_opinions(uint64_t now_ns);
  [[nodiscard]] Row intervals_seen(uint32_t of_class, uint64_t now_ns) const noexcept;
  [[nodiscard]] double likelihood_of(uint32_t of_class, const Row& seen, const Row& common) const noexcept;
  void appraise(uint32_t of_class, const Row& share_ended) noexcept;
  void estimate_chances(uint32_t of_class, const Row& share_ended) noexcept;

  const std::unique_ptr<Memory> own_;
  Memory* const memory_;
  std::vector<std::array<float, BINS>> worth_;
  std::vector<std::array<float, BINS>> chances_;
  uint32_t horizon_ = 0;  // bins that enough intervals could have reached
};

static_assert(std::is_trivially_copyable_v<SurvivalModel::Memory>);

}  // namespace kvpool
