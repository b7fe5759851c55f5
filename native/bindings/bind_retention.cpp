// Bindings of retention: priorities and durations of chunks, as packed columns. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "directory/directory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

std::vector<Retention> unpack_requests(const nb::bytes& keys, const nb::bytes& priorities, const nb::bytes& durations_ms) {
  const size_t n = keys.size() / KEY_BYTES;
  if (priorities.size() != n || durations_ms.size() != n * sizeof(uint32_t)) {
    throw nb::value_error("priorities must be 1 byte and durations 4 bytes for each key");
  }
  std::vector<Retention> requests(n);
  for (size_t index = 0; index < n; ++index) {
    requests[index].priority = static_cast<const uint8_t*>(priorities.data())[index];
    std::memcpy(&requests[index].duration_ms,
                static_cast<const uint8_t*>(durations_ms.data()) + index * sizeof(uint32_t), sizeof(uint32_t));
    if (requests[index].priority > MAX_PRIORITY) {
      throw nb::value_error("priorities must be 0 to 100");
    }
  }
  return requests;
}

nb::bytes retain(Directory& directory, uint32_t owner, const nb::bytes& keys, const nb::bytes& priorities,
                 const nb::bytes& durations_ms, uint64_t now_ns) {
  const uint8_t* first = packed_keys(keys);
  return pack(directory.retention().retain(known_namespace(directory, owner), first, unpack_requests(keys, priorities, durations_ms),
                               now_ns));
}

std::tuple<nb::bytes, nb::bytes> retentions(const Directory& directory, HoldId hold) {
  const auto found = directory.retention().of_hold(hold);
  require_known(found.has_value());
  std::vector<uint8_t> priorities;
  std::vector<uint32_t> durations_ms;
  for (const Retention& each : *found) {
    priorities.push_back(each.priority);
    durations_ms.push_back(each.duration_ms);
  }
  return {pack(priorities), nb::bytes(durations_ms.data(), durations_ms.size() * sizeof(uint32_t))};
}

}  // namespace

void bind_retention(nb::class_<Directory>& directory) {
  directory
      .def(
          "cap_retained",
          [](Directory& self, double share) {
            if (!(share >= 0.0 && share <= 1.0)) {
              throw nb::value_error("share must be 0 to 1");
            }
            self.retention().ledger().cap(share);
          },
          "share"_a, "At most this share of the capacity is retained above the default priority from now on.")
      .def("retain", &retain, "namespace"_a, "keys"_a, "priorities"_a, "durations_ms"_a, "now_ns"_a,
           "Retains chunks, stored or being written, with priorities (u8) for durations (u32, 0: for good) after their last\n"
           "use, here and in lower tiers. Keys from the root on. A column of u8: 0 accepted, 1 clipped to the default,\n"
           "2 absent.")
      .def(
          "retention",
          [](const Directory& self, const nb::bytes& key) -> std::optional<std::tuple<uint8_t, uint32_t>> {
            const auto found = self.retention().of(one_key(key));
            return found ? std::optional(std::tuple(found->priority, found->duration_ms)) : std::nullopt;
          },
          "key"_a, "(priority, duration_ms) of a chunk; None where it is not here.")
      .def("retentions", &retentions, "hold"_a, "(priorities u8, durations_ms u32) of the chunks of a hold.")
      .def(
          "next_expiry_ns", [](Directory& self) { return self.retention().ledger().next_ns(); },
          "When `expire_retention` is to be called next; None: no priority can expire.")
      .def(
          "take_expired",
          [](Directory& self) {
            const auto keys = self.retention().ledger().take_expired();
            return nb::bytes(keys.data(), keys.size() * KEY_BYTES);
          },
          "The keys of which the priority has expired in this lower tier since the last call, packed.")
      .def(
          "expire_retention", [](Directory& self, uint64_t now_ns) { self.retention().expire_due(now_ns); }, "now_ns"_a,
          "Ends the priorities whose duration is over: they fall back to the default, a bounded number in each call.");
}

}  // namespace kvpool
