// What the tests of the SSD tier share: a directory that goes with the test, an arena, an index and headers made of numbers.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/harness.h"
#include "shared_index/chunk_table.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_queue.h"

namespace kvpool::testing {

// Beside the test's program: a temporary directory in memory would refuse direct I/O.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::current_path() / "ssd-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  [[nodiscard]] std::string path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Slots of one geometry, as many in memory as in the files; the chunk in slot i is made of the number i.
class SsdSetting {
 public:
  SsdSetting(uint32_t slots, uint32_t extent_count, uint64_t bytes_of_extent)
      : extents(extent_count),
        extent_bytes(bytes_of_extent),
        slot_bytes(round_up(extents * extent_bytes, PAGE_BYTES)),
        file_slot_bytes(slot_bytes + SSD_HEADER_BYTES) {
    files = SsdFiles::open(directory.file("tier"), file_slot_bytes * 4, (slots + 3) / 4, true).files;
    const IndexShape shape{256, {{slots * slot_bytes, slots, uint64_t{slots} * extents}}};
    arena = Mapping::create("test-arena", slots * slot_bytes, false).mapping;
    const auto words = Mapping::create("test-index", shape.total_bytes(), false).mapping;
    const uint8_t epoch[16] = {1};
    table = std::make_unique<ChunkTable>(words, shape, epoch);
    index = IndexView::attach(words);
    board = std::make_shared<LandingBoard>(words);
    for (uint32_t slot = 0; slot < slots; ++slot) {
      table->open_slot(address(slot), slot * extents);
      fill(slot);
    }
  }

  void fill(uint32_t slot) const {
    std::mt19937_64 random(slot + 1);
    for (uint64_t at = 0; at < slot_bytes; at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes(slot) + at, &word, sizeof(word));
    }
  }
  void wipe(uint32_t slot) const {
    std::memset(bytes(slot), 0, slot_bytes);
    table->set_landed(address(slot), 0);
  }
  [[nodiscard]] uint8_t* bytes(uint32_t slot) const { return arena->data() + arena_offset(slot); }
  [[nodiscard]] uint64_t arena_offset(uint32_t slot) const { return slot * slot_bytes; }
  [[nodiscard]] static SlotAddress address(uint32_t slot) { return {DRAM_REGION, slot}; }
  [[nodiscard]] uint64_t file_offset(uint32_t slot) const { return slot * file_slot_bytes; }

  [[nodiscard]] SsdHeader header(uint32_t slot) const {
    SsdHeader made{{7}, {}, {}, {9}, slot + 100, extent_bytes, std::vector<uint32_t>(extents)};
    std::memcpy(made.key, &slot, sizeof(slot));
    made.key[31] = 1;
    for (uint32_t extent = 0; extent < extents; ++extent) {
      made.extent_crcs[extent] = crc32c(0, bytes(slot) + extent * extent_bytes, extent_bytes);
    }
    return made;
  }

  // Whether the slot's memory holds the bytes that belong there.
  [[nodiscard]] bool is_right(uint32_t slot) const {
    std::vector<uint8_t> found(bytes(slot), bytes(slot) + extents * extent_bytes);
    fill(slot);
    return std::memcmp(found.data(), bytes(slot), found.size()) == 0;
  }

  const ScratchDirectory directory;
  const uint32_t extents;
  const uint64_t extent_bytes;
  const uint64_t slot_bytes;
  const uint64_t file_slot_bytes;
  std::shared_ptr<SsdFiles> files;
  std::shared_ptr<const Mapping> arena;
  std::unique_ptr<ChunkTable> table;
  std::shared_ptr<const IndexView> index;
  std::shared_ptr<LandingBoard> board;
};

// The ways to do I/O that a test tries one after another.
enum class IoKind { CALLS, RING };

// Whether the kernel lets this process have rings; says why not.
inline bool can_have_rings() {
  const ScratchDirectory scratch;
  const auto files = SsdFiles::open(scratch.file("tier"), PAGE_BYTES, 1, false).files;
  const SsdRingResult ring = make_ring_io(files);
  if (ring.io == nullptr) {
    std::printf("  skipped with io_uring: %s\n", std::strerror(ring.error));
  }
  return ring.io != nullptr;
}

template <typename Body>
void for_each_io(Body body) {
  body(IoKind::CALLS);
  static const bool has_rings = can_have_rings();
  if (has_rings) {
    body(IoKind::RING);
  }
}

// A queue over all of a setting that does its I/O in one way.
inline std::unique_ptr<SsdQueue> make_queue(const SsdSetting& setting, IoKind kind, unsigned threads, size_t jobs_max) {
  auto queue = std::make_unique<SsdQueue>(setting.files, setting.arena, setting.board, threads, jobs_max,
                                          kind != IoKind::CALLS);
  EXPECT(queue->io().rings == (kind == IoKind::CALLS ? 0 : threads));
  return queue;
}

// The next `count` outcomes, by way of the descriptor.
inline std::vector<SsdOutcome> wait_for_outcomes(SsdQueue& queue, size_t count) {
  std::vector<SsdOutcome> all;
  pollfd waiting{queue.event_fd(), POLLIN, 0};
  while (all.size() < count && poll(&waiting, 1, 30'000) > 0) {
    const auto more = queue.take_outcomes();
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

// The first `count` chunks of a setting, as they are to be written.
inline std::vector<SsdWrite> writes(const SsdSetting& setting, uint32_t count) {
  std::vector<SsdWrite> chunks;
  for (uint32_t slot = 0; slot < count; ++slot) {
    chunks.push_back({setting.file_offset(slot), setting.arena_offset(slot), setting.header(slot)});
  }
  return chunks;
}

// The same chunks, as they are to be read back.
inline std::vector<SsdRead> reads(const std::vector<SsdWrite>& written) {
  std::vector<SsdRead> chunks;
  for (const SsdWrite& chunk : written) {
    chunks.push_back({chunk.offset, chunk.arena_offset, SsdSetting::address(static_cast<uint32_t>(chunks.size())), chunk.header});
  }
  return chunks;
}

}  // namespace kvpool::testing
