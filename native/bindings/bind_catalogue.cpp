// Binding of the catalogue's restoring order. Rows cross packed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <vector>

#include "bindings.h"
#include "columns.h"
#include "records/catalogue_order.h"
#include "ssd/ssd_format.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

nb::bytes order_of(const nb::bytes& rows) {
  if (rows.size() % sizeof(CatalogueRow) != 0 || rows.size() / sizeof(CatalogueRow) >= UINT32_MAX - 1) {
    throw nb::value_error("rows must be 120 bytes each");
  }
  std::vector<uint32_t> order;
  {
    const nb::gil_scoped_release released;
    order = restoring_order(reinterpret_cast<const CatalogueRow*>(rows.data()), rows.size() / sizeof(CatalogueRow));
  }
  return pack(order);
}

// What a page says when it is a slot's header: (epoch, key, parent, namespace, generation, layer_bytes, layers,
// token ids); else None.
using HeaderPage = std::tuple<nb::bytes, nb::bytes, nb::bytes, nb::bytes, uint64_t, uint64_t, size_t, nb::bytes>;

std::optional<HeaderPage> header_of(const nb::bytes& page) {
  SsdHeader header{};
  if (page.size() != SSD_HEADER_BYTES) {
    throw nb::value_error("a header has 4096 bytes");
  }
  if (decode_ssd_header(static_cast<const uint8_t*>(page.data()), header) != SsdStatus::OK) {
    return std::nullopt;
  }
  return HeaderPage(nb::bytes(header.pool_epoch, sizeof(header.pool_epoch)), nb::bytes(header.key, KEY_BYTES),
                    nb::bytes(header.parent, KEY_BYTES), nb::bytes(header.name_space, sizeof(header.name_space)),
                    header.generation, header.layer_bytes, header.layer_crcs.size(), pack(header.tokens));
}

}  // namespace

void bind_catalogue(nb::module_& module) {
  module.attr("CATALOGUE_ROW_BYTES") = sizeof(CatalogueRow);
  module.attr("GENERATION_END") = GENERATION_END;
  module.def("restoring_order", &order_of, "rows"_a,
             "Numbers (u32) of the good rows of 120 bytes, ancestors and recent ones first. GIL released.");
  module.def("decode_ssd_header", &header_of, "page"_a,
             "(epoch, key, parent, namespace, generation, layer_bytes, layers, token ids i32) of a slot's header page, or\n"
             "None.");
}

}  // namespace kvpool
