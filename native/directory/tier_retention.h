// Retention of one tier among several: what its ledger leaves to who knows the queues and the other tiers.
//
// What it is: requests for chunks, which reach all tiers; the place in the queues of a chunk whose priority changes; and when a priority
// expires. What it is not: the account of what is retained (RetentionLedger, which it owns).
//
// A chunk that leaves a tier is retained in each lower tier that has it as it was here; its time goes on from its last use. A priority
// below the default is not handed down: it has the chunk leave this tier early, and says nothing about the others. Where several tiers
// retain a chunk alike, it expires in all of them when its duration after its last use in the uppermost is over. A copy expires with its
// original, and is in no request (copy_link.h).
// Threads: the control thread only. O(tiers) for a chunk, and what the ledger needs.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "holds/hold_table.h"
#include "records/chunk_records.h"
#include "retention/retention_ledger.h"

namespace kvpool {

class Directory;

class TierRetention {
 public:
  // REQUIRES: the directory, of which this is a part, has these.
  TierRetention(Directory& directory, ChunkRecords& records, SlotArena& arena, uint64_t capacity)
      : of_(directory), ledger_(records, arena, capacity) {}
  TierRetention(const TierRetention&) = delete;
  TierRetention& operator=(const TierRetention&) = delete;

  [[nodiscard]] RetentionLedger& ledger() noexcept { return ledger_; }
  [[nodiscard]] const RetentionLedger& ledger() const noexcept { return ledger_; }

  // Retains chunks as requested from now on, stored ones and those being written, here and in lower tiers: one request for each key,
  // ancestors first. A RetainState each. REQUIRES: priorities up to 100.
  [[nodiscard]] std::vector<uint8_t> retain(NamespaceId owner, const uint8_t* keys, const std::vector<Retention>& requests,
                                            uint64_t now_ns);
  // Priority and duration of a chunk; nothing where it is not here.
  [[nodiscard]] std::optional<Retention> of(const ChunkKey& key) const noexcept;
  // The same of the chunks of a hold or a pin; nothing where it is unknown.
  [[nodiscard]] std::optional<std::vector<Retention>> of_hold(HoldId hold) const;
  // Ends priorities whose duration is over, a bounded number; whoever makes room or retains does it first.
  void expire_due(uint64_t now_ns);

  // For the directories. Sets the retention of a chunk that is in no queue; of one that may be in one: it is taken out, so that no other
  // chunk is compared with it meanwhile, and put back.
  [[nodiscard]] RetainState set_retention(RecordId id, Retention request) noexcept;
  [[nodiscard]] RetainState set_retention_in_queue(RecordId id, Retention request) noexcept;
  // The same of a chunk that is in no queue, and was retained then.
  void restore(RecordId id, Retention retention, uint64_t since_ns) noexcept;
  // The chunk leaves this tier for its lower ones; it leaves it, childless.
  void hand_down(const ChunkRecord& record) noexcept;
  void forget_chunk(RecordId id) noexcept;
  // The record of a key, if it has just this retention; when a chunk expires, as far as this tier knows.
  [[nodiscard]] RecordId find_alike(const ChunkKey& key, Retention retention) const noexcept;
  [[nodiscard]] uint64_t own_expiry(const ChunkRecord& record) const noexcept;

 private:
  [[nodiscard]] DurationStart duration_start() const noexcept;
  [[nodiscard]] uint64_t expires_at(const ChunkRecord& record) const noexcept;
  [[nodiscard]] Retention retained_as(RecordId id) const noexcept;
  void start_timer(RecordId id) noexcept;
  void go_on_since(RecordId id, Retention retention, uint64_t since_ns) noexcept;
  void requeue_released(RecordId id) noexcept;
  void take_over(RecordId id, const ChunkRecord& upper, uint64_t since_ns, uint64_t now_ns) noexcept;
  void expire(RecordId id);
  void expire_here(RecordId id);

  Directory& of_;
  RetentionLedger ledger_;
};

}  // namespace kvpool
