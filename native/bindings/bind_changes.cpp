// Bindings of the change feed and of the list of chunks. Rows cross packed, 80 bytes each. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "records/change_feed.h"
#include "directory/change_runs.h"
#include "directory/directory.h"
#include "hash/packed_ids.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

constexpr size_t ROWS_MAX = 1 << 16;

void require_rows(size_t limit) {
  if (limit == 0 || limit > ROWS_MAX) {
    throw nb::value_error("limit must be 1 to 65536");
  }
}

std::shared_ptr<ChangeFeed> make_feed(uint32_t capacity) {
  if (capacity == 0) {
    throw nb::value_error("capacity must be positive");
  }
  auto feed = ChangeFeed::create(capacity);
  if (feed == nullptr) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return feed;
}

std::tuple<uint32_t, nb::bytes> list(const Directory& directory, uint32_t cursor, size_t limit) {
  require_rows(limit);
  std::vector<Change> rows;
  const uint32_t next = directory.reports().list(cursor, limit, rows);
  return {next, pack(rows)};
}

nb::bytes raw_bytes(std::span<const int32_t> ids) { return nb::bytes(ids.data(), ids.size_bytes()); }

// Bytes that `fill` writes, uncopied.
template <typename Fill>
nb::bytes filled_bytes(size_t size, Fill fill) {
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (made == nullptr) {
    throw nb::python_error();
  }
  fill(PyBytes_AsString(made));
  return nb::steal<nb::bytes>(made);
}

std::tuple<bool, nb::bytes> take(ChangeFeed& feed, size_t limit) {
  require_rows(limit);
  const size_t taken = std::min(limit, feed.waiting());
  bool has_gap = false;
  const auto rows = filled_bytes(taken * sizeof(Change), [&](char* out) {
    static_cast<void>(feed.take(reinterpret_cast<Change*>(out), taken, has_gap));
  });
  return {has_gap, rows};
}

// A run as one event reports it.
struct ReportedRun {
  uint8_t kind;
  uint8_t change_kind;
  uint32_t owner;
  uint8_t level;
  nb::bytes keys;
  nb::bytes parent;
  nb::bytes tokens;
  uint8_t tiers;
  uint8_t tiers_before;
  uint8_t priority;
  uint8_t priority_before;
  uint8_t cause;
  nb::bytes scope;
};

ReportedRun reported(const ChangeRun& run, std::span<const Change> rows, std::span<const ScopedIds> ids) {
  const Change& first = rows[run.first];
  const auto keys = filled_bytes((run.end - run.first) * KEY_BYTES, [&](char* out) {
    for (size_t index = run.first; index < run.end; ++index) {
      out = std::copy_n(reinterpret_cast<const char*>(&rows[index].key), KEY_BYTES, out);
    }
  });
  const size_t tokens_bytes = ids[run.first].tokens.size_bytes();
  const auto tokens = filled_bytes((run.end - run.first) * tokens_bytes, [&](char* out) {
    for (size_t index = run.first; index < run.end; ++index) {
      out = std::copy_n(reinterpret_cast<const char*>(ids[index].tokens.data()), tokens_bytes, out);
    }
  });
  const bool has_parent = run.kind != RunKind::REMOVED && first.parent != ChunkKey{};
  return {static_cast<uint8_t>(run.kind),
          static_cast<uint8_t>(first.kind),
          first.owner,
          first.level,
          keys,
          nb::bytes(&first.parent, has_parent ? KEY_BYTES : 0),
          tokens,
          first.tiers,
          run.tiers_before,
          first.priority,
          first.priority_before,
          static_cast<uint8_t>(first.cause),
          raw_bytes(ids[run.first].scope)};
}

std::vector<ReportedRun> runs_of(const Directory& memory, const nb::bytes& packed_rows, size_t payload_max) {
  if (packed_rows.size() % sizeof(Change) != 0) {
    throw nb::value_error("rows must be a multiple of 80 bytes");
  }
  const std::span<const Change> rows = words_in<Change>(packed_rows);
  for (const Change& row : rows) {
    if (row.owner >= memory.namespaces()) {
      throw nb::key_error("a row names a namespace that is not known");
    }
  }
  const ChangeRuns found = cut_runs(rows, memory, payload_max);
  std::vector<ReportedRun> runs;
  runs.reserve(found.runs.size());
  for (const ChangeRun& run : found.runs) {
    runs.push_back(reported(run, rows, found.ids));
  }
  return runs;
}

nb::bytes packed(const nb::bytes& column) {
  if (column.size() % sizeof(int32_t) != 0) {
    throw nb::value_error("column must be a multiple of 4 bytes");
  }
  std::string packed;
  {
    const ReleasedGil release;
    std::vector<int32_t> ids(column.size() / sizeof(int32_t));
    std::memcpy(ids.data(), column.data(), column.size());
    packed = pack_ids(ids);
  }
  return nb::bytes(packed.data(), packed.size());
}

void bind_run(nb::module_& module) {
  nb::class_<ReportedRun>(module, "ChangeRun", "Changes of chunks that one event reports.")
      .def_ro("kind", &ReportedRun::kind, "An `EventKind`.")
      .def_ro("change_kind", &ReportedRun::change_kind, "Of each of them: 0 arrived, 1 left, 2 has another priority.")
      .def_ro("namespace", &ReportedRun::owner)
      .def_ro("level", &ReportedRun::level, "The tier that each of them came to or left.")
      .def_ro("keys", &ReportedRun::keys, "Packed.")
      .def_ro("parent", &ReportedRun::parent, "The key before the first of them; b\"\": the root, or not reported.")
      .def_ro("tokens", &ReportedRun::tokens, "Token ids, i32, of all of them or of none.")
      .def_ro("tiers", &ReportedRun::tiers, "Bits of the tiers that have them.")
      .def_ro("tiers_before", &ReportedRun::tiers_before)
      .def_ro("priority", &ReportedRun::priority)
      .def_ro("priority_before", &ReportedRun::priority_before)
      .def_ro("cause", &ReportedRun::cause, "A `Cause`.")
      .def_ro("scope", &ReportedRun::scope, "Packed, see `kvpool.keys`; b\"\" where it is not known.");
}

}  // namespace

void bind_changes(nb::module_& module, nb::class_<Directory>& directory) {
  bind_run(module);
  nb::class_<ChangeFeed>(module, "ChangeFeed",
                         "Chunks that come to tiers and leave them, in order. Control thread only.")
      .def(nb::new_(&make_feed), "capacity"_a)
      .def("take", &take, "limit"_a,
           "(whether something before these was lost, rows in the format of `CHANGE_ROW`), the oldest first.")
      .def("fileno", &ChangeFeed::fd, "Readable while changes wait that no `take` has seen.")
      .def_prop_ro("waiting", &ChangeFeed::waiting)
      .def_prop_ro("lost", &ChangeFeed::lost, "Changes forgotten since the start.");
  module.def("pack_ids", &packed, "column"_a,
             "A column of i32 as a msgpack array. Raises ValueError unless it is whole ids.");
  directory
      .def(
          "report_to", [](Directory& self, std::shared_ptr<ChangeFeed> feed) { self.reports().report_to(std::move(feed)); }, "feed"_a,
          "Reports every change to the feed from now on.")
      .def("runs_of", &runs_of, "rows"_a, "payload_max"_a,
           "Rows of the feed as runs that one event reports each. Raises ValueError for rows that are none, KeyError for a namespace\n"
           "that is not known.")
      .def("list_chunks", &list, "cursor"_a, "limit"_a,
           "(next cursor or 0, rows as the feed has them): the chunks that are here, as they are now.")
      .def(
          "find",
          [](const Directory& self, const nb::bytes& key) {
            const auto found = self.reports().find(one_key(key));
            return found ? nb::bytes(&*found, sizeof(Change)) : nb::bytes("");
          },
          "key"_a, "A row of the chunk, empty where it is not here.")
      .def(
          "place_of",
          [](const Directory& self, const nb::bytes& key) -> std::tuple<uint64_t, uint64_t> {
            const auto place = self.place_of(one_key(key)).value_or(ChunkPlace{});
            return {place.offset, place.generation};
          },
          "key"_a, "(offset, generation) of the chunk's slot, as of now; generation 0: it is not here.");
}

}  // namespace kvpool
