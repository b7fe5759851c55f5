// Promotions to a device and checks of what is there: which bytes arrive, and what is found wrong.
#include "mover/device_mover.h"

#include "tests/mover/mover_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(chunks_arrive_with_their_bytes_and_pass_the_check_whatever_their_size) {
  for (const auto& [slots, extents, extent_bytes] :
       {std::tuple{1U, 1U, 1ULL}, std::tuple{40U, 3U, 50ULL}, std::tuple{5U, 4U, 4096ULL}, std::tuple{3U, 2U, 700'001ULL}}) {
    for (const uint64_t ring_bytes : {PieceRing::BYTES_MIN, uint64_t{3} << 20}) {
      const Rig rig(slots, extents, extent_bytes, ring_bytes);
      EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == slots);
      EXPECT(rig.are_on_device());
      EXPECT(count(rig.move(MoveKind::CHECK), MoveOutcome::DONE) == slots);
      const DeviceMoverStats stats = rig.mover->stats();
      EXPECT(stats.promoted_bytes == slots * rig.chunk_bytes() && stats.checked_bytes == stats.promoted_bytes);
      EXPECT(stats.promotions == 0 && stats.checks == 0 && !stats.is_unresponsive);
    }
  }
}

TEST(a_chunk_with_other_bytes_than_its_checksum_fails_alone) {
  const Rig rig(5, 3, 20'000, PieceRing::BYTES_MIN);
  rig.arena->data()[2 * rig.slot_bytes + 20'000 + 7] ^= 1;
  const auto outcomes = rig.move(MoveKind::PROMOTE);
  EXPECT(outcomes[2] == MoveOutcome::BAD_SOURCE);
  EXPECT(count(outcomes, MoveOutcome::DONE) == 4);
  EXPECT(rig.is_on_device(1) && !rig.is_on_device(2) && rig.is_on_device(3));
}

TEST(a_chunk_that_has_changed_on_the_device_fails_its_check_alone) {
  for (const uint64_t at : {0ULL, 19'999ULL, 20'000ULL, 59'999ULL}) {
    const Rig rig(4, 3, 20'000, PieceRing::BYTES_MIN);
    EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == 4);
    rig.flip_on_device(1, at);
    const auto outcomes = rig.move(MoveKind::CHECK);
    EXPECT(outcomes[1] == MoveOutcome::BAD_SOURCE);
    EXPECT(count(outcomes, MoveOutcome::DONE) == 3);
  }
}

TEST(a_chunk_that_has_left_its_slot_is_no_source) {
  const Rig rig(4, 2, 5000);
  rig.table->set_generation(Rig::dram(1), 0);
  rig.table->set_generation(Rig::dram(3), 7);
  const auto outcomes = rig.move(MoveKind::PROMOTE);
  EXPECT(outcomes[1] == MoveOutcome::BAD_SOURCE && outcomes[3] == MoveOutcome::BAD_SOURCE);
  EXPECT(count(outcomes, MoveOutcome::DONE) == 2);
  rig.table->set_generation(Rig::hbm(0), 7);
  EXPECT(rig.move(MoveKind::CHECK)[0] == MoveOutcome::BAD_SOURCE);
}

TEST(a_chunk_that_is_still_being_read_into_the_arena_is_not_begun) {
  const Rig rig(3, 4, 5000);
  rig.table->set_landed(Rig::dram(0), 3);
  rig.table->set_landed(Rig::dram(2), 1 | LANDING_FAILED);
  const auto outcomes = rig.move(MoveKind::PROMOTE);
  EXPECT(outcomes[0] == MoveOutcome::FAILED && outcomes[1] == MoveOutcome::DONE && outcomes[2] == MoveOutcome::FAILED);
}

TEST(slots_that_change_while_they_are_read_are_never_done_with_other_bytes) {
  std::mt19937 dice(static_cast<unsigned>(seed()));
  const Rig rig(8, 8, 64 << 10, 256 << 10);
  size_t done = 0;
  for (int round = 0; round < 25; ++round) {
    for (uint32_t slot = 0; slot < 8; ++slot) {
      rig.store(slot);
    }
    const auto evicted = static_cast<uint32_t>(dice() % 8);
    const auto delay = std::chrono::microseconds(dice() % 3000);
    std::thread evicting([&] {
      const auto until = std::chrono::steady_clock::now() + delay;
      while (std::chrono::steady_clock::now() < until) {
      }
      // As a daemon does it: the generation first, then other bytes.
      rig.table->set_generation(Rig::dram(evicted), 0);
#if !defined(__SANITIZE_THREAD__)  // a race by design, found out by the generation
      std::memset(rig.arena->data() + evicted * rig.slot_bytes, 0x5A, rig.chunk_bytes());
#endif
    });
    const auto outcomes = rig.move(MoveKind::PROMOTE);
    evicting.join();
    for (uint32_t slot = 0; slot < 8; ++slot) {
      EXPECT(outcomes[slot] == MoveOutcome::DONE || (slot == evicted && outcomes[slot] == MoveOutcome::BAD_SOURCE));
      EXPECT(outcomes[slot] != MoveOutcome::DONE || rig.is_on_device(slot));
      done += outcomes[slot] == MoveOutcome::DONE ? 1U : 0U;
    }
  }
  EXPECT(done >= 175);
}

TEST(nothing_is_allocated_after_a_mover_is_made_and_its_ring_bounds_what_is_under_way) {
  const Rig rig(20, 2, 40'000, PieceRing::BYTES_MIN);
  const auto allocations = [] {
    uint64_t sum = 0;
    for (const char* const call : {"cuMemHostAlloc", "cuMemCreate", "cuEventCreate", "cuStreamCreate", "cuMemHostRegister_v2"}) {
      sum += calls(call);
    }
    return sum;
  };
  const uint64_t before = allocations();
  const uint64_t copies = calls("cuMemcpyAsync");
  order("hang 1");
  EXPECT(rig.mover->add(MoveKind::PROMOTE, rig.rows(MoveKind::PROMOTE)) != 0);
  EXPECT(comes_true([&] { return rig.mover->stats().ring_waits > 0; }));
  EXPECT(calls("cuMemcpyAsync") - copies == PieceRing::BYTES_MIN / PAGE_BYTES);
  EXPECT(rig.mover->take_outcomes().empty());
  order("clear 1");
  Rig::Ends ends;
  rig.collect(ends, 20);
  EXPECT(count(ends, MoveOutcome::DONE) == 20);
  EXPECT(count(rig.move(MoveKind::CHECK), MoveOutcome::DONE) == 20);
  EXPECT(allocations() == before);
  EXPECT(rig.are_on_device());
}

TEST(a_full_line_refuses_and_the_other_one_takes) {
  const Rig rig(2, 1, 5000);
  const std::vector<DeviceMoveRow> rows = {rig.row(MoveKind::PROMOTE, 0)};
  order("hang 1");
  for (size_t job = 0; job < MoveJobs::JOBS_MAX; ++job) {
    EXPECT(rig.mover->add(MoveKind::PROMOTE, rows) != 0);
  }
  EXPECT(rig.mover->add(MoveKind::PROMOTE, rows) == 0);
  EXPECT(rig.mover->add(MoveKind::CHECK, {rig.row(MoveKind::CHECK, 1)}) != 0);
  order("clear 1");
  Rig::Ends ends;
  rig.collect(ends, MoveJobs::JOBS_MAX + 1);
  EXPECT(count(rig.move(MoveKind::PROMOTE), MoveOutcome::DONE) == 2);
}

TEST(rows_that_lie_outside_are_refused) {
  const Rig rig(2, 2, 5000);
  const DeviceMoveRow good = rig.row(MoveKind::PROMOTE, 1);
  const auto is_refused = [&](MoveKind kind, DeviceMoveRow row) { return rig.mover->fault(kind, {good, row}) != nullptr; };
  EXPECT(!is_refused(MoveKind::PROMOTE, good));
  for (uint64_t DeviceMoveRow::*const field :
       {&DeviceMoveRow::arena_offset, &DeviceMoveRow::arena_slot, &DeviceMoveRow::device_offset, &DeviceMoveRow::chunk_bytes,
        &DeviceMoveRow::extents}) {
    DeviceMoveRow row = good;
    row.*field = UINT64_MAX - 1;
    EXPECT(is_refused(MoveKind::PROMOTE, row));
  }
  for (uint64_t DeviceMoveRow::*const field : {&DeviceMoveRow::generation, &DeviceMoveRow::chunk_bytes, &DeviceMoveRow::extents}) {
    DeviceMoveRow row = good;
    row.*field = 0;
    EXPECT(is_refused(MoveKind::CHECK, row));
  }
  DeviceMoveRow row = rig.row(MoveKind::CHECK, 1);
  row.arena_offset = UINT64_MAX;
  EXPECT(!is_refused(MoveKind::CHECK, row));
  EXPECT(rig.mover->fault(MoveKind::CHECK, {}) != nullptr);
}

TEST(everything_was_given_back) { EXPECT(live_sum() == 0); }
