// Bindings of leases. Columns and frames cross packed. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "leases/lease_desk.h"
#include "leases/lease_frames.h"
#include "saves/save_frames.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

uint64_t steady_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

std::span<const uint8_t> bytes_of(const nb::bytes& packed, size_t first = 0) {
  return {static_cast<const uint8_t*>(packed.data()) + first, packed.size() - first};
}

nb::typed<nb::dict, int, std::vector<HoldId>> holds_of(const Lease& lease) {
  nb::typed<nb::dict, int, std::vector<HoldId>> holds;
  const size_t of_rank = lease.holds.size() / lease.ranks.size();
  for (size_t index = 0; index < lease.ranks.size(); ++index) {
    const auto first = lease.holds.begin() + static_cast<std::ptrdiff_t>(index * of_rank);
    holds[nb::int_(lease.ranks[index])] = nb::cast(std::vector<HoldId>(first, first + static_cast<std::ptrdiff_t>(of_rank)));
  }
  return holds;
}

std::optional<Lease> copy_of(const Lease* lease) { return lease == nullptr ? std::nullopt : std::optional(*lease); }

ReaderGroup* make_group(bool is_chain, uint64_t chunks_max, const std::vector<uint32_t>& namespaces, std::vector<uint64_t> chunk_bytes) {
  if (namespaces.empty() || namespaces.size() != chunk_bytes.size() || chunks_max == 0) {
    throw nb::value_error("a group must have a namespace and a size of chunks for each rank, and chunks");
  }
  ReaderGroup group{is_chain, chunks_max, {}, std::move(chunk_bytes)};
  for (const uint32_t owner : namespaces) {
    group.namespaces.emplace_back(owner);
  }
  return new ReaderGroup(std::move(group));
}

Reader* make_reader(uint32_t connection, uint32_t holder, uint64_t least_ttl_ns, const std::vector<uint32_t>& ranks, bool is_scheduler,
                    bool has_groups, const std::vector<ReaderGroup>& groups) {
  const auto fits = [&](const ReaderGroup& group) { return group.namespaces.size() == ranks.size(); };
  if (ranks.empty() || groups.empty() || !std::all_of(groups.begin(), groups.end(), fits)) {
    throw nb::value_error("a reader must have ranks, and groups with a namespace for each of them");
  }
  return new Reader{connection, HolderId(holder), least_ttl_ns, ranks, is_scheduler, has_groups, groups};
}

uint64_t grant(LeaseTable& self, uint32_t owner, uint64_t chunks, uint64_t rows, const std::vector<uint32_t>& ranks,
               const std::vector<HoldId>& holds, uint64_t least_ttl_ns, uint64_t now_ns, std::optional<uint32_t> set_group) {
  if (chunks == 0 || ranks.empty() || holds.empty() || holds.size() % ranks.size() != 0) {
    throw nb::value_error("a lease must have chunks, ranks, and as many holds for each rank");
  }
  return self.grant({0, owner, chunks, rows, least_ttl_ns, ranks, holds, set_group, 0}, now_ns).id;
}

void bind_table(nb::module_& module) {
  nb::class_<Lease>(module, "Lease", "A right to read leading chunks of a hit. A copy: it does not follow the lease.")
      .def_ro("id", &Lease::id)
      .def_ro("owner", &Lease::owner, "The connection that it belongs to.")
      .def_ro("chunks", &Lease::chunks, "Of the hit.")
      .def_ro("rows", &Lease::rows, "Chunks of the holds of one rank together.")
      .def_ro("set_group", &Lease::set_group, "Whose chunks it has, each alone, where it is of a set.")
      .def_prop_ro("held", &Lease::held, "Chunks of all its holds together.")
      .def_prop_ro("holds", &holds_of, "By rank, in the order of the rows.");
  nb::class_<LeaseTable>(module, "LeaseTable", "Leases by number, owner and deadline. Control thread only.")
      .def(nb::init<uint64_t>(), "ttl_ns"_a)
      .def("change_ttl", &LeaseTable::change_ttl, "ttl_ns"_a)
      .def("grant", &grant, "owner"_a, "chunks"_a, "rows"_a, "ranks"_a, "holds"_a, "least_ttl_ns"_a, "now_ns"_a,
           "set_group"_a.none() = nb::none(), "The number of a new lease. `holds`: those of one rank after those of another. `set_group`: see `Lease`.")
      .def(
          "find", [](const LeaseTable& self, uint64_t id, uint32_t owner) { return copy_of(self.find(id, owner)); }, "lease"_a, "owner"_a)
      .def("renew", &LeaseTable::renew, "lease"_a, "owner"_a, "now_ns"_a, "Counts it as used now; False where it has ended or is another's.")
      .def("end_lease", &LeaseTable::end_lease, "lease"_a, "owner"_a, "Its holds, which the caller releases.")
      .def("end_owner", &LeaseTable::end_owner, "owner"_a, "Has `expire` end all of its leases.")
      .def(
          "expire",
          [](LeaseTable& self, uint64_t now_ns, int64_t left, uint64_t lease_cost) {
            std::vector<HoldId> holds = self.expire(now_ns, left, lease_cost);
            return std::pair(std::move(holds), left);
          },
          "now_ns"_a, "left"_a, "lease_cost"_a,
          "Ends leases that expired or lost their owner while `left` chunks are positive: their holds, and what is left.")
      .def("count_of", &LeaseTable::count_of, "owner"_a)
      .def("chunks_of", &LeaseTable::chunks_of, "owner"_a, "Chunks of its leases, and what `count_chunks` added.")
      .def("count_chunks", &LeaseTable::count_chunks, "owner"_a, "chunks"_a)
      .def_prop_ro("expired", &LeaseTable::expired)
      .def_prop_ro("all_chunks", &LeaseTable::all_chunks)
      .def("owners", &LeaseTable::owners, "Those that have leases, and how many.")
      .def(
          "all",
          [](const LeaseTable& self) {
            std::vector<Lease> leases;
            for (const Lease* const lease : self.all()) {
              leases.push_back(*lease);
            }
            return leases;
          },
          "The oldest first.")
      .def("verify", &LeaseTable::verify)
      .def("__len__", &LeaseTable::size);
  nb::class_<EndingHolds>(module, "EndingHolds", "Holds that are released a bounded number of chunks at once. Control thread only.")
      .def(nb::init<Directory&, size_t, size_t>(), "directory"_a, "at_once"_a, "hold_cost"_a, nb::keep_alive<1, 2>())
      .def("release_holds", &EndingHolds::release_holds, "holds"_a, "now_ns"_a, "Releases these after those that wait; whether some are left.")
      .def("__len__", &EndingHolds::size);
}

HoldColumns rows_by_key(const LeaseDesk& self, const Reader& reader, const Lease* lease, const std::vector<uint32_t>& places, size_t named) {
  const auto is_place = [named](uint32_t place) { return place < named; };
  if (!std::all_of(places.begin(), places.end(), is_place) || places.size() != (lease == nullptr ? 0 : lease->rows)) {
    throw nb::value_error("places must be one of a key for each row of the lease");
  }
  return packed_columns(self.rows_by_key(reader, lease, places, named));
}

void bind_desk(nb::module_& module) {
  nb::class_<ReaderGroup>(module, "ReaderGroup", "A group's chunks as a session reads them: whether they are chains, how many a hit needs at most.")
      .def(nb::new_(&make_group), "is_chain"_a, "chunks_max"_a, "namespaces"_a, "chunk_bytes"_a, "Namespace and bytes of a chunk on each rank.");
  nb::class_<Reader>(module, "Reader", "A session as the lease desk knows it: whose leases they are, and where its chunks are.")
      .def(nb::new_(&make_reader), "connection"_a, "holder"_a, "least_ttl_ns"_a, "ranks"_a, "is_scheduler"_a, "has_groups"_a, "groups"_a,
           "`groups`: one, where the layout has none.");
  nb::class_<HeldHit>(module, "HeldHit", "Holds on all that a hit needs.")
      .def_ro("chunks", &HeldHit::chunks)
      .def_ro("rows", &HeldHit::rows, "Chunks of the holds of one rank together.")
      .def_ro("holds", &HeldHit::holds, "Those of one rank after those of another.");
  nb::class_<LeaseDesk>(module, "LeaseDesk", "Leases of hits that are in DRAM as a whole. Control thread only.")
      .def("__init__", [](LeaseDesk* self, Directory& directory, LeaseTable& leases, EndingHolds& ending, ReuseDistances* reuse, uint64_t leases_max,
                       uint64_t held_max, uint64_t rows_max, uint64_t named_max, bool is_alone) {
             new (self) LeaseDesk(directory, leases, ending, reuse, {leases_max, held_max, rows_max, named_max, is_alone});
           },
           "directory"_a, "leases"_a, "ending"_a, "reuse"_a.none(), "leases_max"_a, "held_max"_a, "rows_max"_a, "named_max"_a, "is_alone"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "hold_hit",
          [](LeaseDesk& self, const Reader& reader, const nb::bytes& keys, uint64_t chunks, uint32_t holder, uint64_t now_ns) {
            return self.hold_hit(reader, bytes_of(keys), chunks, HolderId(holder), now_ns);
          },
          "reader"_a, "keys"_a, "chunks"_a, "holder"_a, "now_ns"_a,
          "None where it is not all in DRAM, or not allowed.")
      .def(
          "lease_hit",
          [](LeaseDesk& self, const Reader& reader, const nb::bytes& keys, uint64_t chunks, uint64_t now_ns) {
            return copy_of(self.lease_hit(reader, bytes_of(keys), chunks, now_ns));
          },
          "reader"_a, "keys"_a, "chunks"_a, "now_ns"_a, "The same, as a lease.")
      .def(
          "columns_of",
          [](const LeaseDesk& self, const Reader& reader, const Lease& lease) {
            return packed_columns(self.columns_of(reader, lease));
          },
          "reader"_a, "lease"_a, "Where the chunks of a lease that lives lie; a scheduler's has levels alone.")
      .def("rows_by_key", &rows_by_key, "reader"_a, "lease"_a.none(), "places"_a, "named"_a,
           "The same with a row for each of so many keys: `places` are those of the lease's rows. None: a lease of nothing.")
      .def(
          "release_leases",
          [](LeaseDesk& self, const Reader& reader, const std::vector<uint64_t>& leases, uint64_t now_ns) {
            return self.release_leases(reader, leases, now_ns);
          },
          "reader"_a, "leases"_a, "now_ns"_a, "Ends leases of a reader; whether some of their holds are left.");
}

// What came of frames that were served.
struct ServedFrames {
  size_t consumed;
  nb::bytes answers;
  bool has_backlog;
  std::vector<SaveNote> saves;
};

// What has arrived, from a byte on: of the buffer itself, which nobody changes meanwhile.
std::span<const uint8_t> arrived_from(const nb::object& arrived, size_t first) {
  const bool is_array = PyByteArray_Check(arrived.ptr()) != 0;
  if (!is_array && !nb::isinstance<nb::bytes>(arrived)) {
    throw nb::type_error("arrived must be bytes or a bytearray");
  }
  const auto size = static_cast<size_t>(is_array ? PyByteArray_Size(arrived.ptr()) : PyBytes_Size(arrived.ptr()));
  const char* const begin = is_array ? PyByteArray_AsString(arrived.ptr()) : PyBytes_AsString(arrived.ptr());
  if (first > size) {
    throw nb::value_error("first must be within the bytes");
  }
  return {reinterpret_cast<const uint8_t*>(begin) + first, size - first};
}

std::optional<ServedFrames> serve(LeaseFrames& self, const Reader& reader, const SaveWriter* writer, const nb::object& arrived, size_t first,
                                  uint64_t now_ns, uint64_t left_ns) {
  LeaseFrames::Served served = self.serve(reader, writer, arrived_from(arrived, first), now_ns, left_ns);
  if (served.consumed == 0) {
    return std::nullopt;
  }
  return ServedFrames{served.consumed, nb::bytes(served.answers.data(), served.answers.size()), served.has_backlog,
                      std::move(served.saves)};
}

LeaseKinds kinds_of(const std::vector<uint32_t>& kinds) {
  if (kinds.size() != 5) {
    throw nb::value_error("kinds must be those of Acquire, Leased, DropLeases, Renew and Done");
  }
  return {kinds[0], kinds[1], kinds[2], kinds[3], kinds[4]};
}

void bind_frames(nb::module_& module) {
  nb::class_<VerbTimes>(module, "VerbTimes", "How long requests of each kind took, by bucket. Control thread only.")
      .def(nb::init<const std::vector<uint32_t>&, std::vector<uint64_t>>(), "kinds"_a, "bounds_ns"_a)
      .def("add_time", &VerbTimes::add_time, "kind"_a, "taken_ns"_a, "A request of this kind took so long.")
      .def(
          "row",
          [](const VerbTimes& self, uint32_t kind) {
            const VerbTimes::Row* const row = self.find(kind);
            if (row == nullptr) {
              throw nb::index_error("unknown kind");
            }
            return std::pair(row->counts, row->sum_ns);
          },
          "kind"_a, "Counts by bucket, and the sum of all times.");
  nb::class_<ServedFrames>(module, "ServedFrames", "What came of frames that were served.")
      .def_ro("consumed", &ServedFrames::consumed, "How many of the bytes that arrived they are.")
      .def_ro("answers", &ServedFrames::answers, "Whole frames.")
      .def_ro("has_backlog", &ServedFrames::has_backlog, "Holds are left to be released.")
      .def_ro("saves", &ServedFrames::saves, "What was answered about saves.");
  nb::class_<LeaseFrames>(module, "LeaseFrames", "Serves frames about leases as they arrive. Control thread only.")
      .def("__init__", [](LeaseFrames* self, LeaseDesk& desk, VerbTimes& times, SaveFrames& saves, const std::vector<uint32_t>& kinds,
                       size_t frame_bytes_max, size_t numbers_max, size_t answer_bytes_max) {
             new (self) LeaseFrames(desk, times, saves, kinds_of(kinds), {frame_bytes_max, numbers_max, answer_bytes_max}, &steady_ns);
           },
           "desk"_a, "times"_a, "saves"_a, "kinds"_a, "frame_bytes_max"_a, "numbers_max"_a, "answer_bytes_max"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           "`kinds`: of Acquire, Leased, DropLeases, Renew and Done.")
      .def("serve", &serve, "reader"_a, "writer"_a.none(), "arrived"_a, "first"_a, "now_ns"_a, "left_ns"_a,
           nb::sig("def serve(self, reader: Reader, writer: SaveWriter | None, arrived: bytes | bytearray, first: int, now_ns: int,"
                   " left_ns: int) -> ServedFrames | None"),
           "Serves the leading frames that are about leases and plain saves, for so long. None where the first frame is not for here.");
}

}  // namespace

void bind_leases(nb::module_& module) {
  bind_table(module);
  bind_desk(module);
  bind_frames(module);
}

}  // namespace kvpool
