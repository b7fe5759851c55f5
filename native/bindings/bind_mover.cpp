// Bindings of the mover between the arena and a device. Checks every extent before anything runs; rows cross packed, once per job.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "lines.h"
#include "mover/device_mover.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

std::shared_ptr<DeviceMover> make_mover(const std::shared_ptr<Device>& device, const std::shared_ptr<DeviceMemory>& memory,
                                        const std::shared_ptr<Mapping>& arena, const std::shared_ptr<IndexView>& index,
                                        uint64_t ring_bytes, double answer_s) {
  if (!memory->is_writable() || memory->device() != device) {
    throw nb::value_error("the memory must be one that this device has allocated");
  }
  if (ring_bytes < PieceRing::BYTES_MIN) {
    throw nb::value_error("ring_bytes must be 32 KiB at least");
  }
  static_cast<void>(milliseconds_of(answer_s, "answer_s"));
  DeviceMoverResult made;
  {
    const ReleasedGil released;
    made = DeviceMover::make({device, memory, arena, index}, ring_bytes, answer_s);
  }
  if (!made.status.ok()) {
    throw std::runtime_error(device->text(made.status));
  }
  return std::move(made.mover);
}

uint64_t add(DeviceMover& mover, MoveKind kind, const nb::bytes& packed) {
  if (packed.size() % sizeof(DeviceMoveRow) != 0) {
    throw nb::value_error("rows must be 48 bytes each");
  }
  const auto rows = unpacked<DeviceMoveRow>(packed);
  if (const char* fault = mover.fault(kind, rows)) {
    throw nb::value_error(fault);
  }
  return mover.add(kind, rows);
}

uint64_t promote(DeviceMover& mover, const nb::bytes& rows) { return add(mover, MoveKind::PROMOTE, rows); }

uint64_t check(DeviceMover& mover, const nb::bytes& rows) { return add(mover, MoveKind::CHECK, rows); }

// So that `for job, chunk, outcome in mover.take_outcomes()` takes them apart.
nb::typed<nb::iterator, int> fields_of(const MoveEnd& end) {
  const nb::tuple fields = nb::make_tuple(end.job, end.chunk, static_cast<uint8_t>(end.outcome));
  return nb::typed<nb::iterator, int>(nb::iter(fields));
}

Fields stats_of_mover(const DeviceMover& mover) {
  const DeviceMoverStats found = mover.stats();
  Fields result;
  result["promoted_bytes"] = found.promoted_bytes;
  result["checked_bytes"] = found.checked_bytes;
  result["cpu_seconds"] = found.cpu_seconds;
  result["ring_waits"] = found.ring_waits;
  result["promotions"] = found.promotions;
  result["checks"] = found.checks;
  result["is_unresponsive"] = found.is_unresponsive;
  return result;
}

}  // namespace

void bind_mover(nb::module_& module) {
  module.attr("DEVICE_RING_BYTES_MIN") = PieceRing::BYTES_MIN;
  nb::class_<MoveEnd>(module, "MoveEnd", "The end of one chunk of a job: job, chunk, outcome.")
      .def_ro("job", &MoveEnd::job)
      .def_ro("chunk", &MoveEnd::chunk, "Its row in the job.")
      .def_prop_ro("outcome", [](const MoveEnd& end) { return static_cast<uint8_t>(end.outcome); }, "A `kvpool.tiers.base.Outcome`.")
      .def("__iter__", &fields_of);
  nb::class_<DeviceMover> mover(module, "DeviceMover",
                                "Threads that copy chunks of the arena to a device, and check what is there. Where the device does not\n"
                                "answer until the end of `stop`, its threads and memory are left behind.");
  mover.def(nb::new_(&make_mover), "device"_a, "memory"_a, "arena"_a, "index"_a, "ring_bytes"_a, "answer_s"_a = DEVICE_ANSWER_S,
           "`ring_bytes`: of pinned memory, for each direction. `answer_s`: after so long without an answer the device counts as\n"
           "unresponsive, and everything fails until it answers. RuntimeError for a call that failed. GIL released.")
      .def("promote", &promote, "rows"_a,
           "A job's number, 0 where the line is full or the mover stopped. `rows` in the format of `DEVICE_MOVE_ROW`, the slot and\n"
           "generation being the arena's. BAD_SOURCE: other bytes than the slot's checksums, or another generation.")
      .def("check", &check, "rows"_a,
           "The same for copies on the device: `arena_slot` and generation are those of its own slot in the index; arena offsets are\n"
           "not used.")
      .def("stats", &stats_of_mover);
  bind_line(mover);
}

}  // namespace kvpool
