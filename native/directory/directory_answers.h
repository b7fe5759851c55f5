// What a directory answers and counts: states, holds, columns, statistics. Plain values without invariants of their own; any
// thread. What they mean to a chunk is in directory.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "eviction/eviction_policy.h"
#include "holds/hold_table.h"
#include "retention/retention_ledger.h"
#include "base/time_histogram.h"
#include "base/types.h"

namespace kvpool {

// What became of a chunk of a save; the wire uses the same numbers. `reserve` answers PRESENT chunks first, then
// RESERVED, then declined ones; `commit` answers STORED, EXPIRED, NO_PARENT or CHECKSUM, of a lower tier also FULL where the shared
// table has no entry left for a chunk.
enum class SaveState : uint8_t {
  PRESENT = 0,
  RESERVED = 1,
  PENDING = 2,    // another writer is just writing it
  NO_PARENT = 3,  // its parent is not stored
  FULL = 4,       // everything that could go is held
  NOT_READY = 5,  // the memory that would serve is not pre-faulted yet
  FOREIGN = 6,    // the key belongs to another namespace, or to a chunk of another size
  STORED = 7,
  EXPIRED = 8,  // the reservation, or the chunk in it, is gone
  TOO_LONG = 11,  // its chain would have more chunks than one may have; further numbers between are clients' own
  CHECKSUM = 13,  // extents that were announced before the commit have other checksums in it
  QUOTA = 14,     // its writer protects as much as it may already
  PART = 16,      // committed, and out of sight until the chunk before it is: another reservation writes that
};
inline constexpr size_t RESERVE_STATES = 15;

// Why a chunk was evicted.
enum class Eviction : uint8_t {
  OWN_CLASS = 0,    // for a newer chunk of its own size class
  OTHER_CLASS = 1,  // its memory went to another size class
  INDEX_FULL = 2,   // as many chunks are stored as the index has room for
};
inline constexpr size_t EVICTIONS = 3;

// Which chunks are worth a place in a lower tier: each admits a part of what the one before admits.
enum class Admitted : uint8_t {
  ALL = 0,
  LIKELY = 1,      // those likely enough to be used again, as the eviction policy has learned it, and USED_AGAIN
  USED_AGAIN = 2,  // those touched twice: stored, acquired, or stored again after they were evicted
  NOTHING = 3,
};

// Why a chunk that has left for good had no place in a lower tier.
enum class Declined : uint8_t {
  UNLIKELY = 0,
  USED_ONCE = 1,
  NO_BUDGET = 2,
  WRITTEN_BEFORE = 3,  // it had one, was evicted there, and was not used since
  UNREADY = 4,         // it was worth one; the tier could not take it in time, or at all
};
inline constexpr size_t DECLINED = 5;

// Where a chunk that is promoted comes from.
struct PromotionSource {
  Tier tier;
  uint64_t generation = 0;                   // that it has there; 0: any
  std::span<const uint32_t> checksums = {};  // what its extents must be; none: nobody knows but that tier
  // A tier without a directory here, such as a peer's: whether it has the chunk is known when it has come.
  bool is_external = false;
};

// Why a promoted chunk has not come, as far as the job that moved it knows.
enum class LoadFault : uint8_t {
  SOURCE = 0,  // what the lower tier has is not the chunk
  PATH = 1,    // it could not be read this time: an error, a cancelled job, a lost connection
  MEMORY = 2,  // the slot here does not hold the bytes that were written into it
};
inline constexpr size_t LOAD_FAULTS = 3;

// How many leading chunks have their token ids now, and whether the next one is on its way.
struct NamedTokens {
  size_t done = 0;
  bool is_waiting = false;
};

// What followed when a promoted chunk did not come.
struct FailedLanding {
  uint64_t removed = 0;            // READY chunks of this tier, which followed it
  uint64_t dropped_in_source = 0;  // of the tier that it came from
  std::optional<Tier> next = {};   // another tier that has the chunk
};

// Packed columns, one value per chunk.
struct Columns {
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> generations;
  std::vector<uint8_t> levels;  // NO_LEVEL: the chunk was dropped
  std::vector<uint64_t> slots;  // SlotAddress, packed; none where readers know no slots
};

// What a hit needs of one namespace: the chain of so many chunks that ends in the last key, or chunks without a parent.
struct HitRun {
  NamespaceId owner;
  std::span<const uint8_t> keys;  // packed: one at least; each chunk's, where they have no parent
  size_t chunks;
  bool is_chain;
};

// A hold on what is here of a set of chunks, each alone. `places`: of the hold's chunks, in its order, which of the keys it is. Hold 0:
// nothing is here.
struct HeldSet {
  HoldId hold = 0;
  std::vector<uint32_t> places;
};

// Keys of a set on one rank, and which of the set's each is.
struct SetPart {
  NamespaceId owner;
  std::span<const uint8_t> keys;
  std::span<const uint32_t> places;
};

// A hold on each rank on the same chunks of a set, in the order of `places`; none where there are none.
struct JoinedSet {
  std::vector<HoldId> holds;
  std::vector<uint32_t> places;
};

// Where to write columns: a row for each chunk.
struct ColumnRows {
  uint64_t* offsets;
  uint64_t* generations;
  uint8_t* levels;
  uint64_t* slots;  // nullptr where readers know none
};

// How much of a reserve is done in one call.
struct ReserveBounds {
  size_t limit = SIZE_MAX;  // chunks
  bool may_wait = false;    // stop before a chunk that would be NOT_READY
  bool is_run = false;      // what is reserved has no other's chunk in between: such a one declines what follows it
  bool is_kept = false;     // it holds what is there or written by others until it is ended, though nothing is to be written
};

struct Reservation {
  HoldId id = 0;  // 0: there is nothing to end
  std::vector<uint8_t> states;
  std::vector<uint64_t> offsets;      // 0 where declined
  std::vector<uint64_t> generations;  // 0 where declined
  std::vector<uint64_t> slots;        // as in Columns; any where declined

  // The rows of another one after these.
  void append(const Reservation& other) {
    states.insert(states.end(), other.states.begin(), other.states.end());
    offsets.insert(offsets.end(), other.offsets.begin(), other.offsets.end());
    generations.insert(generations.end(), other.generations.begin(), other.generations.end());
    slots.insert(slots.end(), other.slots.begin(), other.slots.end());
  }
};

// The tier that chunks were copied from, and their generations there: one a chunk, or none.
struct CopySources {
  Tier tier = Tier::DRAM;
  std::span<const uint64_t> generations = {};
};

struct FlushResult {
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  uint64_t skipped = 0;  // held
};

struct NamespaceCounts {
  uint64_t chunks = 0;  // READY
  uint64_t bytes = 0;
  uint64_t held = 0;     // of them
  uint64_t writing = 0;  // being written
  uint64_t zombies = 0;  // dropped, or whose writer's time is over, and not free yet
};

// Where a chunk lies in a tier: byte offset of its slot, and the generation that the slot must have.
struct ChunkPlace {
  uint64_t offset;
  uint64_t generation;
};

struct RecordPage {
  uint32_t next = 0;  // cursor to go on from; 0: the end was reached
  HoldId pin = 0;
  std::vector<RecordId> records;
};

struct DirectoryStats {
  uint64_t chunks = 0;  // READY
  uint64_t unsaved_chunks = 0;  // of these, without a copy in any lower tier
  uint64_t writing = 0;
  uint64_t zombies = 0;
  uint64_t held = 0;  // chunks that somebody holds
  uint64_t holds = 0;
  uint64_t pinned = 0;  // chunks with pins that nobody holds
  uint64_t pins = 0;
  uint64_t reservations = 0;
  uint64_t waiting_runs = 0;  // of chunks that are committed behind one that is being written: a hold each
  uint64_t used_bytes = 0;
  uint64_t idle_bytes = 0;
  uint64_t pinned_bytes = 0;  // of READY chunks with pins that nobody holds, and of such that were dropped
  uint64_t token_id_bytes = 0;
  uint64_t token_ids_left_out = 0;  // chunks that were stored without, for lack of room
  uint64_t stored_chunks = 0;  // these since the start: stored + promoted = chunks + evicted + shed + flushed + dropped + withdrawn
  uint64_t evicted_chunks = 0;  // left the pool
  uint64_t shed_chunks = 0;     // left this tier for room and are in another one
  uint64_t promoting = 0;
  std::array<uint64_t, LOAD_FAULTS> failed_landings{};  // by LoadFault
  uint64_t promoted_chunks = 0;  // came back from a lower tier, or from an earlier life
  uint64_t flushed_chunks = 0;
  uint64_t dropped_chunks = 0;
  uint64_t withdrawn_chunks = 0;  // copies that left with what they were copied from
  uint64_t aborted_chunks = 0;
  std::array<uint64_t, RESERVE_STATES> answers{};     // of `reserve`, by SaveState
  std::array<uint64_t, EVICTIONS> evictions{};     // by Eviction; their sum is evicted_chunks and shed_chunks
  std::array<uint64_t, DECLINED> declined{};       // by Declined, where there is a lower tier; their sum is evicted_chunks
  RetentionCounts retention;
  PolicyCounts policy;
  TimeHistogram reuse_gaps;  // of each chunk acquired: time since its last access, 0 where it is in use
  TimeHistogram lifetimes;   // of each chunk evicted: time since it was stored
};

}  // namespace kvpool
