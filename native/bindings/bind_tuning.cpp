// Bindings of the choice among the variants of a copy, and the words that report it. The GIL is released while it is measured.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <cstdio>
#include <optional>
#include <string>
#include <variant>

#include "bindings.h"
#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

std::string fault_of_environment() {
  const char* unknown = unknown_copy_variant();
  if (unknown == nullptr) {
    return "";
  }
  std::string known;
  for (const CopyVariant& variant : COPY_VARIANTS) {
    known += (known.empty() ? "" : ", ") + std::string(variant.name);
  }
  return "KVPOOL_COPY_VARIANT is '" + std::string(unknown) + "', expected one of " + known +
         "; leave it out to have the processor measured";
}

void tune(std::optional<size_t> piece_bytes) {
  const ReleasedGil released;
  if (piece_bytes) {
    tune_copies(*piece_bytes);
    return;
  }
  for (const PieceClass& each : PIECE_CLASSES) {
    tune_copies(each.measured_bytes);
  }
}

// Such as `stream-l2-4k (4 KiB, 1.28 x stream), stream (8 KiB, not measured)`.
std::string describe(CopyKind kind) {
  if (!has_copy_variants(crc32c_best_path())) {
    return "no variants";
  }
  std::string text;
  for (size_t number = 0; number < PIECE_CLASSES.size(); ++number) {
    const CopyChoice choice = copy_choice(kind, number);
    char gain[32];
    std::snprintf(gain, sizeof(gain), "%.2f x %s", choice.gb_per_s / choice.first_gb_per_s, COPY_VARIANTS[0].name);
    const char* const how = is_copy_variant_given() ? "given" : choice.is_measured ? gain : "not measured";
    text += (text.empty() ? "" : ", ") + std::string(COPY_VARIANTS[choice.variant].name) + " (" +
            PIECE_CLASSES[number].name + ", " + how + ")";
  }
  return text;
}

// What is chosen, and seconds.
using Choices = nb::typed<nb::dict, nb::str, std::variant<std::string, double>>;

Choices choices() {
  Choices chosen;
  chosen["copy_save"] = describe(CopyKind::SAVE);
  chosen["copy_load"] = describe(CopyKind::LOAD);
  chosen["copy_tuning_seconds"] = copy_tuning_seconds();
  return chosen;
}

}  // namespace

void bind_tuning(nb::module_& module) {
  module.def("tune_copies", &tune, "piece_bytes"_a = nb::none(),
             "Measures the variants of a copy for pieces of such a length, None: of every length. Once in a process.");
  module.def("copy_choices", &choices, "Which variant copies pieces of which length, and what it took to find out.");
  module.def("copy_variant_fault", &fault_of_environment, "What is wrong with KVPOOL_COPY_VARIANT; empty where nothing is.");
}

}  // namespace kvpool
