// A mover between an arena and an emulated device's memory, with slots of both in one index.
#pragma once

#include <poll.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "checksum/crc32c.h"
#include "mover/device_mover.h"
#include "tests/device/device_setting.h"

namespace kvpool::testing {

inline constexpr uint32_t HBM_REGION = 1;
inline constexpr std::chrono::milliseconds LONG{60'000};

// Slots of one geometry; the chunk in slot i is made of the number i.
struct Rig {
  Rig(uint32_t slot_count, uint32_t extent_count, uint64_t bytes_of_extent, uint64_t ring_bytes = 1 << 20, double answer_s = 60)
      : slots(slot_count), extents(extent_count), extent_bytes(bytes_of_extent), slot_bytes(round_up(extents * extent_bytes, PAGE_BYTES)) {
    device = open_device();
    stream = make_stream(device);
    memory = allocate(device, slots * slot_bytes);
    arena = Mapping::create("test-arena", slots * slot_bytes, false).mapping;
    const uint64_t sums = uint64_t{slots} * extents;
    IndexShape shape{256, {{arena->size(), slots, sums}, {memory->size(), slots, sums, Tier::HBM, Backing::DEVICE}}};
    words = Mapping::create("test-index", shape.total_bytes(), false).mapping;
    const uint8_t epoch[16] = {1};
    table = std::make_unique<ChunkTable>(words, shape, epoch);
    index = IndexView::attach(words);
    for (uint32_t slot = 0; slot < slots; ++slot) {
      table->open_slot(dram(slot), slot * extents);
      table->open_slot(hbm(slot), slot * extents);
      store(slot);
    }
    DeviceMoverResult made = DeviceMover::make({device, memory, arena, index}, ring_bytes, answer_s);
    KVPOOL_CHECK(made.mover != nullptr);
    mover = std::move(made.mover);
  }

  [[nodiscard]] static SlotAddress dram(uint32_t slot) { return {DRAM_REGION, slot}; }
  [[nodiscard]] static SlotAddress hbm(uint32_t slot) { return {HBM_REGION, slot}; }
  [[nodiscard]] static uint64_t generation(uint32_t slot) { return slot + 100; }
  [[nodiscard]] uint64_t chunk_bytes() const { return extents * extent_bytes; }
  [[nodiscard]] std::vector<uint8_t> chunk(uint32_t slot) const { return random_bytes(chunk_bytes(), slot); }

  // The chunk as a save has left it, with the words that its copy on the device will have.
  void store(uint32_t slot) const {
    const auto bytes = chunk(slot);
    std::memcpy(arena->data() + slot * slot_bytes, bytes.data(), bytes.size());
    std::vector<uint32_t> sums;
    for (uint32_t extent = 0; extent < extents; ++extent) {
      sums.push_back(crc32c(0, bytes.data() + extent * extent_bytes, extent_bytes));
    }
    for (const SlotAddress address : {dram(slot), hbm(slot)}) {
      table->set_checksums(address, sums.data(), extents);
      table->set_landed(address, extents);
      table->set_generation(address, generation(slot));
    }
  }

  [[nodiscard]] DeviceMoveRow row(MoveKind kind, uint32_t slot) const {
    const SlotAddress address = kind == MoveKind::PROMOTE ? dram(slot) : hbm(slot);
    return {slot * slot_bytes, address.packed(), generation(slot), slot * slot_bytes, chunk_bytes(), extents};
  }
  [[nodiscard]] std::vector<DeviceMoveRow> rows(MoveKind kind) const {
    std::vector<DeviceMoveRow> all;
    for (uint32_t slot = 0; slot < slots; ++slot) {
      all.push_back(row(kind, slot));
    }
    return all;
  }

  // Ends by job and chunk, once so many have come; each may come once.
  using Ends = std::map<std::pair<uint64_t, uint32_t>, MoveOutcome>;
  void collect(Ends& ends, size_t count) const {
    while (ends.size() < count) {
      pollfd readable{mover->event_fd(), POLLIN, 0};
      KVPOOL_CHECK(poll(&readable, 1, static_cast<int>(LONG.count())) == 1);
      take(ends);
    }
  }
  void take(Ends& ends) const {
    for (const MoveEnd& end : mover->take_outcomes()) {
      EXPECT(ends.emplace(std::pair(end.job, end.chunk), end.outcome).second);
    }
  }
  // Moves all slots in one job: outcome of each.
  std::vector<MoveOutcome> move(MoveKind kind) const {
    EXPECT(mover->fault(kind, rows(kind)) == nullptr);
    EXPECT(mover->add(kind, rows(kind)) != 0);
    Ends ends;
    collect(ends, slots);
    std::vector<MoveOutcome> outcomes;
    for (const auto& [chunk, outcome] : ends) {
      outcomes.push_back(outcome);
    }
    return outcomes;
  }

  [[nodiscard]] bool is_on_device(uint32_t slot) const {
    return read_from(*stream, memory->address() + slot * slot_bytes, chunk_bytes()) == chunk(slot);
  }
  [[nodiscard]] bool are_on_device() const {
    bool all = true;
    for (uint32_t slot = 0; slot < slots; ++slot) {
      all = all && is_on_device(slot);
    }
    return all;
  }
  void flip_on_device(uint32_t slot, uint64_t at) const {
    const cuda::Address byte = memory->address() + slot * slot_bytes + at;
    auto bytes = read_from(*stream, byte, 1);
    bytes[0] ^= 1;
    write_to(*stream, byte, bytes);
  }

  const uint32_t slots;
  const uint32_t extents;
  const uint64_t extent_bytes;
  const uint64_t slot_bytes;
  std::shared_ptr<Device> device;
  std::shared_ptr<DeviceStream> stream;
  std::shared_ptr<DeviceMemory> memory;
  std::shared_ptr<Mapping> arena;
  std::shared_ptr<Mapping> words;
  std::unique_ptr<ChunkTable> table;
  std::shared_ptr<const IndexView> index;
  std::shared_ptr<DeviceMover> mover;
};

[[nodiscard]] inline size_t count(const std::vector<MoveOutcome>& outcomes, MoveOutcome wanted) {
  return static_cast<size_t>(std::count(outcomes.begin(), outcomes.end(), wanted));
}
[[nodiscard]] inline size_t count(const Rig::Ends& ends, MoveOutcome wanted) {
  return static_cast<size_t>(std::count_if(ends.begin(), ends.end(), [wanted](const auto& end) { return end.second == wanted; }));
}

}  // namespace kvpool::testing
