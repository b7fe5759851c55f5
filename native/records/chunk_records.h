// Records of chunks, the tree their prefix chains form, and the links of the lists they stand in.
//
// What it is: memory and links. What it is not: a decision; the Directory says who is held or removed, EvictionQueues who
// stands where.
// Records are sized at start and reused; a RecordId is therefore only good while its record lives. They lie in memory of the process, or
// in a region that outlives it, with a seal each (kept_region.h).
// Invariants: a record is on the free list or alive; children of a record form a list whose members name it as
// parent; a list's hand is in it.
// Threads: the control thread only. Every operation is O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/lazy_array.h"
#include "base/types.h"
#include "records/kept_region.h"

namespace kvpool {

//   FREE --reserve--> WRITING --commit (with its parent)--> READY --evict, flush, drop--> FREE
//                        |                  |
//                        +--expire, drop----+--drop while held--> ZOMBIE --last hold ends--> FREE
//                        +--abort--> FREE
//   FREE --promote--> PROMOTING --landed--> READY
//                        +--failed, drop (it is held)--> ZOMBIE
enum class ChunkState : uint8_t { FREE, WRITING, READY, ZOMBIE, PROMOTING };

// Which list of its queue a chunk stands in.
enum class Standing : uint8_t {
  SAVED = 0,        // needs no copy in a lower tier: it has one, had one since its last use, or there is no such tier
  UNSAVED = 1,      // no other tier has it
  BEING_SAVED = 2,  // no other tier has it, and it is read for a copy: no victim until that has ended
};
inline constexpr size_t STANDINGS = 3;

// Of one chunk at a time.
inline constexpr uint8_t MAX_PINS = 127;

// The priority of a chunk without a retention request: the default of TensorRT-LLM's KvCacheRetentionConfig.
inline constexpr uint8_t DEFAULT_PRIORITY = 35;
inline constexpr uint8_t MAX_PRIORITY = 100;

// Two cache lines; what an acquire looks at stands in the first.
struct alignas(64) ChunkRecord {
  uint64_t last_access_ns = 0;
  uint64_t generation = 0;
  RecordId parent;
  RecordId first_child;
  RecordId older;  // the list it stands in; `newer` also links the free list
  RecordId newer;
  NamespaceId owner;
  uint32_t holds = 0;
  PackedPage page;
  ClassId size_class;
  ChunkState state = ChunkState::FREE;
  uint8_t touches = 0;  // times stored or acquired, at most 255; 2 at least for a chunk that was evicted not long ago
  uint8_t priority = DEFAULT_PRIORITY;
  uint8_t level = DEFAULT_PRIORITY;  // of the list it stands in: its priority, or that of a child it was moved beside
  uint8_t queue = 0;                 // of its level: the policy's choice
  uint8_t learned_class = 0;         // the class that its last use counts in: see ClassQueuePolicy
  uint8_t chain_kind = 0;            // of the request that used it last: see chain_kind_of
  uint8_t turn = 0;                  // which of the requests that made its chain stored it first, from 1; 0: not known yet
  uint8_t pins : 7 = 0;              // who has hardware read its slot, for a copy or a check
  bool is_cut : 1 = false;           // held without its parent once: what precedes it may be used earlier than it
  bool is_reused : 1 = false;        // acquired since it was stored
  bool is_used : 1 = false;          // stored or acquired since it stood in a queue last
  bool is_sampled : 1 = false;       // is_in_sample(key): known without a look at the second line
  bool is_below : 1 = false;         // a lower tier has it
  bool was_below : 1 = false;        // written to a lower tier since its last use, wherever it is there now
  bool is_aside : 1 = false;         // it would stand in a queue, but for a child that cannot go: see eviction_queues.h
  Standing standing : 2 = Standing::SAVED;
  uint8_t source : 3 = 0;            // while PROMOTING: the level that it is read from
  bool has_writer : 1 = false;       // somebody writes to its slot: a client, a disk, a peer
  bool has_copy : 1 = false;         // the directory of copies has it too, READY
  bool is_following : 1 = false;     // while WRITING: behind a chunk that another reservation was writing
  uint16_t timer = UINT16_MAX;       // where in the timer wheel; see RetentionTimers
  uint32_t depth = 0;                // chunks that precede it in its chain

  ChunkKey key{};
  RecordId next_sibling;
  RecordId previous_sibling;
  uint32_t stored_tick = 0;    // when it became READY; see tick_of
  uint32_t retained_tick = 0;  // when its priority was set
  uint32_t duration_ms = 0;    // from its last use until its priority falls to the default; 0: it does not
  RecordId timer_next;
  RecordId timer_previous;
  uint32_t retained_children = 0;  // that are retained: see RetentionLedger

  [[nodiscard]] bool has_slot() const noexcept { return page.valid(); }
  // Whether hardware, a client or a peer may be at its slot: nobody else gets it meanwhile.
  [[nodiscard]] bool has_io() const noexcept { return has_writer || pins > 0; }
  // Whether its bytes can be found here, some of them maybe not yet landed.
  [[nodiscard]] bool has_bytes() const noexcept { return state == ChunkState::READY || state == ChunkState::PROMOTING; }
  // Copied whole, and out of sight until the chunk before it is READY.
  [[nodiscard]] bool is_waiting() const noexcept { return state == ChunkState::WRITING && !has_writer; }
  // Whether it is READY and nobody holds it: it stands in a queue, or is set aside. Whether it may go as well: it has no pin.
  [[nodiscard]] bool is_listed() const noexcept { return state == ChunkState::READY && holds == 0; }
  [[nodiscard]] bool is_free() const noexcept { return is_listed() && pins == 0; }
  // Whether its priority, or that of a chunk that follows it, is above the default.
  [[nodiscard]] bool is_retained() const noexcept { return priority > DEFAULT_PRIORITY || retained_children > 0; }
};
static_assert(sizeof(ChunkRecord) == 128);
static_assert(offsetof(ChunkRecord, key) <= 64);

// What a finding about a record calls it.
[[nodiscard]] inline std::string name_of(RecordId id) { return "chunk record " + std::to_string(id.value()); }

// Times in 32 bits: ticks of 67 ms, of which differences are taken modulo 9 years.
inline constexpr unsigned TICK_SHIFT = 26;
[[nodiscard]] constexpr uint32_t tick_of(uint64_t now_ns) noexcept {
  return static_cast<uint32_t>(now_ns >> TICK_SHIFT);
}
[[nodiscard]] constexpr uint64_t age_ns(const ChunkRecord& record, uint64_t now_ns) noexcept {
  return uint64_t{tick_of(now_ns) - record.stored_tick} << TICK_SHIFT;
}

// A list of records from the oldest to the newest.
struct ChunkList {
  RecordId oldest;
  RecordId newest;
  RecordId hand;  // the one put among the others last, or its neighbour; unset: none was
  uint64_t length = 0;
};

// The seal of a record, as it stands in such a region, of a chunk behind one of this generation (0: it is the first). Never 0.
[[nodiscard]] uint32_t seal_of(const ChunkRecord& record, RecordId id, uint64_t parent_generation) noexcept;

class ChunkRecords {
 public:
  // In zeroed memory for so many that lives as long; private memory where that is nullptr.
  explicit ChunkRecords(uint32_t capacity, ChunkRecord* memory = nullptr);
  // In a zeroed region, which is made one of `shape`; private memory where there is none.
  ChunkRecords(std::shared_ptr<const Mapping> kept, const KeptShape& shape);
  ChunkRecords(const ChunkRecords&) = delete;
  ChunkRecords& operator=(const ChunkRecords&) = delete;

  [[nodiscard]] ChunkRecord& operator[](RecordId id) noexcept { return records_[id.value()]; }
  [[nodiscard]] const ChunkRecord& operator[](RecordId id) const noexcept { return records_[id.value()]; }
  // Whether these of one hold follow one another, some of them dropped or not; otherwise none has a parent.
  [[nodiscard]] bool is_chain(std::span<const RecordId> held) const noexcept {
    return held.size() < 2 || records_[held[1].value()].depth != 0;
  }
  void prefetch(RecordId id) const noexcept;        // its first line
  void prefetch_whole(RecordId id) const noexcept;  // both

  [[nodiscard]] bool is_full() const noexcept { return alive_ == capacity_; }
  [[nodiscard]] uint32_t alive() const noexcept { return alive_; }
  // Ids below this may be alive.
  [[nodiscard]] uint32_t end() const noexcept { return end_; }

  // Whether they outlive the process. Of the others `seal` and `note_generation` do nothing.
  [[nodiscard]] bool are_kept() const noexcept { return seals_ != nullptr; }
  // The record, its parent too, is what it will be while its chunk lives; whose reservation has its slot written. REQUIRES: its parent
  // lives.
  void seal(RecordId id, HolderId writer) noexcept {
    if (seals_ != nullptr) {
      write_seal(id, writer);
    }
  }
  // A generation is about to be given.
  void note_generation(uint64_t generation) noexcept {
    if (generation >= generations_end_) [[unlikely]] {
      raise_generations_end(generation);
    }
  }
  // Whether a record that has a parent where it had one at first has its seal.
  [[nodiscard]] bool is_sealed(RecordId id) const noexcept;
  // The seals and the memory for token ids. REQUIRES: records are kept.
  [[nodiscard]] RecordSeal& seal_at(RecordId id) noexcept { return seals_[id.value()]; }
  [[nodiscard]] const RecordSeal& seal_at(RecordId id) const noexcept { return seals_[id.value()]; }
  [[nodiscard]] const KeptRegion& region() const noexcept { return *kept_; }
  // Entries of the arena's runs; nullptr where records are not kept.
  [[nodiscard]] KeptRun* runs() const noexcept { return kept_ ? kept_->runs() : nullptr; }
  // For what the eviction policy learns; likewise.
  [[nodiscard]] uint8_t* learned() const noexcept { return kept_ ? kept_->learned() : nullptr; }
  // Where so many will be written, with so many bytes of cells for token ids; nothing where records are not kept.
  [[nodiscard]] std::vector<WrittenSoon> pages_for(uint64_t records, uint64_t token_bytes) const {
    return kept_ ? kept_->pages_for(records, token_bytes) : std::vector<WrittenSoon>{};
  }
  // A forked child has none of a kept region. What the records are now is copied for it, and is its own once it says so. `room`: for as
  // many as there may be, with pages for those that there are; nullptr: it is made first, which takes eight times the copy's time.
  void copy_for_child(std::shared_ptr<LazyArray<ChunkRecord>> room);
  void forget_copy() noexcept { copy_.reset(); }
  void use_copy() noexcept;

  // A blank record. REQUIRES: not is_full().
  [[nodiscard]] RecordId allocate() noexcept;
  // REQUIRES: no parent, no children, in no list.
  void release(RecordId id) noexcept;

  // REQUIRES: child has no parent.
  void attach_child(RecordId parent, RecordId child) noexcept;
  // Takes a record out of its parent's children; nothing where it has no parent.
  void detach(RecordId child) noexcept;

  // Puts a record into a list behind (on the newer side of) another one; unset: it becomes the oldest.
  // REQUIRES: the record is in no list, `older` in this one.
  void link_behind(ChunkList& list, RecordId id, RecordId older) noexcept { link_run_behind(list, {&id, 1}, older); }
  // The same of several, which stand side by side: the first one is the newest of them.
  void link_run_behind(ChunkList& list, std::span<const RecordId> run, RecordId older) noexcept;
  // REQUIRES: the records stand in this list side by side, from the newest of them on.
  void unlink_run(ChunkList& list, std::span<const RecordId> run) noexcept;

 private:
  // A later life gives no generation of the former one, and as many as this of none are lost to it.
  static constexpr uint64_t GENERATIONS_STEP = uint64_t{1} << 20;

  void write_seal(RecordId id, HolderId writer) noexcept;
  void raise_generations_end(uint64_t generation) noexcept;

  const uint32_t capacity_;
  uint32_t alive_ = 0;
  uint32_t end_ = 0;
  const std::optional<KeptRegion> kept_;
  std::optional<LazyArray<ChunkRecord>> own_;
  std::shared_ptr<LazyArray<ChunkRecord>> copy_;
  ChunkRecord* records_;  // constructed up to `end_`
  RecordSeal* const seals_;
  uint64_t generations_end_;
  RecordId first_free_;
};

}  // namespace kvpool
