// A mover whose device fails, hangs or is stopped with work left: each chunk is reported once, and what is DONE is right.
#include "mover/device_mover.h"

#include "tests/mover/mover_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(each_call_that_fails_while_a_mover_is_made_is_named_and_leaves_nothing) {
  const Rig rig(1, 1, 4096);
  const uint64_t before = live_sum();
  for (const char* const call : {"cuMemHostAlloc", "cuEventCreate", "cuStreamCreate", "cuCtxPushCurrent_v2"}) {
    order(std::string("fail ") + call + " 1 2");
    const DeviceMoverResult made = DeviceMover::make({rig.device, rig.memory, rig.arena, rig.index}, PieceRing::BYTES_MIN);
    EXPECT(made.mover == nullptr);
    EXPECT(rig.device->text(made.status) == std::string(call) + " failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
    EXPECT(live_sum() == before);
  }
}

TEST(a_call_that_fails_costs_some_chunks_and_the_next_ones_are_right) {
  std::mt19937 dice(static_cast<unsigned>(seed()));
  for (const MoveKind kind : {MoveKind::PROMOTE, MoveKind::CHECK}) {
    for (const char* const call : {"cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"}) {
      const Rig rig(12, 3, 9000, PieceRing::BYTES_MIN);
      EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == 12);
      for (int round = 0; round < 4; ++round) {
        order(std::string("fail ") + call + " " + std::to_string(1 + dice() % 6) + " 999");
        const auto outcomes = rig.move(kind);
        EXPECT(count(outcomes, MoveOutcome::DONE) + count(outcomes, MoveOutcome::FAILED) == 12);
        order("clear 1");
        EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == 12);
        EXPECT(rig.are_on_device());
        EXPECT(count(rig.move(MoveKind::CHECK), MoveOutcome::DONE) == 12);
      }
    }
  }
}

TEST(a_device_that_has_failed_for_good_fails_everything) {
  for (const char* const call : {"cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuCtxPushCurrent_v2"}) {
    const Rig rig(6, 2, 9000, PieceRing::BYTES_MIN, 0.5);
    order(std::string("fail ") + call + " 0 700");
    EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::FAILED) == 6);
    EXPECT(count(rig.move(MoveKind::CHECK), MoveOutcome::FAILED) == 6);
    order("clear 1");
    EXPECT(comes_true([&] { return !rig.mover->stats().is_unresponsive; }));
    EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == 6);
    EXPECT(rig.are_on_device());
  }
}

TEST(a_device_that_does_not_answer_fails_everything_until_it_does) {
  const Rig rig(6, 2, 9000, PieceRing::BYTES_MIN, 0.05);
  order("hang 1");
  EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::FAILED) == 6);
  EXPECT(rig.mover->stats().is_unresponsive);
  EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::FAILED) == 6);
  EXPECT(count(rig.move(MoveKind::CHECK), MoveOutcome::FAILED) == 6);
  order("clear 1");
  EXPECT(comes_true([&] { return !rig.mover->stats().is_unresponsive; }));
  // The bytes that come late are written before those of the next promotion.
  const auto outcomes = rig.move(MoveKind::PROMOTE);
  for (uint32_t slot = 0; slot < 6; ++slot) {
    EXPECT(outcomes[slot] != MoveOutcome::DONE || rig.is_on_device(slot));
  }
  EXPECT(count(outcomes, MoveOutcome::DONE) + count(outcomes, MoveOutcome::FAILED) == 6);
}

// Both directions at once, each with slots of its own, as a daemon has it.
static std::vector<DeviceMoveRow> first_half(std::vector<DeviceMoveRow> rows) {
  rows.resize(rows.size() / 2);
  return rows;
}

static std::vector<DeviceMoveRow> second_half(const std::vector<DeviceMoveRow>& rows) {
  return {rows.begin() + static_cast<std::ptrdiff_t>(rows.size() / 2), rows.end()};
}

TEST(a_stopped_mover_has_reported_everything_and_takes_nothing) {
  std::mt19937 dice(static_cast<unsigned>(seed()));
  size_t cancelled = 0;
  for (int round = 0; round < 12; ++round) {
    const Rig rig(60, 3, 9000, PieceRing::BYTES_MIN);
    const uint64_t first = rig.mover->add(MoveKind::PROMOTE, first_half(rig.rows(MoveKind::PROMOTE)));
    EXPECT(first != 0 && rig.mover->add(MoveKind::CHECK, second_half(rig.rows(MoveKind::CHECK))) != 0);
    std::this_thread::sleep_for(std::chrono::microseconds(dice() % 3000));
    EXPECT(rig.mover->stop(LONG));
    Rig::Ends ends;
    rig.take(ends);
    EXPECT(ends.size() == 60);
    cancelled += count(ends, MoveOutcome::CANCELLED);
    for (uint32_t slot = 0; slot < 30; ++slot) {
      const MoveOutcome outcome = ends[{first, slot}];
      EXPECT(outcome == MoveOutcome::DONE || outcome == MoveOutcome::CANCELLED);
      EXPECT(outcome != MoveOutcome::DONE || rig.is_on_device(slot));
    }
    EXPECT(rig.mover->add(MoveKind::PROMOTE, rig.rows(MoveKind::PROMOTE)) == 0);
    EXPECT(rig.mover->stop(LONG));
  }
  EXPECT(cancelled > 0);
}

TEST(everything_was_given_back) { EXPECT(live_sum() == 0); }

// What a device may still use is left behind: the last test.
TEST(a_mover_whose_device_hangs_is_stopped_in_time_and_reports_nothing_twice) {
  Rig rig(60, 3, 9000, PieceRing::BYTES_MIN);
  order("hang 1");
  EXPECT(rig.mover->add(MoveKind::PROMOTE, first_half(rig.rows(MoveKind::PROMOTE))) != 0);
  EXPECT(rig.mover->add(MoveKind::CHECK, second_half(rig.rows(MoveKind::CHECK))) != 0);
  EXPECT(comes_true([&] { return rig.mover->stats().ring_waits >= 2; }));
  EXPECT(!rig.mover->stop(std::chrono::milliseconds(30)));
  Rig::Ends ends;
  rig.take(ends);
  EXPECT(ends.size() == 60 && count(ends, MoveOutcome::CANCELLED) == 60);
  order("clear 1");
  EXPECT(!rig.mover->stop(LONG));
  finish(*rig.stream);
  EXPECT(rig.mover->take_outcomes().empty());
  rig.mover.reset();
}
