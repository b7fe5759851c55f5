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
  CopySetting(size_t chunks, uint32_t layer_count, uint64_t bytes_of_layer, uint64_t seed)
      : layers(layer_count),
        layer_bytes(bytes_of_layer),
        chunks_(chunks),
        slot_bytes_(round_up(layers * layer_bytes, PAGE_BYTES)) {
    const IndexShape shape{256, {{chunks * slot_bytes_, chunks, chunks * layers}}};
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
      table->open_slot(slot(chunk), static_cast<uint32_t>(chunk) * layers);
      publish(chunk);
    }
    engine.assign(chunks * layers * layer_bytes, 0);
  }

  [[nodiscard]] uint64_t offset(size_t chunk) const { return chunk * slot_bytes_; }
  [[nodiscard]] SlotAddress slot(size_t chunk) const { return {DRAM_REGION, static_cast<uint32_t>(chunk)}; }
  [[nodiscard]] uint8_t* extent(size_t chunk, uint32_t layer) const {
    return arena->data() + offset(chunk) + layer * layer_bytes;
  }
  [[nodiscard]] uint8_t* block(size_t chunk, uint32_t layer) {
    return engine.data() + (layer * chunks_ + chunk) * layer_bytes;
  }
  [[nodiscard]] bool holds(size_t chunk, uint32_t layer) {
    return std::memcmp(block(chunk, layer), extent(chunk, layer), layer_bytes) == 0;
  }

  [[nodiscard]] CacheView view() {
    CacheView made{{}, 1, chunks_, layer_bytes, 0, layer_bytes};
    for (uint32_t layer = 0; layer < layers; ++layer) {
      made.layers.push_back(block(0, layer));
    }
    return made;
  }

  [[nodiscard]] LoadPlan load_plan() {
    LoadPlan plan{view(), arena, index, {}, {}, {}, {}, layers, layer_bytes, true};
    for (size_t chunk = 0; chunk < chunks_; ++chunk) {
      plan.offsets.push_back(offset(chunk));
      plan.slots.push_back(slot(chunk));
      plan.generations.push_back(chunk + 1);
      plan.block_ids.push_back(static_cast<int64_t>(chunk));
    }
    return plan;
  }

  // Of some extents, of which each layer fills the first `payload` bytes.
  [[nodiscard]] LoadPlan load_plan_of(const std::vector<uint32_t>& numbers, uint64_t payload) {
    LoadPlan plan = load_plan();
    plan.view = view_of(numbers, payload);
    plan.layers = static_cast<uint32_t>(numbers.size());
    plan.layer_bytes = payload;
    plan.extents = {numbers, layer_bytes};
    return plan;
  }
  [[nodiscard]] CacheView view_of(const std::vector<uint32_t>& numbers, uint64_t payload) {
    CacheView made{{}, 1, chunks_, payload, 0, layer_bytes};
    for (const uint32_t number : numbers) {
      made.layers.push_back(block(0, number));
    }
    return made;
  }

  [[nodiscard]] SavePlan save_plan() {
    const LoadPlan plan = load_plan();
    return {plan.view, arena, plan.offsets, plan.block_ids, layers, layer_bytes};
  }

  std::shared_ptr<const Mapping> arena;
  std::shared_ptr<const Mapping> words;  // of the index
  std::shared_ptr<const IndexView> index;
  std::unique_ptr<ChunkTable> table;
  std::vector<uint8_t> engine;
  const uint32_t layers;
  const uint64_t layer_bytes;

 private:
  void publish(size_t chunk) {
    std::vector<uint32_t> sums;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      sums.push_back(crc32c(0, extent(chunk, layer), layer_bytes));
    }
    table->set_checksums(slot(chunk), sums.data(), layers);
    table->set_landed(slot(chunk), layers);
    table->set_generation(slot(chunk), chunk + 1);
  }

  const size_t chunks_;
  const uint64_t slot_bytes_;
};

}  // namespace kvpool::testing
