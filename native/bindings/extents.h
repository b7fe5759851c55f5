// What the bindings of pulls share: extents that are checked before anything runs, and how a queue is made.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "lines.h"
#include "net/slot_landing.h"
#include "net/stream_format.h"
#include "shared_index/chunk_table.h"
#include "shared_index/landing_board.h"

namespace kvpool {

[[nodiscard]] inline std::vector<uint64_t> column(const nanobind::bytes& packed, size_t count, const char* name) {
  if (packed.size() != count * sizeof(uint64_t)) {
    throw nanobind::value_error((std::string(name) + " must be 8 bytes for each chunk, as many as there are offsets").c_str());
  }
  return unpacked<uint64_t>(packed);
}

// Where the chunks of an offer or a job are; throws where one lies outside arena or index.
[[nodiscard]] inline std::vector<PullRow> checked_rows(const Mapping& arena, const IndexView& index, const nanobind::bytes& offsets,
                                                       const nanobind::bytes& slots, uint32_t extents, uint64_t extent_bytes,
                                                       uint32_t connections) {
  const size_t count = offsets.size() / sizeof(uint64_t);
  uint64_t bytes = 0;
  if (extents == 0 || extent_bytes == 0 || __builtin_mul_overflow(extent_bytes, uint64_t{extents}, &bytes)) {
    throw nanobind::value_error("extents and extent_bytes must be positive");
  }
  if (connections == 0 || connections > STREAM_CONNECTIONS_MAX || connections > count) {
    throw nanobind::value_error("connections must be 1 to 16, at most one for each chunk");
  }
  const auto arena_offsets = column(offsets, count, "offsets");
  const auto addresses = column(slots, count, "slots");
  std::vector<PullRow> rows;
  for (size_t row = 0; row < count; ++row) {
    const SlotAddress slot = SlotAddress::unpacked(addresses[row]);
    if (!arena.contains(arena_offsets[row], bytes)) {
      throw nanobind::value_error("a chunk lies outside the arena");
    }
    if (!index.covers(slot, extents)) {
      throw nanobind::value_error("a slot has no words in the index");
    }
    rows.push_back({arena_offsets[row], slot});
  }
  return rows;
}

// A queue of pulls into an arena.
template <typename Queue>
std::shared_ptr<Queue> make_queue(std::shared_ptr<Mapping> arena, std::shared_ptr<Mapping> index, unsigned threads, size_t jobs_max) {
  require_bounds(threads, jobs_max);
  if (IndexView::attach(index) == nullptr || !index->is_writable() || !arena->is_writable()) {
    throw nanobind::value_error("arena and index must be writable, index one of this version");
  }
  auto board = std::make_shared<LandingBoard>(std::move(index));
  return std::make_shared<Queue>(std::move(arena), std::move(board), threads, jobs_max);
}

}  // namespace kvpool
