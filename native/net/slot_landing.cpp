#include "net/slot_landing.h"

#include <utility>

#include "base/check.h"

namespace kvpool {

const char* pull_fault_word(PullFault fault) noexcept {
  static constexpr const char* WORDS[] = {"",       "unreachable", "refused",  "closed", "broken",   "stalled",
                                          "late",   "format",      "checksum", "gone",   "untrusted", "cancelled"};
  return WORDS[static_cast<size_t>(fault)];
}

SlotLanding::SlotLanding(const PullTarget& target, uint32_t part, const Mapping& arena, LandingBoard& board, Report report)
    : target_(target),
      part_(part),
      arena_(arena),
      board_(board),
      report_(std::move(report)),
      chunks_((target.rows.size() + target.parts - 1 - part) / target.parts),
      left_(chunks_.size()) {
  KVPOOL_CHECK(target_.checks.empty() || target_.checks.size() == target_.rows.size() * target_.extents);
  for (const PullRow& row : target_.rows) {
    KVPOOL_CHECK(arena_.contains(row.arena_offset, target_.extents * target_.extent_bytes));
  }
}

std::chrono::microseconds SlotLanding::elapsed() const {
  return std::chrono::ceil<std::chrono::microseconds>(StreamClock::now() - begun_);
}

void SlotLanding::land(uint32_t chunk, uint32_t first, const uint32_t* crcs, uint32_t count) {
  board_.land(target_.rows[chunk].slot, first, crcs, count);
  of(chunk).landed += count;
  if (first == 0) {
    of(chunk).first_extent = elapsed();
  }
  if (first + count == target_.extents) {
    end(chunk, PullStatus::DONE, PullFault::NONE);
  }
}

void SlotLanding::end(uint32_t number, PullStatus status, PullFault fault) {
  Chunk& chunk = of(number);
  if (chunk.has_ended) {
    return;
  }
  chunk.has_ended = true;
  --left_;
  PullOutcome outcome;
  outcome.is_unmarked = target_.may_come_again && status == PullStatus::FAILED && chunk.landed == 0;
  if (status != PullStatus::DONE && !outcome.is_unmarked) {
    board_.fail(target_.rows[number].slot);
  }
  outcome.chunk = number;
  outcome.status = status;
  outcome.fault = fault;
  outcome.bytes = chunk.landed * target_.extent_bytes;
  outcome.first_extent = chunk.first_extent;
  outcome.elapsed = elapsed();
  ended_.push_back(outcome);
}

void SlotLanding::report() {
  if (!ended_.empty()) {
    report_(ended_);
    ended_.clear();
  }
}

void SlotLanding::end_all(PullStatus status, PullFault fault) {
  each([&](uint32_t chunk) { end(chunk, status, fault); });
  report();
}

}  // namespace kvpool
