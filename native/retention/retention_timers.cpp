// The wheel. See retention_timers.h.
#include "retention/retention_timers.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {

void RetentionTimers::set(RecordId id, uint64_t due_ns, uint64_t now_ns) noexcept {
  KVPOOL_CHECK(records_[id].timer == NOWHERE);
  if (size_ == 0) {
    tick_ = std::max(tick_, now_ns >> TICK_SHIFT);
  }
  const uint64_t due = (due_ns >> TICK_SHIFT) + 1;  // not before it is past
  const uint64_t tick = std::min(std::max(due, tick_ + 1), tick_ + FURTHEST / 2);
  const auto differing = static_cast<uint32_t>(std::bit_width(tick ^ tick_)) - 1;
  link(id, place_of(tick, std::min(differing / PLACES_LOG2, RINGS - 1)));
}

void RetentionTimers::link(RecordId id, uint32_t place) noexcept {
  ChunkRecord& record = records_[id];
  record.timer = static_cast<uint16_t>(place);
  record.timer_previous = RecordId();
  record.timer_next = places_[place];
  if (record.timer_next.valid()) {
    records_[record.timer_next].timer_previous = id;
  }
  places_[place] = id;
  occupied_[place / PLACES] |= uint64_t{1} << (place % PLACES);
  ++size_;
}

void RetentionTimers::cancel(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  if (record.timer == NOWHERE) {
    return;
  }
  const uint32_t place = record.timer;
  if (record.timer_previous.valid()) {
    records_[record.timer_previous].timer_next = record.timer_next;
  } else {
    places_[place] = record.timer_next;
  }
  if (record.timer_next.valid()) {
    records_[record.timer_next].timer_previous = record.timer_previous;
  }
  record.timer = NOWHERE;
  record.timer_next = RecordId();
  record.timer_previous = RecordId();
  if (!places_[place].valid()) {
    occupied_[place / PLACES] &= ~(uint64_t{1} << (place % PLACES));
  }
  --size_;
}

// The next tick at which the wheel comes to a place that is not empty, or turns over.
uint64_t RetentionTimers::next_tick() const noexcept {
  for (uint32_t ring = 0; ring < RINGS; ++ring) {
    const uint32_t digit = place_of(tick_, ring) % PLACES;
    const uint64_t ahead = digit + 1 == PLACES ? 0 : occupied_[ring] >> (digit + 1);
    if (ahead != 0) {
      const uint64_t steps = static_cast<uint64_t>(std::countr_zero(ahead)) + 1;
      return ((tick_ >> (PLACES_LOG2 * ring)) + steps) << (PLACES_LOG2 * ring);
    }
  }
  return (tick_ | FURTHEST) + 1;
}

std::optional<uint64_t> RetentionTimers::next_ns() const noexcept {
  if (size_ == 0) {
    return std::nullopt;
  }
  for (uint32_t ring = 0; ring < RINGS; ++ring) {
    if (places_[place_of(tick_, ring)].valid()) {
      return tick_ << TICK_SHIFT;
    }
  }
  return next_tick() << TICK_SHIFT;
}

RecordId RetentionTimers::take_due(uint64_t now_ns) noexcept {
  const uint64_t now = now_ns >> TICK_SHIFT;
  while (size_ > 0 && tick_ <= now) {
    for (uint32_t ring = 0; ring < RINGS; ++ring) {
      const RecordId id = places_[place_of(tick_, ring)];
      if (id.valid()) {
        cancel(id);
        return id;
      }
    }
    const uint64_t next = next_tick();
    if (next > now) {
      break;
    }
    tick_ = next;
  }
  return RecordId();
}

std::vector<std::string> RetentionTimers::verify() const {
  std::vector<std::string> broken;
  uint64_t count = 0;
  for (uint32_t place = 0; place < places_.size(); ++place) {
    if (places_[place].valid() != ((occupied_[place / PLACES] >> (place % PLACES) & 1U) != 0)) {
      broken.push_back("timer place " + std::to_string(place) + " is empty and marked, or neither");
    }
    for (RecordId id = places_[place]; id.valid() && count <= size_; id = records_[id].timer_next) {
      ++count;
      if (records_[id].timer != place || records_[id].duration_ms == 0) {
        broken.push_back("chunk record " + std::to_string(id.value()) + " has a timer it should not have");
      }
    }
  }
  if (count != size_) {
    broken.push_back("timers: " + std::to_string(count) + ", counted " + std::to_string(size_));
  }
  return broken;
}

}  // namespace kvpool
