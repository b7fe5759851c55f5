// Binding of the sampled reuse distances. Keys cross packed. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "columns.h"
#include "eviction/reuse_distances.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

ReuseDistances* make_reuse(uint32_t samples, uint64_t horizon_bytes, double rate_max, uint64_t half_life_ns) {
  if (samples < 16 || samples > (1U << 24) || horizon_bytes == 0 || !(rate_max >= 1e-6) || rate_max > 1.0 ||
      half_life_ns < 1000) {
    throw nb::value_error("samples must be 16 to 2^24, horizon_bytes positive, rate_max 1e-6 to 1, half_life_ns 1000 or more");
  }
  return new ReuseDistances(samples, horizon_bytes, rate_max, half_life_ns);
}

void require_bytes(uint64_t chunk_bytes) {
  if (chunk_bytes == 0) {
    throw nb::value_error("chunk_bytes must be positive");
  }
}

void observe(ReuseDistances& self, const nb::bytes& keys, uint64_t chunk_bytes, uint64_t now_ns) {
  const uint8_t* first = packed_keys(keys);
  require_bytes(chunk_bytes);
  const size_t asked = keys.size() / KEY_BYTES;
  std::vector<ChunkKey> sampled;
  for (size_t index = 0; index < asked; ++index) {
    const ChunkKey key = ChunkKey::from_bytes(first + index * KEY_BYTES);
    if (self.is_sampled(key)) {
      sampled.push_back(key);
    }
  }
  self.observe(sampled, asked, chunk_bytes, now_ns);
}

void observe_holds(ReuseDistances& self, const Directory& directory, const std::vector<HoldId>& holds, uint64_t chunk_bytes,
                   uint64_t now_ns) {
  require_bytes(chunk_bytes);
  if (self.rate() > SAMPLED_SHARE) {
    throw nb::value_error("rate_max must be at most SAMPLED_SHARE to observe holds");
  }
  size_t asked = 0;
  const std::vector<ChunkKey> sampled = directory.holds().sampled_keys(holds, asked);
  self.observe(sampled, asked, chunk_bytes, now_ns);
}

}  // namespace

void bind_reuse(nb::module_& module) {
  module.attr("SAMPLED_SHARE") = SAMPLED_SHARE;
  nb::class_<ReuseDistances>(module, "ReuseDistances", "What LRU of any size would hit, from a sample. Control thread only.")
      .def(nb::new_(&make_reuse), "samples"_a, "horizon_bytes"_a, "rate_max"_a, "half_life_ns"_a)
      .def("observe", &observe, "keys"_a, "chunk_bytes"_a, "now_ns"_a, "A request used these chunks, the root first.")
      .def("observe_holds", &observe_holds, "directory"_a, "holds"_a, "chunk_bytes"_a, "now_ns"_a,
           "The same for the chunks of holds.")
      .def("hit_share", &ReuseDistances::hit_share, "capacity"_a)
      .def_prop_ro("rate", &ReuseDistances::rate)
      .def_prop_ro("sampled", &ReuseDistances::sampled)
      .def_prop_ro("referenced_bytes", &ReuseDistances::referenced_bytes)
      .def("verify", &ReuseDistances::verify, "One line per broken invariant.");
}

}  // namespace kvpool
