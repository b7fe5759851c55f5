// Which of the chunks that may go, goes first: the interface of eviction policies, and the simplest of them.
//
// What it is: a judge of metadata. What it is not: a clock (`now_ns` is an argument), a holder of lists (EvictionQueues),
// or somebody who sees bytes. Priorities are none of its business: it orders the chunks of one level.
//
// A chunk that nobody holds stands in the queue that the policy chose when it was used last. A queue runs from the
// oldest to the newest use; the policy compares the oldest chunks of the queues by what they are worth.
// Threads: the control thread only. Every operation is O(1) per chunk.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "records/chunk_records.h"
#include "hash/keyed_hash.h"

namespace kvpool {

enum class PolicyKind : uint8_t { LRU = 0, CLASS_QUEUES = 1 };

// One, two, three or four, more.
inline constexpr uint8_t COUNT_CLASSES = 4;
[[nodiscard]] constexpr uint8_t count_class(size_t count) noexcept {
  return count >= 5 ? 3 : count >= 3 ? 2 : count == 2 ? 1 : 0;
}

// Of a request, how many have made its chain what it is, each storing what follows the one before: the turns of a
// conversation, in classes. The long ones, which are mostly agents', are two kinds: was more than one chunk found?
inline constexpr uint8_t CHAIN_KINDS = COUNT_CLASSES + 1;
[[nodiscard]] constexpr uint8_t chain_kind_of(size_t turns, size_t found) noexcept {
  const uint8_t by_turns = count_class(turns);
  return by_turns + 1 == COUNT_CLASSES && found > 1 ? COUNT_CLASSES : by_turns;
}

// What a policy reports to operators about itself.
struct PolicyCounts {
  bool is_by_age = true;     // victims are chosen by their age alone just now
  uint64_t switches = 0;     // how often that has changed
  uint64_t learned_uses = 0;  // intervals between two uses of a chunk that were learned from
};

class EvictionPolicy {
 public:
  static constexpr uint32_t QUEUES = COUNT_CLASSES * CHAIN_KINDS;

  virtual ~EvictionPolicy() = default;

  // What a chunk in this queue is worth that was used last at that time; the lowest goes first.
  [[nodiscard]] virtual double worth(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept = 0;

  // So many chunks are being acquired that nobody holds, whose last use was at that time and counts in that class.
  virtual void note_reuse(uint8_t /*learned_class*/, uint64_t /*last_access_ns*/, uint32_t /*chunks*/, uint64_t /*now_ns*/) noexcept {}
  // Brings near what is remembered of a chunk that will be stored or evicted soon.
  virtual void prefetch(const ChunkKey&) const noexcept {}
  // A chunk is stored that was not here: what is remembered of it goes into its record.
  virtual void note_new(ChunkRecord&, uint64_t /*now_ns*/) noexcept {}
  // A chunk was evicted.
  virtual void note_evicted(const ChunkRecord&) {}
  // Goes on with what the policy of a former life knew, beside so many chunks that are here already. REQUIRES: nothing was noted yet.
  virtual void restore(const KeptRegion& /*former*/, uint64_t /*chunks*/) {}
  // A request has used this chain, root first: those marked as used get their queues.
  virtual void note_uses(ChunkRecords&, std::span<const RecordId> /*chain*/, uint64_t /*now_ns*/) {}
  // How likely a chunk in this queue, used last at that time, is to be used again; 0 as long as not `knows_chances`.
  [[nodiscard]] virtual double chance(uint8_t /*queue*/, uint64_t /*last_access_ns*/, uint64_t /*now_ns*/) const noexcept {
    return 0;
  }
  [[nodiscard]] virtual bool knows_chances() const noexcept { return false; }
  [[nodiscard]] virtual PolicyCounts counts() const noexcept { return {}; }
};

// The least recently used goes first. Children are used after their parents end being used, so it is the leaf.
class LruPolicy : public EvictionPolicy {
 public:
  [[nodiscard]] double worth(uint8_t, uint64_t last_access_ns, uint64_t) const noexcept override {
    return static_cast<double>(last_access_ns);
  }
};

// `max_chunks`: bounds what the policy keeps in mind. `seed`: chooses the sample that it learns from. `kept`: zeroed memory for what it
// learns, which lives as long; nullptr: it has its own.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_policy(PolicyKind kind, uint32_t max_chunks, const HashSeed& seed,
                                                          uint8_t* kept = nullptr);
// How much of it any policy needs.
[[nodiscard]] uint64_t learned_bytes(uint32_t max_chunks) noexcept;

}  // namespace kvpool
