// Bindings of what holders protect from eviction. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "columns.h"
#include "directory/directory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

struct HolderUse {
  uint32_t holder;
  uint64_t reserved_bytes;
  uint64_t zombie_bytes;
  uint64_t leased_bytes;
};

struct NamespaceUse {
  uint32_t owner;
  uint64_t writing;
  uint64_t zombies;
  uint64_t held;
};

std::vector<HolderUse> holders(Directory& directory) {
  std::vector<HolderUse> rows;
  for (const auto& [number, account] : directory.shares().accounts().all()) {
    const HolderBytes& bytes = account.bytes;
    rows.push_back({number, bytes.reserved, bytes.zombies, bytes.leased - std::min(bytes.leased, account.twice)});
  }
  return rows;
}

// A namespace number of which this directory has nothing: no chunk in any state.
bool is_empty_namespace(const Directory& directory, uint32_t number) {
  const NamespaceCounts counts = directory.namespace_counts(NamespaceId(number));
  return counts.chunks + counts.held + counts.writing + counts.zombies == 0;
}

std::vector<NamespaceUse> held_namespaces(const Directory& directory) {
  std::vector<NamespaceUse> rows;
  for (uint32_t number = 0; number < directory.namespaces(); ++number) {
    const NamespaceCounts counts = directory.namespace_counts(NamespaceId(number));
    if (counts.held + counts.writing + counts.zombies > 0) {
      rows.push_back({number, counts.writing, counts.zombies, counts.held});
    }
  }
  return rows;
}

void bind_uses(nb::module_& module) {
  nb::class_<HolderUse>(module, "HolderUse", "Bytes that one holder protects from eviction.")
      .def_ro("holder", &HolderUse::holder)
      .def_ro("reserved_bytes", &HolderUse::reserved_bytes)
      .def_ro("zombie_bytes", &HolderUse::zombie_bytes, "Of writers whose time is over and who may still write.")
      .def_ro("leased_bytes", &HolderUse::leased_bytes, "At most so many.");
  nb::class_<NamespaceUse>(module, "NamespaceUse", "Chunks of one namespace that cannot go.")
      .def_ro("namespace", &NamespaceUse::owner)
      .def_ro("writing", &NamespaceUse::writing, "Being written.")
      .def_ro("zombies", &NamespaceUse::zombies, "Whose slots are not free yet.")
      .def_ro("held", &NamespaceUse::held);
}

}  // namespace

void bind_shares(nb::module_& module, nb::class_<Directory>& directory) {
  bind_uses(module);
  directory
      .def(
          "share_among_holders",
          [](Directory& self, double share, double user_share) {
            if (!(share >= 0.0 && share <= 1.0 && user_share >= 0.0 && user_share <= 1.0)) {
              throw nb::value_error("shares must be 0 to 1");
            }
            self.shares().limit(share, user_share);
          },
          "share"_a, "user_share"_a = 1.0,
          "A holder protects at most this share of what the others leave of the capacity from eviction, and a user with all of\n"
          "its holders at most the other share.")
      .def(
          "limit_user",
          [](Directory& self, uint32_t user, double share) {
            if (!(share >= 0.0 && share <= 1.0)) {
              throw nb::value_error("share must be 0 to 1");
            }
            self.shares().limit_user(user, share);
          },
          "user"_a, "share"_a, "This user with all its holders protects at most this share instead, and each of them its share of that.")
      .def(
          "join_user", [](Directory& self, uint32_t holder, uint32_t user) { self.shares().accounts().join(HolderId(holder), user); },
          "holder"_a, "user"_a, "What the holder protects counts for the user too, from now on.")
      .def(
          "leave_user", [](Directory& self, uint32_t holder) { self.shares().accounts().leave(HolderId(holder)); }, "holder"_a,
          "The holder has ended: what it protects counts until it is given back.")
      .def(
          "affordable",
          [](Directory& self, uint32_t holder, const std::vector<HoldId>& holds, const std::vector<uint32_t>& of,
             size_t wanted) {
            const auto is_known = [&self](uint32_t each) { return each < self.arena().class_count(); };
            if (holds.size() != of.size() || !std::all_of(of.begin(), of.end(), is_known)) {
              throw nb::value_error("a size class for each of the holds is wanted");
            }
            return self.shares().affordable(HolderId(holder), holds, std::vector<ClassId>(of.begin(), of.end()), wanted);
          },
          "holder"_a, "holds"_a, "of"_a, "wanted"_a,
          "How many leading chunks of `wanted`, of each chain, the holder may protect. `holds`: what of each chain is here, 0 for\n"
          "nothing; `of`: the size class of its chunks. What it protects already costs nothing.")
      .def(
          "charge",
          [](Directory& self, const std::vector<HoldId>& holds, uint32_t holder) {
            return self.shares().charge(holds, HolderId(holder));
          },
          "holds"_a, "holder"_a, "Counts holds for a holder until they end; False where one is unknown or counts already.")
      .def("holders", &holders, "What each holder protects from eviction.")
      .def("is_empty_namespace", &is_empty_namespace, "namespace"_a, "Whether no chunk of it is here in any state.")
      .def("held_namespaces", &held_namespaces, "Those of which there are chunks that cannot go.");
}

}  // namespace kvpool
