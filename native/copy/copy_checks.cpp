#include "copy/copy_checks.h"

#include <algorithm>
#include <functional>

namespace kvpool {
namespace {

constexpr uint64_t VIEW_NUMBERS_MAX = uint64_t{1} << 40;
// Of blocks that begin at any byte of a process's memory.
constexpr uint64_t VIEW_BLOCKS_MAX = uint64_t{1} << 48;

const char* blocks_fault(const CacheView& view, const std::vector<int64_t>& ids, size_t chunks, uint32_t extents,
                         uint64_t payload_bytes, bool may_skip, uint32_t first_extent = 0) noexcept {
  if (const char* fault = view_fault(view)) {
    return fault;
  }
  if (may_skip ? view.bases.size() != extents : view.bases.size() < uint64_t{first_extent} + extents) {
    return "the view has another number of extents";
  }
  if (chunks == 0) {
    return ids.empty() ? nullptr : "the blocks of a chunk do not make up an extent";
  }
  uint64_t bytes = 0;
  if (ids.size() % chunks != 0 || __builtin_mul_overflow(view.planes, view.plane_block_bytes, &bytes) ||
      __builtin_mul_overflow(bytes, ids.size() / chunks, &bytes) || bytes != payload_bytes) {
    return "the blocks of a chunk do not make up an extent";
  }
  const int64_t lowest = may_skip ? SKIP_BLOCK : 0;
  const auto is_outside = [&](int64_t id) { return id < lowest || id >= static_cast<int64_t>(view.blocks); };
  return std::any_of(ids.begin(), ids.end(), is_outside) ? "a block id lies outside the view" : nullptr;
}

}  // namespace

const char* view_fault(const CacheView& view) noexcept {
  if (view.planes == 0 || view.plane_block_bytes == 0 || view.blocks > VIEW_BLOCKS_MAX ||
      view.plane_block_bytes > VIEW_NUMBERS_MAX) {
    return "planes and plane_block_bytes must be positive, blocks at most 2^48 and bytes 2^40";
  }
  if (view.runs == 0 || view.plane_block_bytes % view.runs != 0) {
    return "runs must be positive and divide plane_block_bytes";
  }
  return nullptr;
}

const char* extents_fault(const Mapping& arena, const std::vector<uint64_t>& offsets, uint32_t extents,
                          uint64_t extent_bytes) noexcept {
  uint64_t chunk_bytes = 0;
  if (extents == 0 || extent_bytes == 0 || __builtin_mul_overflow(extents, extent_bytes, &chunk_bytes)) {
    return "extents and extent_bytes must be positive and their product fit 64 bits";
  }
  const auto is_outside = [&](uint64_t offset) { return !arena.contains(offset, chunk_bytes); };
  return std::any_of(offsets.begin(), offsets.end(), is_outside) ? "an extent lies outside the arena" : nullptr;
}

const char* extents_fault(const Mapping& arena, const std::vector<uint64_t>& offsets, const ExtentMap& map,
                          uint32_t extents, uint64_t payload_bytes) noexcept {
  if (payload_bytes == 0 || map.bytes_for(payload_bytes) < payload_bytes) {
    return "payload_bytes must be positive, and an extent have as many";
  }
  const std::vector<uint32_t>& numbers = map.numbers;
  if (numbers.empty()) {
    return extents_fault(arena, offsets, extents, map.bytes_for(payload_bytes));
  }
  if (numbers.size() != extents || numbers.back() == UINT32_MAX) {
    return "expected a number below 2^32 - 1 for each extent of the view";
  }
  if (std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) != numbers.end()) {
    return "the numbers of the extents do not rise";
  }
  return extents_fault(arena, offsets, numbers.back() + 1, map.bytes_for(payload_bytes));
}

const char* load_fault(const LoadPlan& plan) noexcept {
  if (const char* fault = extents_fault(*plan.arena, plan.offsets, plan.map, plan.extents, plan.payload_bytes)) {
    return fault;
  }
  const size_t chunks = plan.offsets.size();
  if (const char* fault = blocks_fault(plan.view, plan.block_ids, chunks, plan.extents, plan.payload_bytes, true)) {
    return fault;
  }
  if (plan.generations.size() != chunks || plan.slots.size() != chunks) {
    return "offsets, slots and generations differ in length";
  }
  // Unset: the chunk has been dropped. That a known slot has the extents is not checked here: it may be lent to another size by now.
  const auto is_unknown = [&](SlotAddress slot) { return slot.valid() && plan.index->landing_word(slot) == nullptr; };
  return std::any_of(plan.slots.begin(), plan.slots.end(), is_unknown) ? "a slot has no words in the index" : nullptr;
}

const char* save_fault(const SavePlan& plan) noexcept {
  if (!plan.arena->is_writable()) {
    return "the arena is mapped read-only";
  }
  if (const char* fault = extents_fault(*plan.arena, plan.offsets, plan.map, plan.extents, plan.payload_bytes)) {
    return fault;
  }
  return blocks_fault(plan.view, plan.block_ids, plan.offsets.size(), plan.extents, plan.payload_bytes, false,
                      plan.first_extent);
}

}  // namespace kvpool
