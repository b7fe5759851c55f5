// When chunks' priorities fall back to the default: a wheel of timers through the records.
//
// What it is: which records are due about now. What it is not: a judge of whether they are: a chunk that was used since its
// timer was set is set again by the caller, so that a use costs nothing here.
//
// Five rings of 64 places; a place of ring r stands for 64^r ticks of 67 ms. A timer stands at the outermost place that its
// time and the wheel's do not share; when the wheel comes to that place, it is handed out like one that is due, and goes back
// further inwards. So nothing but the record needs to know when it is due.
//
//     ring 0   |t|t|t|...|  ticks of this turn
//     ring 1   |64 t|...|   the turns ahead, and so on: 64^5 ticks, more than 2 years
//
// Invariants: a ring's bit is set where its place is not empty; each record here names its place; the places that the wheel
// has come to are empty but while they are being handed out.
// Threads: the control thread only. O(1) per timer and ring; `take_due` passes empty places by their bits.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "records/chunk_records.h"

namespace kvpool {

class RetentionTimers {
 public:
  explicit RetentionTimers(ChunkRecords& records) : records_(records) {}
  RetentionTimers(const RetentionTimers&) = delete;
  RetentionTimers& operator=(const RetentionTimers&) = delete;

  // Has the record handed out then, or earlier. REQUIRES: it has no timer.
  void set(RecordId id, uint64_t due_ns, uint64_t now_ns) noexcept;
  // Nothing where it has none.
  void cancel(RecordId id) noexcept;
  // A record that may be due at this time, its timer taken off; unset where there is none.
  [[nodiscard]] RecordId take_due(uint64_t now_ns) noexcept;
  // When `take_due` is to be asked next: the earliest timer is due then or later. Nothing where there is none.
  [[nodiscard]] std::optional<uint64_t> next_ns() const noexcept;
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  static constexpr uint32_t RINGS = 5;
  static constexpr uint32_t PLACES_LOG2 = 6;
  static constexpr uint32_t PLACES = 1U << PLACES_LOG2;
  static constexpr uint16_t NOWHERE = UINT16_MAX;
  static constexpr uint64_t FURTHEST = (uint64_t{1} << (PLACES_LOG2 * RINGS)) - 1;

  void link(RecordId id, uint32_t place) noexcept;
  [[nodiscard]] uint32_t place_of(uint64_t tick, uint32_t ring) const noexcept {
    return ring * PLACES + (static_cast<uint32_t>(tick >> (PLACES_LOG2 * ring)) & (PLACES - 1));
  }
  [[nodiscard]] uint64_t next_tick() const noexcept;

  ChunkRecords& records_;
  uint64_t tick_ = 0;  // everything before has been handed out
  uint64_t size_ = 0;
  std::array<uint64_t, RINGS> occupied_{};
  std::array<RecordId, RINGS * PLACES> places_{};
};

}  // namespace kvpool
