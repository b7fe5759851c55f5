// Binding of the published blocks. Keys and tokens cross packed; names come as numbers. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "records/published_blocks.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

void require_medium(uint32_t medium) {
  if (medium >= MEDIA_MAX) {
    throw nb::value_error("medium must be 0 to 7");
  }
}

std::vector<uint64_t> add(PublishedBlocks& self, const nb::bytes& keys, const nb::bytes& before, const nb::bytes& tokens, uint32_t blocks,
                          uint32_t medium) {
  const uint8_t* const packed = packed_keys(keys);
  const size_t n = keys.size() / KEY_BYTES;
  require_medium(medium);
  if (before.size() != KEY_BYTES) {
    throw nb::value_error("before must be 32 bytes");
  }
  if (n == 0 || blocks == 0 || blocks > TOKEN_IDS_MAX || tokens.size() == 0 || tokens.size() % (n * blocks * sizeof(int32_t)) != 0) {
    throw nb::value_error("tokens must be 4 bytes each, as many for each block of each key");
  }
  const std::vector<int32_t> ids = unpacked<int32_t>(tokens);
  const ReleasedGil released;
  return self.add(packed, n, static_cast<const uint8_t*>(before.data()), ids, blocks, medium);
}

std::vector<uint64_t> remove(PublishedBlocks& self, const nb::bytes& keys, uint32_t medium) {
  const uint8_t* const packed = packed_keys(keys);
  require_medium(medium);
  const ReleasedGil released;
  return self.remove(packed, keys.size() / KEY_BYTES, medium);
}

}  // namespace

void bind_blocks(nb::module_& module) {
  nb::class_<PublishedBlocks>(module, "PublishedBlocks",
                              "Blocks that are published to routers, named by all before them. One thread at a time; GIL released.")
      .def(nb::init<>())
      .def("add", &add, "keys"_a, "before"_a, "tokens"_a, "blocks"_a, "medium"_a,
           "A medium has a chain's chunks. The names of their blocks, in order. `before`: 32 bytes, the parent's key or a scope's hash.")
      .def("remove", &remove, "keys"_a, "medium"_a, "A medium has them no more. The names that no chunk there has any more.")
      .def("clear", &PublishedBlocks::clear)
      .def_prop_ro("chunks", &PublishedBlocks::chunks)
      .def_prop_ro("names", &PublishedBlocks::names, "Names counted, each once for a medium, without those of whole chunks.")
      .def("verify", &PublishedBlocks::verify, "One line per broken invariant.");
}

}  // namespace kvpool
