// Copies out of another daemon's memory: what lands, what is wrong, and what ends.
#include "near/near_queue.h"

#include <sys/mman.h>

#include "tests/net/net_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// The owner as a puller maps it: by descriptors, read-only.
struct Mapped {
  explicit Mapped(const Node& owner) : arena(Mapping::attach(owner.arena->fd(), owner.arena->size(), false).mapping) {}
  const std::shared_ptr<const Mapping> arena;
};

NearPlan plan_of(const Node& owner, const Node& here, uint32_t parts = 1, milliseconds time = LONG) {
  NearPlan plan;
  plan.source = Mapped(owner).arena;
  plan.source_index = owner.index;
  for (uint32_t slot = 0; slot < owner.slots; ++slot) {
    plan.sources.push_back({owner.arena_offset(slot), Node::address(slot), Node::generation(slot)});
    plan.rows.push_back({here.arena_offset(slot), Node::address(slot)});
    for (uint32_t extent = 0; extent < owner.extents; ++extent) {
      plan.checks.push_back(owner.crc(slot, extent));
    }
  }
  plan.extents = owner.extents;
  plan.extent_bytes = owner.extent_bytes;
  plan.parts = parts;
  plan.deadline = StreamClock::now() + time;
  return plan;
}

std::map<uint32_t, PullOutcome> wait_for(NearQueue& queue, size_t count) {
  std::vector<PullOutcome> all;
  collect(queue.event_fd(), count, all, [&] { return queue.take_outcomes(); });
  std::map<uint32_t, PullOutcome> by_chunk;
  for (const PullOutcome& outcome : all) {
    EXPECT(by_chunk.emplace(outcome.chunk, outcome).second);
  }
  return by_chunk;
}

void store_all(const Node& owner) {
  for (uint32_t slot = 0; slot < owner.slots; ++slot) {
    owner.store(slot);
  }
}

}  // namespace

TEST(chunks_come_with_their_bytes_in_any_number_of_parts) {
  for (const uint64_t extent_bytes : {50ULL, 4096ULL, 100'000ULL, 600'000ULL}) {
    for (const uint32_t parts : {1U, 2U, 5U}) {
      const Node owner(5, 3, extent_bytes);
      store_all(owner);
      const Node here(5, 3, extent_bytes);
      NearQueue queue(here.arena, here.board, 2, 4);
      EXPECT(queue.pull(plan_of(owner, here, parts)) != 0);
      for (const auto& [chunk, outcome] : wait_for(queue, 5)) {
        EXPECT(outcome.status == PullStatus::DONE && outcome.fault == PullFault::NONE);
        EXPECT(outcome.bytes == 3 * extent_bytes);
        EXPECT(here.has(chunk));
      }
      EXPECT(here.keeps_bounds());
      wait_until([&] { return queue.stats().jobs == 0; });
      EXPECT(queue.stats().copied_bytes == 15 * extent_bytes);
    }
  }
}

TEST(a_chunk_with_other_bytes_than_its_checksum_fails_alone_in_that_extent) {
  const Node owner(3, 4, 5000);
  store_all(owner);
  const Node here(3, 4, 5000);
  NearPlan plan = plan_of(owner, here);
  owner.arena->data()[owner.arena_offset(1) + 2 * 5000 + 77] ^= 1;
  NearQueue queue(here.arena, here.board, 1, 1);
  EXPECT(queue.pull(std::move(plan)) != 0);
  const auto ends = wait_for(queue, 3);
  EXPECT(ends.at(1).status == PullStatus::BAD_SOURCE && ends.at(1).fault == PullFault::CHECKSUM);
  EXPECT(ends.at(1).bytes == 2 * 5000);
  EXPECT(here.is_failed(1));
  EXPECT(here.is_untouched(1, 3 * 5000));
  EXPECT(here.has(0) && here.has(2));
}

TEST(an_owner_that_promises_other_checksums_than_its_index_has_is_believed_in_neither) {
  const Node owner(1, 2, 5000);
  store_all(owner);
  const Node here(1, 2, 5000);
  NearPlan plan = plan_of(owner, here);
  plan.checks[1] ^= 1;
  NearQueue queue(here.arena, here.board, 1, 1);
  EXPECT(queue.pull(std::move(plan)) != 0);
  EXPECT(wait_for(queue, 1).at(0).fault == PullFault::CHECKSUM);
  EXPECT(here.is_failed(0));
}

TEST(a_chunk_that_has_left_its_slot_is_gone_though_its_bytes_are_still_there) {
  const Node owner(3, 2, 5000);
  store_all(owner);
  const Node here(3, 2, 5000);
  NearPlan plan = plan_of(owner, here);
  owner.table->set_generation(Node::address(2), 0);
  plan.sources[0].generation += 1;
  NearQueue queue(here.arena, here.board, 1, 1);
  EXPECT(queue.pull(std::move(plan)) != 0);
  const auto ends = wait_for(queue, 3);
  for (const uint32_t chunk : {0U, 2U}) {
    EXPECT(ends.at(chunk).status == PullStatus::BAD_SOURCE && ends.at(chunk).fault == PullFault::GONE);
    EXPECT(ends.at(chunk).bytes == 0);
    EXPECT(here.is_failed(chunk));
  }
  EXPECT(here.has(1));
}

TEST(slots_that_change_while_they_are_copied_never_land_with_other_bytes) {
  constexpr uint64_t EXTENT_BYTES = 64 << 10;
  std::mt19937 random(static_cast<unsigned>(seed()));
  const Node owner(8, 8, EXTENT_BYTES);
  size_t done = 0;
  size_t gone = 0;
  for (int round = 0; round < 30; ++round) {
    store_all(owner);
    const Node here(8, 8, EXTENT_BYTES);
    const NearPlan plan = plan_of(owner, here, 2);
    NearQueue queue(here.arena, here.board, 2, 1);
    const auto evicted = static_cast<uint32_t>(random() % 8);
    const auto delay = std::chrono::microseconds(random() % 400);
    std::thread evicting([&] {
      const auto until = StreamClock::now() + delay;
      while (StreamClock::now() < until) {
      }
      // As a daemon does it: the generation first, then other bytes.
      owner.table->set_generation(Node::address(evicted), 0);
      std::memset(owner.arena->data() + owner.arena_offset(evicted), 0x5A, 8 * EXTENT_BYTES);
    });
    EXPECT(queue.pull(plan) != 0);
    const auto ends = wait_for(queue, 8);
    evicting.join();
    for (const auto& [chunk, outcome] : ends) {
      const bool is_done = outcome.status == PullStatus::DONE;
      EXPECT(is_done || (chunk == evicted && outcome.fault == PullFault::GONE));
      EXPECT(is_done ? here.index->landed_at(Node::address(chunk)) == 8 : here.is_failed(chunk));
      const auto bytes = here.chunk(chunk);
      EXPECT(!is_done || std::memcmp(here.arena->data() + here.arena_offset(chunk), bytes.data(), bytes.size()) == 0);
      (is_done ? done : gone) += 1;
    }
  }
  EXPECT(done + gone == 240 && done >= 210);
}

TEST(a_late_job_and_one_that_is_cancelled_end_without_a_byte) {
  const Node owner(4, 2, 5000);
  store_all(owner);
  const Node here(4, 2, 5000);
  NearQueue queue(here.arena, here.board, 1, 1);
  EXPECT(queue.pull(plan_of(owner, here, 2, milliseconds(-1))) != 0);
  for (const auto& [chunk, outcome] : wait_for(queue, 4)) {
    EXPECT(outcome.status == PullStatus::FAILED && outcome.fault == PullFault::LATE);
    EXPECT(here.is_failed(chunk) && here.is_untouched(chunk, 0));
  }
  wait_until([&] { return queue.stats().jobs == 0; });
  EXPECT(!queue.cancel(1));
}

// A job can end before it is cancelled: then another one is tried.
TEST(a_cancelled_job_reports_each_chunk_once) {
  const Node owner(4, 8, 1 << 20);
  store_all(owner);
  size_t cancelled = 0;
  for (int attempt = 0; attempt < 100 && cancelled == 0; ++attempt) {
    const Node here(4, 8, 1 << 20);
    NearQueue queue(here.arena, here.board, 1, 1);
    static_cast<void>(queue.cancel(queue.pull(plan_of(owner, here, 4))));
    for (const auto& [chunk, outcome] : wait_for(queue, 4)) {
      const bool is_done = outcome.status == PullStatus::DONE;
      EXPECT(is_done || outcome.status == PullStatus::CANCELLED);
      EXPECT(is_done ? here.has(chunk) : here.is_failed(chunk));
      cancelled += is_done ? 0 : 1;
    }
  }
  EXPECT(cancelled > 0);
}

TEST(a_stopped_queue_has_reported_everything_and_takes_nothing) {
  const Node owner(4, 8, 1 << 20);
  store_all(owner);
  const Node here(4, 8, 1 << 20);
  NearQueue queue(here.arena, here.board, 1, 8);
  EXPECT(queue.pull(plan_of(owner, here, 4)) != 0);
  EXPECT(queue.stop(LONG));
  EXPECT(queue.take_outcomes().size() == 4);
  EXPECT(queue.pull(plan_of(owner, here)) == 0);
}

TEST(the_owners_memory_is_read_after_its_owner_has_gone) {
  const Node here(2, 2, 5000);
  NearPlan plan;
  {
    const Node owner(2, 2, 5000);
    store_all(owner);
    plan = plan_of(owner, here);
  }
  NearQueue queue(here.arena, here.board, 1, 1);
  EXPECT(queue.pull(std::move(plan)) != 0);
  wait_for(queue, 2);
  EXPECT(here.has(0) && here.has(1));
}

