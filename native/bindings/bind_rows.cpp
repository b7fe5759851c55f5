// Layouts of the rows that cross packed, taken from the structs themselves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "mover/move_jobs.h"
#include "records/catalogue_order.h"
#include "records/change_feed.h"
#include "rows.h"

namespace nb = nanobind;

namespace kvpool {
namespace {

struct RowLayout {
  size_t bytes;
  std::vector<std::string> names{};
  std::vector<std::string> formats{};
  std::vector<size_t> offsets{};

  // A number by its size, anything else as bytes.
  template <typename Field>
  RowLayout& with(const char* name, size_t offset) {
    const bool is_number = std::is_integral_v<Field> || std::is_enum_v<Field>;
    names.emplace_back(name);
    formats.push_back((is_number ? "<u" : "V") + std::to_string(sizeof(Field)));
    offsets.push_back(offset);
    return *this;
  }
};

#define KVPOOL_FIELD(Row, field, name) with<decltype(Row::field)>(name, offsetof(Row, field))

RowLayout move_row() {
  return RowLayout{sizeof(MoveRow)}
      .KVPOOL_FIELD(MoveRow, key, "key")
      .KVPOOL_FIELD(MoveRow, parent, "parent")
      .KVPOOL_FIELD(MoveRow, offset, "offset")
      .KVPOOL_FIELD(MoveRow, arena_offset, "arena_offset")
      .KVPOOL_FIELD(MoveRow, arena_slot, "arena_slot")
      .KVPOOL_FIELD(MoveRow, generation, "generation");
}

RowLayout restore_row() {
  return RowLayout{sizeof(RestoreRow)}
      .KVPOOL_FIELD(RestoreRow, key, "key")
      .KVPOOL_FIELD(RestoreRow, parent, "parent")
      .KVPOOL_FIELD(RestoreRow, offset, "offset")
      .KVPOOL_FIELD(RestoreRow, generation, "generation")
      .KVPOOL_FIELD(RestoreRow, owner, "namespace")
      .KVPOOL_FIELD(RestoreRow, size_class, "size_class")
      .KVPOOL_FIELD(RestoreRow, priority, "priority")
      .KVPOOL_FIELD(RestoreRow, duration_ms, "duration_ms");
}

RowLayout catalogue_row() {
  return RowLayout{sizeof(CatalogueRow)}
      .KVPOOL_FIELD(CatalogueRow, key, "key")
      .KVPOOL_FIELD(CatalogueRow, parent, "parent")
      .KVPOOL_FIELD(CatalogueRow, offset, "offset")
      .KVPOOL_FIELD(CatalogueRow, generation, "generation")
      .KVPOOL_FIELD(CatalogueRow, recency, "recency")
      .KVPOOL_FIELD(CatalogueRow, extent_bytes, "extent_bytes")
      .KVPOOL_FIELD(CatalogueRow, extents, "extents")
      .KVPOOL_FIELD(CatalogueRow, name_space, "namespace")
      .KVPOOL_FIELD(CatalogueRow, priority, "priority")
      .KVPOOL_FIELD(CatalogueRow, duration_s, "duration_s")
      .KVPOOL_FIELD(CatalogueRow, crc, "crc")
      .KVPOOL_FIELD(CatalogueRow, pad, "pad");
}

RowLayout change_row() {
  return RowLayout{sizeof(Change)}
      .KVPOOL_FIELD(Change, key, "key")
      .KVPOOL_FIELD(Change, parent, "parent")
      .KVPOOL_FIELD(Change, owner, "namespace")
      .KVPOOL_FIELD(Change, record, "record")
      .KVPOOL_FIELD(Change, kind, "kind")
      .KVPOOL_FIELD(Change, level, "level")
      .KVPOOL_FIELD(Change, tiers, "tiers")
      .KVPOOL_FIELD(Change, cause, "cause")
      .KVPOOL_FIELD(Change, priority, "priority")
      .KVPOOL_FIELD(Change, priority_before, "priority_before")
      .KVPOOL_FIELD(Change, unused, "unused");
}

RowLayout device_move_row() {
  return RowLayout{sizeof(DeviceMoveRow)}
      .KVPOOL_FIELD(DeviceMoveRow, arena_offset, "arena_offset")
      .KVPOOL_FIELD(DeviceMoveRow, arena_slot, "arena_slot")
      .KVPOOL_FIELD(DeviceMoveRow, generation, "generation")
      .KVPOOL_FIELD(DeviceMoveRow, device_offset, "device_offset")
      .KVPOOL_FIELD(DeviceMoveRow, chunk_bytes, "chunk_bytes")
      .KVPOOL_FIELD(DeviceMoveRow, extents, "extents");
}

#undef KVPOOL_FIELD

}  // namespace

void bind_rows(nb::module_& module) {
  nb::class_<RowLayout>(module, "RowLayout", "Fields of a row that crosses packed, in their order, without holes.")
      .def_ro("bytes", &RowLayout::bytes, "Of a whole row.")
      .def_ro("names", &RowLayout::names)
      .def_ro("formats", &RowLayout::formats, "As numpy writes them.")
      .def_ro("offsets", &RowLayout::offsets, "In bytes.");
  module.attr("MOVE_ROW") = move_row();
  module.attr("RESTORE_ROW") = restore_row();
  module.attr("CATALOGUE_ROW") = catalogue_row();
  module.attr("CHANGE_ROW") = change_row();
  module.attr("DEVICE_MOVE_ROW") = device_move_row();
}

}  // namespace kvpool
