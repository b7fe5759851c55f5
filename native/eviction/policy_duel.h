// Which of two policies would do better: both run beside the tier, as metadata alone, in a large tier on a sample of its chunks.
//
// What it is: two shadows of the tier, one whose victims are the oldest, one whose victims are worth least, and the hits that
// each would have had. Who leads by more than chance would have it takes over: the hits of a request come all together, so
// that a few prompts make a lead that means nothing. What it is not: exact. Chunks are sampled by their keys (as in SHARDS,
// Waldspurger et al., 2015), and each shadow holds the same share of as many chunks as the tier does; a sampled chunk hangs
// on its nearest sampled ancestor, so that a shadow too holds whole prefixes.
// All of it lies in memory that may outlive the process (kept_region.h), for a leader without its shadows sticks to an accident. Chains
// of a shadow are used once more by a later life, in the order of their last uses; the score is sealed, in turns in two places.
// Threads: the control thread only. O(1) per sampled chunk.
#pragma once

#include <cstdint>
#include <vector>

#include "records/chunk_records.h"
#include "eviction/eviction_policy.h"
#include "eviction/eviction_queues.h"
#include "hash/keyed_hash.h"
#include "records/key_map.h"

namespace kvpool {

// A use of a sampled chunk.
struct SampledUse {
  ChunkKey key{};
  uint8_t queue = 0;
  bool counts = true;  // false: an ancestor that somebody uses all the while
};

// A tier of keys alone.
class PolicyShadow {
 public:
  // REQUIRES: `policy` lives as long, and `memory`, zeroed, for so many; nullptr: it has its own.
  PolicyShadow(uint32_t chunks_max, const EvictionPolicy& policy, ChunkRecord* memory = nullptr);
  // Holds what a shadow of the same size held whose memory may say anything by now. REQUIRES: it is empty.
  void restore(const ChunkRecord* former);

  // A request uses this chain, root first. Returns how many of its chunks were here. No more than `limit` stay.
  // REQUIRES: no key stands in it twice.
  uint64_t use(const std::vector<SampledUse>& chain, uint32_t limit, uint64_t now_ns);
  // How many chunks are here.
  [[nodiscard]] uint32_t size() const noexcept { return records_.alive(); }

 private:
  [[nodiscard]] RecordId behind(RecordId parent, const ChunkKey& key) const noexcept;
  void evict(RecordId id) noexcept;
  void forget(const ChunkKey& key) noexcept;

  const uint32_t chunks_max_;
  ChunkRecords records_;
  EvictionQueues queues_;
  KeyMap places_;  // whole keys: clients choose them, and words of them may meet
  std::vector<RecordId> chain_;
};

class PolicyDuel {
 public:
  struct Score {
    uint32_t crc;  // of what follows
    uint32_t is_by_age;
    uint64_t requests;  // 0: nothing was ever scored
    HashSeed seed;
    double oldest_hits;    // decayed
    double cheapest_hits;  // decayed
    double variance;       // of their difference, were it chance: the squares of each request's; decayed
  };
  struct alignas(ChunkRecord) Memory {
    Score scores[2];  // the one of an odd number of requests is the second
    // What follows: the oldest's, then the cheapest's.
    [[nodiscard]] const ChunkRecord* shadows() const noexcept { return reinterpret_cast<const ChunkRecord*>(this + 1); }
    [[nodiscard]] ChunkRecord* shadows() noexcept { return reinterpret_cast<ChunkRecord*>(this + 1); }
  };

  // `learned` judges by worth; `seed` chooses the sample. REQUIRES: `learned` lives as long, and `memory`, zeroed, of
  // `bytes(max_chunks)`; nullptr: the duel has its own.
  PolicyDuel(uint32_t max_chunks, const EvictionPolicy& learned, const HashSeed& seed, Memory* memory = nullptr);
  [[nodiscard]] static uint64_t bytes(uint32_t max_chunks) noexcept;
  // Goes on with a duel over as many chunks whose memory may say anything by now. REQUIRES: nothing was noted yet.
  void restore(const Memory& former);

  // One in a power of two of the keys, under a seed that never leaves the process: no client can choose who is right.
  [[nodiscard]] bool is_sampled(const ChunkKey& key) const noexcept {
    return mask_ == 0 || (keyed_hash(key, score_.seed) & mask_) == 0;
  }
  // A request has used these, root first; the tier has `chunks`, and is full or not.
  void note_uses(const std::vector<SampledUse>& chain, uint64_t chunks, uint64_t now_ns);
  [[nodiscard]] bool is_by_age() const noexcept { return score_.is_by_age != 0; }
  [[nodiscard]] uint64_t switches() const noexcept { return switches_; }

 private:
  void keep_score() noexcept;

  const uint32_t max_chunks_;
  const uint64_t mask_;
  Memory* const memory_;  // nullptr: nothing of it outlives the process
  const LruPolicy by_age_;
  PolicyShadow oldest_;
  PolicyShadow cheapest_;
  Score score_{};
  uint64_t switches_ = 0;
};

}  // namespace kvpool
