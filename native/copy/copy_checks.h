// What has to hold of a copy before it runs: every extent in the arena and the index, every block in the view.
//
// What it is: the one place that judges numbers which came from Python or over the wire before memory is touched with
// them. What it is not: a judge of where an engine's memory lies; a view is its owner's word.
// Invariant: where a function answers nothing, the REQUIRES of the job that is made of the plan hold, in exact
// arithmetic. Pure; any thread.
#pragma once

#include <cstdint>

#include "copy/load_job.h"
#include "base/memory.h"
#include "copy/save_job.h"

namespace kvpool {

// Each answers what is wrong, or nullptr.
[[nodiscard]] const char* view_fault(const CacheView& view) noexcept;
[[nodiscard]] const char* extents_fault(const Mapping& arena, const std::vector<uint64_t>& offsets, uint32_t extents,
                                        uint64_t extent_bytes) noexcept;
// The same of the extents of a map, for `extents` payloads of `payload_bytes` each: they rise, and a payload fits each.
[[nodiscard]] const char* extents_fault(const Mapping& arena, const std::vector<uint64_t>& offsets, const ExtentMap& map,
                                        uint32_t extents, uint64_t payload_bytes) noexcept;
[[nodiscard]] const char* load_fault(const LoadPlan& plan) noexcept;
[[nodiscard]] const char* save_fault(const SavePlan& plan) noexcept;

}  // namespace kvpool
