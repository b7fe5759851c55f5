// Names of the types of keys and values, as Python has them.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "sparse/summary_format.h"

namespace kvpool {

// Throws ValueError.
[[nodiscard]] inline KvType kv_type_of(std::string_view name) {
  if (name == "float32") {
    return KvType::FLOAT32;
  }
  if (name == "float16") {
    return KvType::FLOAT16;
  }
  if (name == "bfloat16") {
    return KvType::BFLOAT16;
  }
  throw nanobind::value_error("dtype must be 'float32', 'float16' or 'bfloat16'");
}

}  // namespace kvpool
