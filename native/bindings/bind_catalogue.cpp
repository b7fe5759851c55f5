// Binding of the catalogue's restoring order. Rows cross packed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <vector>

#include "bindings.h"
#include "columns.h"
#include "records/catalogue_order.h"
#include "ssd/ssd_format.h"
#include "released_gil.h"

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
    const ReleasedGil released;
    order = restoring_order(reinterpret_cast<const CatalogueRow*>(rows.data()), rows.size() / sizeof(CatalogueRow));
  }
  return pack(order);
}

struct SlotHeader {
  nb::bytes epoch;
  nb::bytes key;
  nb::bytes parent;
  nb::bytes name_space;
  uint64_t generation;
  uint64_t extent_bytes;
  size_t extents;
  nb::bytes checksums;
  nb::bytes tokens;
};

std::optional<SlotHeader> header_of(const nb::bytes& page) {
  SsdHeader header{};
  if (page.size() < SSD_HEADER_BYTES) {
    throw nb::value_error("a header has at least 4096 bytes");
  }
  if (decode_ssd_header(static_cast<const uint8_t*>(page.data()), page.size(), header) != SsdStatus::OK) {
    return std::nullopt;
  }
  return SlotHeader{nb::bytes(header.pool_epoch, sizeof(header.pool_epoch)),
                    nb::bytes(header.key, KEY_BYTES),
                    nb::bytes(header.parent, KEY_BYTES),
                    nb::bytes(header.name_space, sizeof(header.name_space)),
                    header.generation,
                    header.extent_bytes,
                    header.extent_crcs.size(),
                    nb::bytes(header.extent_crcs.data(), header.extent_crcs.size() * sizeof(uint32_t)),
                    pack(header.tokens)};
}

nb::bytes page_of(const nb::bytes& epoch, const nb::bytes& key, const nb::bytes& name_space, uint64_t extent_bytes,
                  const nb::bytes& checksums) {
  SsdHeader header{};
  const size_t extents = checksums.size() / sizeof(uint32_t);
  if (epoch.size() != sizeof(header.pool_epoch) || key.size() != KEY_BYTES || name_space.size() != sizeof(header.name_space)) {
    throw nb::value_error("epoch must be 16 bytes, key and namespace 32");
  }
  if (checksums.size() % sizeof(uint32_t) != 0 || extents == 0 || extents > SSD_EXTENTS_MAX || extent_bytes == 0) {
    throw nb::value_error("checksums must be 1 to 4096 words, extent_bytes positive");
  }
  std::memcpy(header.pool_epoch, epoch.data(), sizeof(header.pool_epoch));
  std::memcpy(header.key, key.data(), KEY_BYTES);
  std::memcpy(header.name_space, name_space.data(), sizeof(header.name_space));
  header.extent_bytes = extent_bytes;
  header.extent_crcs.resize(extents);
  std::memcpy(header.extent_crcs.data(), checksums.data(), checksums.size());
  SsdPage page;
  encode_ssd_header(header, page.data());
  return nb::bytes(page.data(), header.header_bytes());
}

uint64_t length_of(const nb::bytes& page) {
  if (page.size() < SSD_HEADER_BYTES) {
    throw nb::value_error("a header has at least 4096 bytes");
  }
  return ssd_header_length(static_cast<const uint8_t*>(page.data()));
}

}  // namespace

void bind_catalogue(nb::module_& module) {
  module.attr("GENERATION_END") = GENERATION_END;
  module.def("restoring_order", &order_of, "rows"_a,
             "Numbers (u32) of the good rows of 120 bytes, ancestors and recent ones first. GIL released.");
  nb::class_<SlotHeader>(module, "SlotHeader", "The chunk that the header page of a slot on disk describes.")
      .def_ro("epoch", &SlotHeader::epoch, "Of the pool, 16 bytes.")
      .def_ro("key", &SlotHeader::key)
      .def_ro("parent", &SlotHeader::parent, "Zeros: the chunk is the first of its prompt.")
      .def_ro("namespace", &SlotHeader::name_space, "Its fingerprint, 32 bytes.")
      .def_ro("generation", &SlotHeader::generation, "Of the slot.")
      .def_ro("extent_bytes", &SlotHeader::extent_bytes)
      .def_ro("extents", &SlotHeader::extents)
      .def_ro("checksums", &SlotHeader::checksums, "CRC-32C of each extent, u32.")
      .def_ro("tokens", &SlotHeader::tokens, "Token ids and the scope behind them, i32; empty where they are not known.");
  module.def("decode_ssd_header", &header_of, "page"_a,
             "The header that whole pages begin with where they are a slot's, else None.");
  module.def("ssd_header_length", &length_of, "page"_a, "Bytes of the header that begins with this page; 0 where none does.");
  module.def("encode_ssd_header", &page_of, "epoch"_a, "key"_a, "namespace"_a, "extent_bytes"_a, "checksums"_a,
             "The header of a chunk outside of any slot: without parent, generation and token ids.");
}

}  // namespace kvpool
