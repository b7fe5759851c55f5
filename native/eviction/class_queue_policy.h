// Class queues: chunks of a kind stand in a queue of their own, and the one whose oldest chunk promises least gives the victim.
//
// A chunk's class says how often it was used (1, 2, 3-4, 5 and more), and what kind of chain the request had that used it last
// (chain_kind_of): twenty queues. What a class is worth at an age is learned (SurvivalModel). What is evicted is remembered,
// eight times as many chunks as the tier holds (GhostTable), or a chunk that comes again would be new each time.
// Where the oldest first would do better (PolicyDuel), it does that. All of that may outlive the process.
//
// What it is not: a judge of priorities. Threads: the control thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/eviction_policy.h"
#include "eviction/ghost_table.h"
#include "eviction/policy_duel.h"
#include "eviction/survival.h"

namespace kvpool {

class ClassQueuePolicy : public EvictionPolicy {
 public:
  // `kept`: zeroed memory of `learned_bytes(max_chunks)` that lives as long, or nullptr.
  ClassQueuePolicy(uint32_t max_chunks, const HashSeed& seed, uint8_t* kept = nullptr);

  [[nodiscard]] double worth(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept override;
  void note_reuse(uint8_t learned_class, uint64_t last_access_ns, uint32_t chunks, uint64_t now_ns) noexcept override;
  void prefetch(const ChunkKey& key) const noexcept override { ghosts_.prefetch(key); }
  void note_new(ChunkRecord& record, uint64_t now_ns) noexcept override;
  void note_evicted(const ChunkRecord& record) override;
  void restore(const KeptRegion& former, uint64_t chunks) override;
  void note_uses(ChunkRecords& records, std::span<const RecordId> chain, uint64_t now_ns) override;
  [[nodiscard]] double chance(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept override {
    return static_cast<double>(model_.chance(queue, now_ns - last_access_ns));
  }
  [[nodiscard]] bool knows_chances() const noexcept override { return model_.has_learned(); }
  [[nodiscard]] PolicyCounts counts() const noexcept override;

  // The class of a chunk with this metadata.
  [[nodiscard]] static uint8_t queue_of(const ChunkRecord& record) noexcept;

 private:
  // The model's opinion, for the shadow that always follows it.
  class LearnedWorth : public EvictionPolicy {
   public:
    explicit LearnedWorth(const SurvivalModel& model) : model_(model) {}
    [[nodiscard]] double worth(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept override {
      return static_cast<double>(model_.worth(queue, now_ns - last_access_ns));
    }

   private:
    const SurvivalModel& model_;
  };

  SurvivalModel model_;
  LearnedWorth learned_;
  GhostTable ghosts_;
  PolicyDuel duel_;
  std::vector<SampledUse> sampled_;
  uint64_t learned_uses_ = 0;
};

}  // namespace kvpool
