// Bindings of flushes in parts. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>

#include "bindings.h"
#include "columns.h"
#include "directory/flush_walk.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {

void bind_flush(nb::module_& module) {
  nb::class_<FlushResult>(module, "FlushResult", "What a flush has dropped.")
      .def_ro("chunks", &FlushResult::chunks)
      .def_ro("bytes", &FlushResult::bytes)
      .def_ro("skipped", &FlushResult::skipped, "Chunks that stay, since somebody holds them.");
  nb::class_<FlushWalk>(module, "FlushWalk", "A flush in parts of what nobody holds. Control thread only.")
      .def(
          "__init__",
          [](FlushWalk* self, Directory& directory, const std::optional<std::vector<uint32_t>>& owners, uint64_t before_ns) {
            std::optional<std::vector<NamespaceId>> chosen;
            if (owners) {
              chosen.emplace();
              std::transform(owners->begin(), owners->end(), std::back_inserter(*chosen),
                             [&](uint32_t owner) { return known_namespace(directory, owner); });
            }
            new (self) FlushWalk(directory, chosen, before_ns);
          },
          nb::keep_alive<1, 2>(), "directory"_a, "namespaces"_a.none(), "before_ns"_a)
      .def(
          "advance",
          [](FlushWalk& self, size_t limit) {
            if (limit == 0) {
              throw nb::value_error("limit must not be 0");
            }
            return self.advance(limit);
          },
          "limit"_a, "Removes so many chunks at most. False at the end.")
      .def_prop_ro("generation", &FlushWalk::generation, "The latest one when the walk began.")
      .def("result", [](const FlushWalk& self) -> FlushResult { return self.result(); }, "So far; `skipped` at the end.");
}

}  // namespace kvpool
