// Token ids as a msgpack array of integers, each in its shortest form: what routers read. Pure function; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace kvpool {

// O(ids), at most 5 bytes for each and 5 before them.
[[nodiscard]] std::string pack_ids(std::span<const int32_t> ids);

}  // namespace kvpool
