// What the tests of copying share: an arena and an index of readable chunks, and an engine's cache in plain memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "shared_index/chunk_table.h"
#include "checksum/crc32c.h"
#include "copy/load_job.h"
#include "copy/save_job.h"

namespace kvpool::testing {

inline constexpr double LONG_S = 30.0;

// Chunks of one block each lie one behind the other; block i of the engine is where chunk i belongs.
class CopySetting {
 public:
  CopySetting(size_t chunks, uint32_t extent_count, uint64_t bytes_of_extent, uint64_t seed)
      : extents(extent_count),
        extent_bytes(bytes_of_extent),
        chunks_(chunks),
        slot_bytes_(round_up(extents * extent_bytes, PAGE_BYTES)) {
    const IndexShape shape{256, {{chunks * slot_bytes_, chunks, chunks * extents}}};
    arena = Mapping::create("test-arena", chunks * slot_bytes_, false).mapping;
    words = Mapping::create("test-index", shape.total_bytes(), false).mapping;
    const uint8_t epoch[16] = {1};
    table = std::make_unique<ChunkTable>(words, shape, epoch);
    index = IndexView::attach(words);
    std::mt19937_64 random(seed);
    for (uint64_t at = 0; at < arena->size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(arena->data() + at, &word, sizeof(word));
    }
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      table->open_slot(slot(chunk), static_cast<uint32_t>(chunk) * extents);
      publish(chunk);
    }
    engine.assign(chunks * extents * extent_bytes, 0);
  }

  [[nodiscard]] uint64_t offset(size_t chunk) const { return chunk * slot_bytes_; }
  [[nodiscard]] SlotAddress slot(size_t chunk) const { return {DRAM_REGION, static_cast<uint32_t>(chunk)}; }
  [[nodiscard]] uint8_t* extent(size_t chunk, uint32_t number) const {
    return arena->data() + offset(chunk) + number * extent_bytes;
  }
  [[nodiscard]] uint8_t* block(size_t chunk, uint32_t number) {
    return engine.data() + (number * chunks_ + chunk) * extent_bytes;
  }
  [[nodiscard]] bool holds(size_t chunk, uint32_t number) {
    return std::memcmp(block(chunk, number), extent(chunk, number), extent_bytes) == 0;
  }

  [[nodiscard]] CacheView view() {
    CacheView made{{}, 1, chunks_, extent_bytes, 0, extent_bytes};
    for (uint32_t number = 0; number < extents; ++number) {
      made.bases.push_back(block(0, number));
    }
    return made;
  }

  [[nodiscard]] LoadPlan load_plan() {
    LoadPlan plan{view(), arena, index, {}, {}, {}, {}, extents, extent_bytes, true};
    for (size_t chunk = 0; chunk < chunks_; ++chunk) {
      plan.offsets.push_back(offset(chunk));
      plan.slots.push_back(slot(chunk));
      plan.generations.push_back(chunk + 1);
      plan.block_ids.push_back(static_cast<int64_t>(chunk));
    }
    return plan;
  }

  // Of some extents, of each the first `payload` bytes.
  [[nodiscard]] LoadPlan load_plan_of(const std::vector<uint32_t>& numbers, uint64_t payload) {
    LoadPlan plan = load_plan();
    plan.view = view_of(numbers, payload);
    plan.extents = static_cast<uint32_t>(numbers.size());
    plan.payload_bytes = payload;
    plan.map = {numbers, extent_bytes};
    return plan;
  }
  [[nodiscard]] CacheView view_of(const std::vector<uint32_t>& numbers, uint64_t payload) {
    CacheView made{{}, 1, chunks_, payload, 0, extent_bytes};
    for (const uint32_t number : numbers) {
      made.bases.push_back(block(0, number));
    }
    return made;
  }

  [[nodiscard]] SavePlan save_plan() {
    const LoadPlan plan = load_plan();
    return {plan.view, arena, plan.offsets, plan.block_ids, extents, extent_bytes};
  }

  std::shared_ptr<const Mapping> arena;
  std::shared_ptr<const Mapping> words;  // of the index
  std::shared_ptr<const IndexView> index;
  std::unique_ptr<ChunkTable> table;
  std::vector<uint8_t> engine;
  const uint32_t extents;
  const uint64_t extent_bytes;

 private:
  void publish(size_t chunk) {
    std::vector<uint32_t> sums;
    for (uint32_t number = 0; number < extents; ++number) {
      sums.push_back(crc32c(0, extent(chunk, number), extent_bytes));
    }
    table->set_checksums(slot(chunk), sums.data(), extents);
    table->set_landed(slot(chunk), extents);
    table->set_generation(slot(chunk), chunk + 1);
  }

  const size_t chunks_;
  const uint64_t slot_bytes_;
};

}  // namespace kvpool::testing
