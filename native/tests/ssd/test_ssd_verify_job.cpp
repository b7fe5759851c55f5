// Checks through the queue: whatever differs from a chunk's checksums is found, nothing else is, and nobody waits for it.
#include <algorithm>

#include "tests/harness.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

std::vector<SsdWrite> write_all(const SsdSetting& setting, SsdQueue& queue, uint32_t count) {
  std::vector<SsdWrite> chunks;
  for (uint32_t slot = 0; slot < count; ++slot) {
    chunks.push_back({setting.file_offset(slot), setting.arena_offset(slot), setting.header(slot)});
  }
  EXPECT(queue.write(chunks) != 0);
  for (const SsdOutcome& outcome : wait_for_outcomes(queue, count)) {
    EXPECT(outcome.status == SsdStatus::OK);
  }
  return chunks;
}

std::vector<SsdVerify> checks(const std::vector<SsdWrite>& written) {
  std::vector<SsdVerify> chunks;
  for (const SsdWrite& chunk : written) {
    SsdHeader expected = chunk.header;
    std::fill(expected.extent_crcs.begin(), expected.extent_crcs.end(), 0);
    chunks.push_back({chunk.offset, expected});
  }
  return chunks;
}

// By chunk; each exactly once.
std::vector<SsdStatus> verify(SsdQueue& queue, const std::vector<SsdVerify>& chunks) {
  EXPECT(queue.verify(chunks) != 0);
  std::vector<SsdStatus> statuses(chunks.size(), SsdStatus::CANCELLED);
  std::vector<int> reports(chunks.size());
  for (const SsdOutcome& outcome : wait_for_outcomes(queue, chunks.size())) {
    statuses.at(outcome.chunk) = outcome.status;
    ++reports.at(outcome.chunk);
  }
  EXPECT(std::all_of(reports.begin(), reports.end(), [](int count) { return count == 1; }));
  return statuses;
}

void flip(const SsdSetting& setting, uint32_t slot, uint64_t at) {
  const std::string path = setting.directory.file(slot < 4 ? "tier/segment-000000.kvs" : "tier/segment-000001.kvs");
  const int fd = open(path.c_str(), O_RDWR);
  const auto place = static_cast<off_t>(setting.file_offset(slot % 4) + at);
  uint8_t byte = 0;
  EXPECT(pread(fd, &byte, 1, place) == 1);
  byte = static_cast<uint8_t>(byte ^ 0x10U);
  EXPECT(pwrite(fd, &byte, 1, place) == 1);
  EXPECT(fsync(fd) == 0);
  close(fd);
}

}  // namespace

TEST(every_byte_of_every_extent_counts_whatever_its_size) {
  const uint64_t seeded = seed();
  std::mt19937_64 random(seeded);
  const std::vector<std::pair<uint32_t, uint64_t>> geometries = {
      {1, 512}, {3, 4097}, {5, 100'000}, {7, 333'333}, {4, SSD_PIECE_BYTES}, {2, 3 * SSD_PIECE_BYTES + 8}};
  for (const auto& [extents, extent_bytes] : geometries) {
    const SsdSetting setting(6, extents, extent_bytes);
    SsdQueue queue(setting.files, setting.arena, setting.board, 4, 16, false);
    const auto chunks = write_all(setting, queue, 6);
    const uint64_t before = queue.stats().read_bytes;
    EXPECT(verify(queue, checks(chunks)) == std::vector<SsdStatus>(6, SsdStatus::OK));
    EXPECT(queue.stats().read_bytes - before >= 6 * extents * extent_bytes);
    for (const uint64_t at : {uint64_t{0}, extents * extent_bytes - 1, random() % (extents * extent_bytes)}) {
      flip(setting, 5, SSD_HEADER_BYTES + at);
      auto expected = std::vector<SsdStatus>(6, SsdStatus::OK);
      expected[5] = SsdStatus::BAD_CHECKSUM;
      EXPECT(verify(queue, checks(chunks)) == expected);
      flip(setting, 5, SSD_HEADER_BYTES + at);
    }
    EXPECT(verify(queue, checks(chunks)) == std::vector<SsdStatus>(6, SsdStatus::OK));
  }
}

TEST(the_first_difference_of_a_header_is_named) {
  const SsdSetting setting(5, 4, 8192);
  SsdQueue queue(setting.files, setting.arena, setting.board, 2, 16, false);
  const auto chunks = write_all(setting, queue, 5);
  const auto status_of = [&](auto spoil) {
    auto plan = checks(chunks);
    spoil(plan[2]);
    const auto statuses = verify(queue, plan);
    EXPECT(std::count(statuses.begin(), statuses.end(), SsdStatus::OK) == 4);
    return statuses[2];
  };
  EXPECT(status_of([](SsdVerify& chunk) { chunk.expected.key[5] = 1; }) == SsdStatus::OTHER_KEY);
  EXPECT(status_of([](SsdVerify& chunk) { chunk.expected.generation = 1; }) == SsdStatus::OTHER_GENERATION);
  EXPECT(status_of([](SsdVerify& chunk) { chunk.expected.pool_epoch[1] = 1; }) == SsdStatus::OTHER_EPOCH);
  EXPECT(status_of([&](SsdVerify& chunk) { chunk.offset = setting.file_offset(3); }) == SsdStatus::OTHER_KEY);
  EXPECT(status_of([](SsdVerify& chunk) { chunk.offset += PAGE_BYTES; }) == SsdStatus::BAD_MAGIC);
  flip(setting, 2, 152);
  EXPECT(status_of([](SsdVerify&) {}) == SsdStatus::BAD_HEADER);
  const std::string path = setting.directory.file("tier/segment-000000.kvs");
  EXPECT(truncate(path.c_str(), static_cast<off_t>(setting.file_offset(3) + SSD_HEADER_BYTES)) == 0);
  EXPECT(verify(queue, {checks(chunks)[3]}) == std::vector<SsdStatus>{SsdStatus::SHORT_READ});
}

TEST(everything_else_goes_before_a_check) {
  const SsdSetting setting(9, 2, 1 << 20);
  SsdQueue queue(setting.files, setting.arena, setting.board, 2, 64, false);
  const auto chunks = write_all(setting, queue, 8);
  uint64_t check = 0;
  for (int round = 0; round < 10; ++round) {
    check = queue.verify(checks(chunks));
    EXPECT(check != 0);
  }
  const uint64_t write = queue.write(chunks);
  const uint64_t read = queue.read({{chunks[0].offset, setting.arena_offset(8), setting.address(8), chunks[0].header}}, SsdUrgency::DEMAND);
  const auto outcomes = wait_for_outcomes(queue, 10 * 8 + 8 + 1);
  const auto last_of = [&](uint64_t job) {
    return std::find_if(outcomes.rbegin(), outcomes.rend(), [job](const SsdOutcome& o) { return o.job == job; }).base();
  };
  EXPECT(last_of(read) < last_of(check));
  EXPECT(last_of(write) < last_of(check));
  EXPECT(last_of(read) - outcomes.begin() < 70);
}

TEST(a_stopped_queue_reports_every_chunk_of_a_check_once) {
  const SsdSetting setting(8, 2, 2 << 20);
  SsdQueue queue(setting.files, setting.arena, setting.board, 2, 64, false);
  const auto chunks = write_all(setting, queue, 8);
  for (int round = 0; round < 8; ++round) {
    EXPECT(queue.verify(checks(chunks)) != 0);
  }
  EXPECT(queue.stop(std::chrono::minutes(1)));
  EXPECT(queue.verify(checks(chunks)) == 0);
  const auto outcomes = queue.take_outcomes();
  EXPECT(outcomes.size() == 64);
  EXPECT(std::any_of(outcomes.begin(), outcomes.end(),
                     [](const SsdOutcome& outcome) { return outcome.status == SsdStatus::CANCELLED; }));
}
