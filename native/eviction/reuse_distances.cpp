// Sampled reuse distances. See reuse_distances.h.
#include "eviction/reuse_distances.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr double WORDS = 18446744073709551616.0;  // 2^64
// The histogram ages in steps of this part of the half-life.
constexpr uint64_t AGE_STEPS = 16;

}  // namespace

ReuseDistances::ReuseDistances(uint32_t samples, uint64_t horizon_bytes, double rate_max, uint64_t half_life_ns)
    : samples_(samples),
      horizon_bytes_(horizon_bytes),
      half_life_ns_(half_life_ns),
      threshold_(rate_max < 1.0 ? static_cast<uint64_t>(rate_max * WORDS) : UINT64_MAX),
      slots_(std::bit_ceil(size_t{2} * samples)),
      places_(size_t{4} * samples + 1),
      tree_(size_t{4} * samples + 1) {
  KVPOOL_CHECK(samples >= 16);
  KVPOOL_CHECK(horizon_bytes > 0);
  KVPOOL_CHECK(threshold_ > 0);
  KVPOOL_CHECK(half_life_ns >= AGE_STEPS);
}

double ReuseDistances::rate() const noexcept { return static_cast<double>(threshold_) / WORDS; }

// In bins from the histogram's begin: the logarithm is taken once for each sampled reference.
double ReuseDistances::bin_of(double bytes) noexcept {
  const double bin = (std::log2(std::max(bytes, 1.0)) - FIRST_OCTAVE) * BINS_PER_OCTAVE;
  return std::clamp(bin, 0.0, static_cast<double>(BINS));
}

void ReuseDistances::observe(const std::vector<ChunkKey>& sampled, size_t asked, uint64_t chunk_bytes,
                             uint64_t now_ns) {
  KVPOOL_CHECK(chunk_bytes > 0);
  age(now_ns);
  const auto bytes = static_cast<double>(chunk_bytes);
  referenced_ += bytes * static_cast<double>(asked);
  const double each = bytes / rate();
  for (const ChunkKey& key : sampled) {
    const uint64_t word = word_of(key);
    if (word >= threshold_) {
      continue;
    }
    sampled_referenced_ += each;
    const Slot& slot = slots_[find(word)];
    if (slot.word == word) {
      // The chunk itself is counted once and not 1 / rate times: the others are what the sample stands for.
      const auto after = static_cast<double>(bytes_ - bytes_up_to(slot.place));
      const double bin = bin_of(after / rate() + static_cast<double>(slot.bytes));
      hits_[std::min(static_cast<size_t>(bin), size_t{BINS - 1})] += each;
    }
  }
  for (auto key = sampled.rbegin(); key != sampled.rend(); ++key) {
    const uint64_t word = word_of(*key);
    if (word < threshold_) {
      use(word, chunk_bytes);
    }
  }
}

double ReuseDistances::hit_share(uint64_t capacity) const noexcept {
  if (referenced_ <= 0) {
    return 0;
  }
  const double end = bin_of(static_cast<double>(capacity));
  const auto whole = static_cast<size_t>(end);
  double hit = referenced_ - sampled_referenced_;
  for (size_t bin = 0; bin < whole; ++bin) {
    hit += hits_[bin];
  }
  if (whole < BINS) {
    hit += hits_[whole] * (end - static_cast<double>(whole));
  }
  return std::clamp(hit / referenced_, 0.0, 1.0);
}

size_t ReuseDistances::find(uint64_t word) const noexcept {
  const size_t mask = slots_.size() - 1;
  size_t position = word & mask;  // the low bits: the high ones are alike below a threshold
  while (slots_[position].word != 0 && slots_[position].word != word) {
    position = (position + 1) & mask;
  }
  return position;
}

void ReuseDistances::use(uint64_t word, uint64_t bytes) {
  const size_t known = find(word);
  if (slots_[known].word == word) {
    erase(known);
  }
  if (count_ == samples_) {
    lower_threshold();
    if (word >= threshold_) {
      return;
    }
  }
  if (last_place_ + 1 == places_.size()) {
    renumber();
  }
  const uint32_t place = ++last_place_;
  slots_[find(word)] = {word, bytes, place};
  places_[place] = word;
  add_bytes(place, bytes);
  bytes_ += bytes;
  ++count_;
  leave_behind_horizon();
}

void ReuseDistances::erase(size_t position) noexcept {
  const Slot gone = slots_[position];
  places_[gone.place] = 0;
  add_bytes(gone.place, uint64_t{0} - gone.bytes);
  bytes_ -= gone.bytes;
  --count_;
  const size_t mask = slots_.size() - 1;
  size_t hole = position;
  for (size_t next = (hole + 1) & mask; slots_[next].word != 0; next = (next + 1) & mask) {
    const size_t home = slots_[next].word & mask;
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      slots_[hole] = slots_[next];
      hole = next;
    }
  }
  slots_[hole] = {};
}

// Until a place is free: an eighth of the sample leaves each time, as far as chance has it.
void ReuseDistances::lower_threshold() noexcept {
  while (count_ == samples_) {
    threshold_ -= threshold_ / 8;
    for (uint32_t place = 1; place <= last_place_; ++place) {
      if (places_[place] >= threshold_) {
        erase(find(places_[place]));
      }
    }
  }
}

void ReuseDistances::leave_behind_horizon() noexcept {
  const double horizon = static_cast<double>(horizon_bytes_) * rate();
  while (count_ > 1 && static_cast<double>(bytes_) > horizon) {
    erase(find(places_[oldest_place()]));
  }
}

void ReuseDistances::renumber() noexcept {
  uint32_t last = 0;
  for (uint32_t place = 1; place <= last_place_; ++place) {
    const uint64_t word = places_[place];
    if (word != 0) {
      places_[place] = 0;
      places_[++last] = word;
    }
  }
  last_place_ = last;
  std::fill(tree_.begin(), tree_.end(), 0);
  for (uint32_t place = 1; place <= last; ++place) {
    Slot& slot = slots_[find(places_[place])];
    slot.place = place;
    add_bytes(place, slot.bytes);
  }
}

void ReuseDistances::add_bytes(uint32_t place, uint64_t bytes) noexcept {
  for (size_t node = place; node < tree_.size(); node += node & (~node + 1)) {
    tree_[node] += bytes;
  }
}

uint64_t ReuseDistances::bytes_up_to(uint32_t place) const noexcept {
  uint64_t sum = 0;
  for (size_t node = place; node > 0; node &= node - 1) {
    sum += tree_[node];
  }
  return sum;
}

// REQUIRES: count_ > 0.
uint32_t ReuseDistances::oldest_place() const noexcept {
  size_t node = 0;
  for (size_t step = std::bit_floor(tree_.size() - 1); step > 0; step >>= 1) {
    if (node + step < tree_.size() && tree_[node + step] == 0) {
      node += step;
    }
  }
  return static_cast<uint32_t>(node + 1);
}

void ReuseDistances::age(uint64_t now_ns) noexcept {
  const uint64_t step_ns = half_life_ns_ / AGE_STEPS;
  if (now_ns < aged_ns_ + step_ns) {
    return;
  }
  const uint64_t steps = aged_ns_ == 0 ? 0 : (now_ns - aged_ns_) / step_ns;
  aged_ns_ = now_ns;
  const double factor = std::exp2(-static_cast<double>(steps) / AGE_STEPS);
  for (double& hits : hits_) {
    hits *= factor;
  }
  referenced_ *= factor;
  sampled_referenced_ *= factor;
}

std::vector<std::string> ReuseDistances::verify() const {
  std::vector<std::string> broken;
  uint64_t bytes = 0;
  uint32_t count = 0;
  for (uint32_t place = 1; place <= last_place_; ++place) {
    if (places_[place] != 0) {
      const Slot& slot = slots_[find(places_[place])];
      if (slot.word != places_[place] || slot.place != place || slot.word >= threshold_) {
        broken.push_back("reuse: place " + std::to_string(place) + " names a chunk that is not there");
      }
      bytes += slot.bytes;
      ++count;
      if (bytes_up_to(place) != bytes) {
        broken.push_back("reuse: the bytes up to place " + std::to_string(place) + " are miscounted");
      }
    }
  }
  const auto used = std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.word != 0; });
  if (bytes != bytes_ || count != count_ || static_cast<uint32_t>(used) != count_) {
    broken.push_back("reuse: " + std::to_string(count) + " chunks at places, " + std::to_string(used) + " in slots, " +
                     std::to_string(count_) + " counted");
  }
  return broken;
}

}  // namespace kvpool
