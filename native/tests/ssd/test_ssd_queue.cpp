// Demotion and promotion through the queue: right bytes, extents in order, each failure named, each chunk reported once.
#include <algorithm>
#include <map>
#include <thread>

#include "tests/harness.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

bool all_ok(const std::vector<SsdOutcome>& outcomes, size_t count) {
  return outcomes.size() == count && std::all_of(outcomes.begin(), outcomes.end(), [](const SsdOutcome& outcome) {
           return outcome.status == SsdStatus::OK;
         });
}

}  // namespace

TEST(a_written_chunk_is_read_back_extent_by_extent) {
  for_each_io([](IoKind kind) {
    const std::pair<uint32_t, uint64_t> geometries[] = {{3, 1000}, {32, 16384}, {5, 700'001}, {2, 3 << 20}, {1, 4096}};
    for (const auto& [extents, extent_bytes] : geometries) {
      const SsdSetting setting(6, extents, extent_bytes);
      const auto queue = make_queue(setting, kind, 4, 16);
      const auto chunks = writes(setting, 6);
      EXPECT(queue->write(chunks) != 0);
      EXPECT(all_ok(wait_for_outcomes(*queue, 6), 6));
      for (uint32_t slot = 0; slot < 6; ++slot) {
        setting.wipe(slot);
      }
      const uint64_t job = queue->read(reads(chunks), SsdUrgency::DEMAND);
      const auto outcomes = wait_for_outcomes(*queue, 6);
      EXPECT(all_ok(outcomes, 6));
      std::map<uint32_t, int> seen;
      for (const SsdOutcome& outcome : outcomes) {
        EXPECT(outcome.job == job);
        ++seen[outcome.chunk];
      }
      EXPECT(seen.size() == 6);
      for (uint32_t slot = 0; slot < 6; ++slot) {
        EXPECT(setting.index->landed_at(setting.address(slot)) == extents);
        EXPECT(setting.index->checksum_at(setting.address(slot), extents - 1) ==
               chunks[slot].header.extent_crcs.back());
        EXPECT(setting.is_right(slot));
      }
      // Pages that two pieces share are read for both, and one chunk at least was read back.
      EXPECT(queue->stats().read_bytes >= 7 * (setting.slot_bytes + SSD_HEADER_BYTES));
      EXPECT(queue->stats().written_bytes == 6 * (setting.slot_bytes + SSD_HEADER_BYTES));
      EXPECT(queue->stats().failed_chunks == 0);
      // Another thread may still be finding that there is nothing left for it.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (queue->longest_transfer().count() != 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      EXPECT(queue->longest_transfer().count() == 0);
    }
  });
}

TEST(any_damage_in_a_slot_fails_that_chunk_alone) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(5, 4, 8192);
    const auto queue = make_queue(setting, kind, 2, 16);
    const auto chunks = writes(setting, 5);
    EXPECT(queue->write(chunks) != 0);
    EXPECT(all_ok(wait_for_outcomes(*queue, 5), 5));
    const auto outcome_of = [&](auto spoil, SsdStatus expected) {
      auto plan = reads(chunks);
      spoil(plan[2]);
      for (uint32_t slot = 0; slot < 5; ++slot) {
        setting.wipe(slot);
      }
      EXPECT(queue->read(plan, SsdUrgency::PROMOTION) != 0);
      for (const SsdOutcome& outcome : wait_for_outcomes(*queue, 5)) {
        EXPECT(outcome.status == (outcome.chunk == 2 ? expected : SsdStatus::OK));
        EXPECT(outcome.chunk == 2 || setting.is_right(outcome.chunk));
      }
      EXPECT((setting.index->landed_at(setting.address(2)) & LANDING_FAILED) != 0);
    };
    outcome_of([](SsdRead& chunk) { chunk.expected.key[5] = 1; }, SsdStatus::OTHER_KEY);
    outcome_of([](SsdRead& chunk) { chunk.expected.generation = 1; }, SsdStatus::OTHER_GENERATION);
    outcome_of([](SsdRead& chunk) { chunk.expected.pool_epoch[1] = 1; }, SsdStatus::OTHER_EPOCH);
    outcome_of([&](SsdRead& chunk) { chunk.offset = setting.file_offset(3); }, SsdStatus::OTHER_KEY);
    outcome_of([](SsdRead& chunk) { chunk.offset += PAGE_BYTES; }, SsdStatus::BAD_MAGIC);
    const int fd = open(setting.directory.file("tier/segment-000000.kvs").c_str(), O_RDWR);
    const auto at = static_cast<off_t>(setting.file_offset(2) + SSD_HEADER_BYTES + 3 * 8192 + 77);
    uint8_t byte = 0;
    EXPECT(pread(fd, &byte, 1, at) == 1);
    byte = static_cast<uint8_t>(byte ^ 1U);
    EXPECT(pwrite(fd, &byte, 1, at) == 1);
    EXPECT(fsync(fd) == 0);
    outcome_of([](SsdRead&) {}, SsdStatus::BAD_CHECKSUM);
    EXPECT(ftruncate(fd, static_cast<off_t>(setting.file_offset(2) + SSD_HEADER_BYTES)) == 0);
    close(fd);
    for (uint32_t slot = 2; slot < 3; ++slot) {
      EXPECT(queue->read({reads(chunks)[slot]}, SsdUrgency::DEMAND) != 0);
      EXPECT(wait_for_outcomes(*queue, 1).at(0).status == SsdStatus::SHORT_READ);
    }
  });
}

TEST(a_chunk_that_has_changed_in_memory_is_not_written) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(2, 4, 8192);
    const auto queue = make_queue(setting, kind, 2, 16);
    const auto chunks = writes(setting, 2);
    setting.bytes(1)[9000] ^= 4;
    EXPECT(queue->write(chunks) != 0);
    for (const SsdOutcome& outcome : wait_for_outcomes(*queue, 2)) {
      EXPECT(outcome.status == (outcome.chunk == 1 ? SsdStatus::BAD_SOURCE : SsdStatus::OK));
    }
  });
}

TEST(a_full_queue_refuses_and_a_stopped_one_reports_what_it_drops) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(8, 2, 2 << 20);
    const auto queue = make_queue(setting, kind, 1, 3);
    const auto chunks = writes(setting, 8);
    size_t accepted = 0;
    while (queue->write(chunks) != 0) {
      ++accepted;
    }
    EXPECT(accepted >= 3);
    EXPECT(queue->read(reads(chunks), SsdUrgency::DEMAND) != 0);
    EXPECT(queue->stop(std::chrono::minutes(1)));
    EXPECT(queue->write(chunks) == 0);
    std::map<std::pair<uint64_t, uint32_t>, int> seen;
    size_t cancelled = 0;
    for (const SsdOutcome& outcome : queue->take_outcomes()) {
      ++seen[{outcome.job, outcome.chunk}];
      cancelled += outcome.status == SsdStatus::CANCELLED ? 1 : 0;
    }
    EXPECT(seen.size() == 8 * (accepted + 1));
    EXPECT(std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second == 1; }));
    EXPECT(cancelled > 0);
  });
}

TEST(an_urgent_read_overtakes_what_waits_to_be_written) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(9, 2, 1 << 20);
    const auto queue = make_queue(setting, kind, 2, 64);
    const auto chunks = writes(setting, 8);
    EXPECT(queue->write(chunks) != 0);
    EXPECT(all_ok(wait_for_outcomes(*queue, 8), 8));
    uint64_t last = 0;
    for (int round = 0; round < 20; ++round) {
      last = queue->write(chunks);
      EXPECT(last != 0);
    }
    const SsdRead urgent_read{chunks[0].offset, setting.arena_offset(8), setting.address(8), chunks[0].header};
    const uint64_t urgent = queue->read({urgent_read}, SsdUrgency::DEMAND);
    EXPECT(urgent != 0);
    const auto outcomes = wait_for_outcomes(*queue, 161);
    const auto place_of = [&](uint64_t job) {
      return std::find_if(outcomes.begin(), outcomes.end(), [job](const SsdOutcome& o) { return o.job == job; });
    };
    EXPECT(place_of(urgent) < place_of(last));
    EXPECT(place_of(urgent) - outcomes.begin() < 120);
  });
}

TEST(an_urgent_read_waits_for_a_piece_and_not_for_the_chunk_that_is_being_written) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(3, 8, 8 << 20);
    const auto queue = make_queue(setting, kind, 1, 8);
    const auto chunks = writes(setting, 2);
    EXPECT(queue->write({chunks[0]}) != 0);
    EXPECT(all_ok(wait_for_outcomes(*queue, 1), 1));
    // On a busy machine a write may end before the read is queued: such a round shows nothing, and is made again.
    int overtaken = 0;
    for (int round = 0; round < 50 && overtaken < 5; ++round) {
      const uint64_t written = queue->write({chunks[1]});
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      while (queue->longest_transfer().count() == 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
      }
      const uint64_t read = queue->read({{chunks[0].offset, setting.arena_offset(2), setting.address(2), chunks[0].header}}, SsdUrgency::DEMAND);
      const auto outcomes = wait_for_outcomes(*queue, 2);
      EXPECT(all_ok(outcomes, 2));
      EXPECT((outcomes.at(0).job == read) != (outcomes.at(0).job == written));
      overtaken += outcomes.at(0).job == read;
    }
    EXPECT(overtaken > 0);
  });
}
