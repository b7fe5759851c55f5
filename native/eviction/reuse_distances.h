// Reuse distances of chunks, estimated from a sample: how much an LRU pool of any size would hit.
//
// What it is: for each reference to a chunk, the bytes of all chunks used since its last use, its own included; a pool of at
// least that many bytes hits it. A histogram of these distances is the hit curve. What it is not: exact, or a judge of any
// policy but LRU. It holds no chunk and decides nothing.
//
// Sampling by key (after SHARDS: Waldspurger et al., FAST 2015): a chunk counts if a word of its key is below `threshold`, so all
// its references count or none; a sampled distance, and each sampled reference, stands for 1 / rate of them. When the sample is
// full the threshold falls by an eighth and what is above it leaves. What was used longer ago than `horizon` bytes leaves too:
// no size that is asked about would still have it. So the rate settles where the sample covers the horizon, and memory is
// fixed. As sampling meets much used chunks or misses them, the sampled references are not exactly rate times all; the
// difference is taken for references at the shortest distance, which such chunks have (the paper's adjustment).
//
// A request's chunks are used leaf first, as the directory does it: all distances of a call are taken before its first use.
//
//   slots     open addressing by the sampled word: linear probing, at most half full, erased by backward shift
//   recency   a place for each use, in order; a Fenwick tree over places sums the bytes used after one
//
// Invariants: `places_` names a slot's word exactly at that slot's place, 0 elsewhere; the tree's sums are the bytes of the chunks
// at places; when places run out they are numbered anew, in order. Memory is sized at construction.
// Threads: the control thread only. O(log sample) per sampled chunk, O(1) per other; now and then O(sample).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hash/sampling.h"
#include "base/types.h"

namespace kvpool {

class ReuseDistances {
 public:
  // `rate_max` is the share of chunks sampled at first. Older references weigh half as much after `half_life_ns`.
  // REQUIRES: samples >= 16, horizon_bytes > 0, 0 < rate_max <= 1, half_life_ns > 0.
  ReuseDistances(uint32_t samples, uint64_t horizon_bytes, double rate_max, uint64_t half_life_ns);
  ReuseDistances(const ReuseDistances&) = delete;
  ReuseDistances& operator=(const ReuseDistances&) = delete;

  // Whether a chunk counts at present.
  [[nodiscard]] bool is_sampled(const ChunkKey& key) const noexcept { return word_of(key) < threshold_; }

  // A request used `asked` chunks of `chunk_bytes` each: those of them that count, the one nearest to the root first; others
  // may be among them. REQUIRES: chunk_bytes > 0.
  void observe(const std::vector<ChunkKey>& sampled, size_t asked, uint64_t chunk_bytes, uint64_t now_ns);

  // The share of all referenced bytes that LRU would have hit with room for `capacity` bytes.
  [[nodiscard]] double hit_share(uint64_t capacity) const noexcept;

  [[nodiscard]] double rate() const noexcept;
  [[nodiscard]] uint32_t sampled() const noexcept { return count_; }
  [[nodiscard]] double referenced_bytes() const noexcept { return referenced_; }  // older ones weigh less

  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  static constexpr unsigned FIRST_OCTAVE = 12;
  static constexpr unsigned OCTAVES = 44;
  static constexpr unsigned BINS_PER_OCTAVE = 16;
  static constexpr unsigned BINS = OCTAVES * BINS_PER_OCTAVE;

  struct Slot {
    uint64_t word = 0;  // 0: empty
    uint64_t bytes = 0;
    uint32_t place = 0;
  };

  // 0 stands for an empty slot.
  [[nodiscard]] static uint64_t word_of(const ChunkKey& key) noexcept {
    const uint64_t word = sampling_word(key);
    return word == 0 ? 1 : word;
  }
  [[nodiscard]] static double bin_of(double bytes) noexcept;
  [[nodiscard]] size_t find(uint64_t word) const noexcept;
  void use(uint64_t word, uint64_t bytes);
  void erase(size_t position) noexcept;
  void lower_threshold() noexcept;
  void leave_behind_horizon() noexcept;
  void renumber() noexcept;
  void add_bytes(uint32_t place, uint64_t bytes) noexcept;  // may wrap: taking away is adding the complement
  [[nodiscard]] uint64_t bytes_up_to(uint32_t place) const noexcept;
  [[nodiscard]] uint32_t oldest_place() const noexcept;
  void age(uint64_t now_ns) noexcept;

  const uint32_t samples_;
  const uint64_t horizon_bytes_;
  const uint64_t half_life_ns_;
  uint64_t threshold_;
  std::vector<Slot> slots_;       // a power of two, twice the sample
  std::vector<uint64_t> places_;  // from 1 on: the word used there
  std::vector<uint64_t> tree_;    // from 1 on
  uint32_t last_place_ = 0;
  uint32_t count_ = 0;
  uint64_t bytes_ = 0;  // of the sampled chunks
  std::array<double, BINS> hits_{};
  double referenced_ = 0;
  double sampled_referenced_ = 0;  // of the sample, each standing for 1 / rate
  uint64_t aged_ns_ = 0;
};

}  // namespace kvpool
