// Bindings of plain saves. Columns and frames cross packed. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "columns.h"
#include "saves/save_desk.h"
#include "saves/save_frames.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

SaveWriter* make_writer(const Directory& directory, uint32_t connection, const std::vector<WriterGroup>& groups) {
  for (const WriterGroup& group : groups) {
    static_cast<void>(known_namespace(directory, group.owner.value()));
    if (group.size_class.value() >= directory.arena().class_count()) {
      throw nb::index_error("unknown size class");
    }
    if (group.extents != directory.arena().size_class(group.size_class).extents || group.chunk_bytes == 0) {
      throw nb::value_error("a group must have the extents of its size class, and bytes");
    }
  }
  return new SaveWriter{connection, groups};
}

}  // namespace

void bind_saves(nb::module_& module) {
  nb::class_<PlainSave>(module, "PlainSave", "A save of whole chunks of one run. A copy: it does not follow the save.")
      .def_ro("id", &PlainSave::id)
      .def_ro("owner", &PlainSave::owner, "The connection that it belongs to.")
      .def_ro("group", &PlainSave::group)
      .def_ro("holders", &PlainSave::holders, "The directory's reservations of its slots: of a chain one, else one of each chunk.")
      .def_ro("is_chain", &PlainSave::is_chain)
      .def_ro("chunks", &PlainSave::chunks)
      .def_ro("committed", &PlainSave::committed, "How many of them, the first ones, are published.")
      .def_ro("deadline_ns", &PlainSave::deadline_ns);
  nb::class_<PlainSaves>(module, "PlainSaves", "Plain saves by number, owner and deadline. Control thread only.")
      .def(nb::init<uint64_t>(), "ttl_ns"_a)
      .def("change_ttl", &PlainSaves::change_ttl, "ttl_ns"_a)
      .def("new_id", &PlainSaves::new_id, "The number of a new save, of any kind.")
      .def(
          "take", [](PlainSaves& self, uint64_t id, uint32_t owner) { return self.take(id, owner); }, "save"_a, "owner"_a,
          "The save, which is the caller's from now on; None where it is not here, or not the owner's.")
      .def("take_owner", &PlainSaves::take_owner, "owner"_a, "The same of all of an owner's, the oldest first.")
      .def("take_expired", &PlainSaves::take_expired, "now_ns"_a, "The same of all whose time is over.")
      .def("count_others", &PlainSaves::count_others, "owner"_a, "saves"_a, "So many saves of an owner's are elsewhere, more or less.")
      .def("count_of", &PlainSaves::count_of, "owner"_a, "Saves of an owner, here and elsewhere.")
      .def("owners", &PlainSaves::owners, "Those that have saves, here or elsewhere, and how many.")
      .def("holders", &PlainSaves::holders)
      .def("verify", &PlainSaves::verify)
      .def("__len__", &PlainSaves::size);
  nb::class_<WriterGroup>(module, "WriterGroup", "A group's chunks as a session writes them.")
      .def(nb::new_([](bool is_chain, uint32_t owner, uint32_t size_class, uint32_t extents, uint32_t chunk_tokens, uint64_t chunk_bytes) {
             return new WriterGroup{is_chain, NamespaceId(owner), ClassId(size_class), extents, chunk_tokens, chunk_bytes};
           }),
           nb::kw_only(), "is_chain"_a, "namespace"_a, "size_class"_a, "extents"_a, "chunk_tokens"_a, "chunk_bytes"_a);
  nb::class_<SaveWriter>(module, "SaveWriter", "A session of one rank as the save desk knows it.")
      .def(nb::new_(&make_writer), "directory"_a, "connection"_a, "groups"_a,
           "Raises KeyError, IndexError or ValueError for a group that the directory does not know so.");
  nb::class_<SaveDesk>(module, "SaveDesk", "Plain saves, a request in a call. Control thread only.")
      .def("__init__", [](SaveDesk* self, Directory& directory, PlainSaves& saves, ReuseDistances* reuse, uint64_t saves_max, uint64_t chunks_max,
                          bool keeps_tokens) {
             new (self) SaveDesk(directory, saves, reuse, {saves_max, chunks_max}, keeps_tokens);
           },
           "directory"_a, "saves"_a, "reuse"_a.none(), "saves_max"_a, "chunks_max"_a, "keeps_tokens"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<SaveFrames>(module, "SaveFrames", "Serves frames about plain saves, see `LeaseFrames`. Control thread only.")
      .def("__init__", [](SaveFrames* self, SaveDesk& desk, uint32_t reserve, uint32_t reserved, uint32_t commit, uint32_t committed) {
             new (self) SaveFrames(desk, {reserve, reserved, commit, committed});
           },
           "desk"_a, nb::kw_only(), "reserve"_a, "reserved"_a, "commit"_a, "committed"_a, nb::keep_alive<1, 2>(), "The kinds of these records.");
  nb::class_<SaveNote>(module, "SaveNote", "What was answered to one request about a save.")
      .def_ro("is_commit", &SaveNote::is_commit, "Otherwise it was a reservation.")
      .def_ro("group", &SaveNote::group)
      .def_prop_ro("states", [](const SaveNote& self) { return pack(self.states); }, "Of its chunks, u8: a `SaveState`.")
      .def_prop_ro(
          "keys", [](const SaveNote& self) { return pack(self.keys); },
          "Of the chunks of a reservation of which some were declined, packed; else none.");
}

}  // namespace kvpool
