#include "device/copy_runs.h"

#include <algorithm>

#include "copy/copy_checks.h"

namespace kvpool {
namespace {

// Calls `visit(run, part, bytes)` with the addresses of each run of each block, in the view and in its chunk.
template <typename Visit>
void visit_pieces(const ExtentCopy& copy, Visit visit) {
  const CacheView& view = copy.view;
  const size_t blocks = copy.block_ids.size() / std::max<size_t>(copy.chunks.size(), 1);
  const uint64_t run_bytes = view.plane_block_bytes / view.runs;
  const auto base = reinterpret_cast<uintptr_t>(view.bases[copy.extent]);
  for (size_t chunk = 0; chunk < copy.chunks.size(); ++chunk) {
    const auto ids = copy.block_ids.subspan(chunk * blocks, blocks);
    cuda::Address part = copy.chunks[chunk];
    for (uint32_t plane = 0; plane < view.planes; ++plane) {
      for (const int64_t id : ids) {
        const auto block = base + plane * view.plane_stride + static_cast<uint64_t>(id) * view.block_stride;
        for (uint64_t run = 0; run < view.runs; ++run, part += run_bytes) {
          if (id != SKIP_BLOCK) {
            visit(block + run * view.run_stride, part, run_bytes);
          }
        }
      }
    }
  }
}

}  // namespace

void CopyRuns::clear() noexcept {
  targets_.clear();
  sources_.clear();
  sizes_.clear();
}

void CopyRuns::add(cuda::Address target, cuda::Address source, uint64_t size) {
  if (size == 0) {
    return;
  }
  if (!sizes_.empty() && targets_.back() + sizes_.back() == target && sources_.back() + sizes_.back() == source) {
    sizes_.back() += size;
    return;
  }
  targets_.push_back(target);
  sources_.push_back(source);
  sizes_.push_back(size);
}

const char* extent_fault(const ExtentCopy& copy) noexcept {
  if (const char* fault = view_fault(copy.view)) {
    return fault;
  }
  if (copy.extent >= copy.view.bases.size()) {
    return "the view has no such extent";
  }
  const size_t chunks = copy.chunks.size();
  if (chunks == 0) {
    return copy.block_ids.empty() ? nullptr : "the blocks of a chunk do not make up an extent";
  }
  uint64_t bytes = 0;
  if (copy.block_ids.size() % chunks != 0 || __builtin_mul_overflow(copy.view.planes, copy.view.plane_block_bytes, &bytes) ||
      __builtin_mul_overflow(bytes, copy.block_ids.size() / chunks, &bytes) || bytes != copy.payload_bytes) {
    return "the blocks of a chunk do not make up an extent";
  }
  const auto is_outside = [&](int64_t id) { return id < SKIP_BLOCK || id >= static_cast<int64_t>(copy.view.blocks); };
  return std::any_of(copy.block_ids.begin(), copy.block_ids.end(), is_outside) ? "a block id lies outside the view" : nullptr;
}

void add_scatter(CopyRuns& runs, const ExtentCopy& copy) {
  visit_pieces(copy, [&](cuda::Address block, cuda::Address part, uint64_t size) { runs.add(block, part, size); });
}

void add_gather(CopyRuns& runs, const ExtentCopy& copy) {
  visit_pieces(copy, [&](cuda::Address block, cuda::Address part, uint64_t size) { runs.add(part, block, size); });
}

}  // namespace kvpool
