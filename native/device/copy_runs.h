// Copies in columns: which bytes go where, with neighbours joined; and the columns of one extent of chunks.
//
//   an extent:           [plane][block][plane_block_bytes], as `extent_copy.h` has it
//   a block:             view.bases[extent] + plane * plane_stride + id * block_stride
//
// What it is: arithmetic on addresses, of a device or of the host. What it is not: access to any: a view of a device's memory must not be
// read here. Blocks whose ids follow one another in memory as in the chunk make one run, as do chunks that lie one behind the other.
// Threads: one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy/extent_copy.h"
#include "device/driver_types.h"

namespace kvpool {

class CopyRuns {
 public:
  void clear() noexcept;
  // Joined to the last run where both sides go on. Nothing for no bytes.
  void add(cuda::Address target, cuda::Address source, uint64_t size);

  [[nodiscard]] size_t count() const noexcept { return sizes_.size(); }
  [[nodiscard]] cuda::Address target(size_t run) const noexcept { return targets_[run]; }
  [[nodiscard]] cuda::Address source(size_t run) const noexcept { return sources_[run]; }
  [[nodiscard]] uint64_t size(size_t run) const noexcept { return sizes_[run]; }
  // The driver's batch call takes its columns without `const`, and does not write to them.
  [[nodiscard]] cuda::Address* targets() noexcept { return targets_.data(); }
  [[nodiscard]] cuda::Address* sources() noexcept { return sources_.data(); }
  [[nodiscard]] uint64_t* sizes() noexcept { return sizes_.data(); }

 private:
  std::vector<cuda::Address> targets_;
  std::vector<cuda::Address> sources_;
  std::vector<uint64_t> sizes_;
};
static_assert(sizeof(size_t) == sizeof(uint64_t));

// One extent of some chunks. `chunks`: where that extent of each begins; `block_ids`: as many for each, SKIP_BLOCK: no copy.
struct ExtentCopy {
  const CacheView& view;
  size_t extent;
  std::span<const int64_t> block_ids;
  std::span<const uint64_t> chunks;
  uint64_t payload_bytes;
};

// What is wrong with it, or nullptr.
[[nodiscard]] const char* extent_fault(const ExtentCopy& copy) noexcept;

// Adds what copies chunks into blocks, and blocks into chunks. REQUIRES: extent_fault(copy) == nullptr.
void add_scatter(CopyRuns& runs, const ExtentCopy& copy);
void add_gather(CopyRuns& runs, const ExtentCopy& copy);

}  // namespace kvpool
