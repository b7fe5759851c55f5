// Which side of a fork this process is on.
//
// A forked child has copies of this library's objects, but neither their threads nor their mappings (MADV_DONTFORK). An
// object that would wait for such a thread, or give back such a mapping, asks first whether it was made in this life.
// Any thread.
#pragma once

#include <cstdint>

namespace kvpool {

// A number that differs between a process and the children it forks.
[[nodiscard]] uint32_t process_life() noexcept;

}  // namespace kvpool
