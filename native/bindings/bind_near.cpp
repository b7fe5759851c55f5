// Bindings of pulls from daemons of this host. Checks every extent before anything runs; columns cross packed, once per job.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "columns.h"
#include "extents.h"
#include "near/near_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

// A daemon's memory as another daemon has mapped it.
struct NearMemory {
  std::shared_ptr<const Mapping> arena;
  std::shared_ptr<const IndexView> index;
};

std::shared_ptr<NearMemory> make_memory(std::shared_ptr<Mapping> arena, std::shared_ptr<Mapping> index) {
  if (arena->is_writable() || index->is_writable()) {
    throw nb::value_error("another daemon's memory must be mapped read-only");
  }
  auto view = IndexView::attach(std::move(index));
  if (view == nullptr) {
    throw nb::value_error("index is no index of this version");
  }
  return std::make_shared<NearMemory>(NearMemory{std::move(arena), std::move(view)});
}

uint64_t pull_near(NearQueue& queue, const NearMemory& source, const nb::bytes& source_offsets, const nb::bytes& source_slots,
                   const nb::bytes& generations, const IndexView& index, const nb::bytes& offsets, const nb::bytes& slots,
                   uint32_t extents, uint64_t extent_bytes, const nb::bytes& checks, uint32_t parts, double timeout_s) {
  const auto from = checked_rows(*source.arena, *source.index, source_offsets, source_slots, extents, extent_bytes, parts);
  auto into = checked_rows(queue.arena(), index, offsets, slots, extents, extent_bytes, parts);
  const auto numbers = column(generations, from.size(), "generations");
  if (into.size() != from.size()) {
    throw nb::value_error("there must be as many chunks here as at their owner");
  }
  if (checks.size() != from.size() * extents * sizeof(uint32_t)) {
    throw nb::value_error("checks must be 4 bytes for each extent of each chunk");
  }
  NearPlan plan;
  plan.source = source.arena;
  plan.source_index = source.index;
  for (size_t row = 0; row < from.size(); ++row) {
    if (numbers[row] == 0) {
      throw nb::value_error("a chunk has no generation");
    }
    plan.sources.push_back({from[row].arena_offset, from[row].slot, numbers[row]});
  }
  plan.rows = std::move(into);
  plan.checks = unpacked<uint32_t>(checks);
  plan.extents = extents;
  plan.extent_bytes = extent_bytes;
  plan.parts = parts;
  plan.deadline = StreamClock::now() + milliseconds_of(timeout_s, "timeout_s");
  return queue.pull(std::move(plan));
}

Counts stats_of_near(const NearQueue& queue) {
  const NearQueueStats counts = queue.stats();
  Counts result;
  result["jobs"] = counts.jobs;
  result["copied_bytes"] = counts.copied_bytes;
  return result;
}

}  // namespace

void bind_near(nb::module_& module) {
  nb::class_<NearMemory>(module, "NearMemory", "Arena and index of another daemon of this host, mapped read-only.")
      .def(nb::new_(&make_memory), "arena"_a, "index"_a, "Refuses what is mapped writable, and an index of another version.")
      .def_prop_ro("size", [](const NearMemory& self) { return self.arena->size(); }, "Of the arena, in bytes.")
      .def_prop_ro("epoch", [](const NearMemory& self) {
        const std::string epoch = self.index->epoch();
        return nb::bytes(epoch.data(), epoch.size());
      });
  nb::class_<NearQueue> queue(module, "NearQueue", "Threads that copy chunks of other daemons of this host into the arena.");
  queue.def(nb::new_(&make_queue<NearQueue>), "arena"_a, "index"_a, "threads"_a, "jobs_max"_a, nb::call_guard<ReleasedGil>())
      .def("pull", &pull_near, "source"_a, "source_offsets"_a, "source_slots"_a, "generations"_a, "index"_a, "offsets"_a, "slots"_a,
           nb::kw_only(), "extents"_a, "extent_bytes"_a, "checks"_a, "parts"_a, "timeout_s"_a,
           "A job's number, 0 where the queue is full or stopped. Columns of u64: where each chunk is in the owner's memory and under\n"
           "which generation, and where it goes: a slot in which no extent may have landed. `checks`: CRC-32C u32 [chunk][extent] as the\n"
           "owner promised them. ValueError for what lies outside either memory. Extents are announced on the index as they land.")
      .def("cancel", [](NearQueue& self, uint64_t job) { return self.cancel(job); }, "job"_a,
           "Ends a job's remaining chunks, reported like any end; False where it has ended.")
      .def("stats", &stats_of_near);
  bind_line(queue);
}

}  // namespace kvpool
