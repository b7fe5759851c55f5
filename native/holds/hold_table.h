// Hold table: which chunks each hold, pin and reservation names, and how often each chunk is held and pinned.
//
// What it is: the three tables by id, and the two counts in each chunk's record. What it is not: what follows from a count (the
// Directory moves a chunk that nobody holds into the queues, and frees the slot of one that was dropped), for whom a hold counts
// (HolderShares), or a clock.
//
// A hold means that somebody reads; a reservation, that somebody writes. A pin means that hardware reads the slot, for a copy or a
// check, and gates the slot's reuse. Whoever opens one of them counts each of its chunks with `hold` or `pin`, and counts it back
// before or after it is closed.
//
// Invariants, between two calls of the Directory (recounted by `verify`):
//   1. `holds` of a record counts the holds and reservations that name it, `pins` the pins.
//   2. Who reads a chunk holds its ancestors: holds(parent) >= holds(child), but where a writer's holds begin.
//   3. `held` counts the records with a hold.
//   4. Ids are positive, rise over all three tables, and never repeat.
// Threads: the control thread only. O(1) for a chunk and for a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/types.h"
#include "holds/reservation_state.h"
#include "records/chunk_records.h"

namespace kvpool {

struct Hold {
  HoldId id = 0;
  size_t chunks = 0;
};

class HoldTable {
 public:
  using Records = std::vector<RecordId>;

  // REQUIRES: the records live as long as this.
  explicit HoldTable(ChunkRecords& records) : records_(records) {}
  HoldTable(const HoldTable&) = delete;
  HoldTable& operator=(const HoldTable&) = delete;

  // One hold more of a chunk: true where it is the first. One less: true where it was the last.
  bool hold(RecordId id) noexcept {
    ChunkRecord& record = records_[id];
    KVPOOL_CHECK(record.holds < UINT32_MAX);
    const bool is_first = record.holds++ == 0;
    held_ += is_first ? 1U : 0U;
    return is_first;
  }
  bool unhold(RecordId id) noexcept {
    ChunkRecord& record = records_[id];
    KVPOOL_CHECK(record.holds > 0);
    const bool was_last = --record.holds == 0;
    held_ -= was_last ? 1U : 0U;
    return was_last;
  }
  // One hold more of each of these. Calls `begin` with each stretch of chunks that nobody held before.
  template <typename Begin>
  void hold_all(std::span<const RecordId> ids, Begin begin) noexcept {
    size_t first = 0;
    const auto take = [&](size_t end) {
      if (end > first) {
        held_ += end - first;
        begin(ids.subspan(first, end - first));
      }
      first = end + 1;
    };
    for (size_t index = 0; index < ids.size(); ++index) {
      ChunkRecord& record = records_[ids[index]];
      KVPOOL_CHECK(record.holds < UINT32_MAX);
      if (record.holds++ != 0) {
        take(index);
      }
    }
    take(ids.size());
  }
  // The only hold of a chunk ends, which `count_unheld` counts; false where it has others.
  static bool unhold_last(ChunkRecord& record) noexcept {
    const bool is_last = record.holds == 1;
    record.holds -= is_last ? 1U : 0U;
    return is_last;
  }
  void count_unheld(uint64_t chunks) noexcept { held_ -= chunks; }
  // The same of pins.
  bool pin(RecordId id) noexcept {
    ChunkRecord& record = records_[id];
    KVPOOL_CHECK(record.pins < MAX_PINS);
    return record.pins++ == 0;
  }
  bool unpin(RecordId id) noexcept {
    ChunkRecord& record = records_[id];
    KVPOOL_CHECK(record.pins > 0);
    return --record.pins == 0;
  }

  // REQUIRES: not empty.
  Hold open_hold(Records records);
  Hold open_pin(Records records);
  std::pair<HoldId, const ReservationState&> open_reservation(ReservationState state);

  // The chunks of a hold, the root first; nullptr where it is unknown. Valid until it is closed.
  [[nodiscard]] Records* find_hold(HoldId id) noexcept { return find(holds_, id); }
  [[nodiscard]] const Records* find_hold(HoldId id) const noexcept { return find(holds_, id); }
  [[nodiscard]] ReservationState* find_reservation(HoldId id) noexcept { return find(reservations_, id); }
  [[nodiscard]] const ReservationState* find_reservation(HoldId id) const noexcept { return find(reservations_, id); }
  // The chunks of a hold or a pin; nullptr where it is unknown.
  [[nodiscard]] const Records* find_readable(HoldId id) const noexcept;
  // Those of several, of one after the other; nothing where one is unknown.
  [[nodiscard]] std::optional<Records> records_of(const std::vector<HoldId>& holds) const;
  // All holds and reservations.
  [[nodiscard]] std::vector<HoldId> holders() const;
  // The chunks of a hold or of a reservation that has not expired; none where it is unknown.
  [[nodiscard]] const Records& chain_of(HoldId id) const noexcept;

  // Take it off its table: its chunks are the caller's to count back. Nothing where it is unknown.
  [[nodiscard]] std::optional<Records> close_hold(HoldId id) { return take(holds_, id); }
  [[nodiscard]] std::optional<Records> close_pin(HoldId id) { return take(pins_, id); }
  void close_reservation(HoldId id) noexcept { reservations_.erase(id); }

  // The chunk at a position of a hold or a pin, its key, and the key that the first one follows; nothing where there is none.
  [[nodiscard]] std::optional<RecordId> record_of(HoldId id, size_t position) const noexcept;
  [[nodiscard]] std::optional<ChunkKey> key_of(HoldId id, size_t position) const noexcept;
  [[nodiscard]] std::optional<ChunkKey> parent_key_of(HoldId id) const noexcept;
  // All keys of holds and pins, of one after the other; an unknown one has none.
  [[nodiscard]] std::vector<ChunkKey> keys_of(const std::vector<HoldId>& holds) const;
  // How many leading chunks of each hold are not dropped: what is dropped takes along what follows it.
  [[nodiscard]] std::vector<size_t> count_whole(const std::vector<HoldId>& holds) const;
  // The keys of these holds that are in the sample, each hold's from the root on, and how many chunks they have.
  [[nodiscard]] std::vector<ChunkKey> sampled_keys(const std::vector<HoldId>& holds, size_t& chunks) const;
  // Extents of a reservation's size class; nothing where it is unknown.
  [[nodiscard]] std::optional<uint32_t> extents_of(HoldId reservation) const noexcept;

  [[nodiscard]] size_t holds() const noexcept { return holds_.size(); }
  [[nodiscard]] size_t pins() const noexcept { return pins_.size(); }
  [[nodiscard]] const std::unordered_map<HoldId, ReservationState>& reservations() const noexcept { return reservations_; }
  [[nodiscard]] uint64_t held() const noexcept { return held_; }  // chunks that somebody holds
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  template <typename Table>
  [[nodiscard]] static auto find(Table& table, HoldId id) noexcept -> decltype(&table.begin()->second) {
    const auto found = table.find(id);
    return found == table.end() ? nullptr : &found->second;
  }
  [[nodiscard]] static std::optional<Records> take(std::unordered_map<HoldId, Records>& table, HoldId id);

  ChunkRecords& records_;
  std::unordered_map<HoldId, Records> holds_;
  std::unordered_map<HoldId, Records> pins_;
  std::unordered_map<HoldId, ReservationState> reservations_;
  HoldId last_id_ = 0;
  uint64_t held_ = 0;
};

}  // namespace kvpool
