// Making a ring, and finding out whether it can be used. Built only where liburing is.
#pragma once

#include <liburing.h>

namespace kvpool {

// Both return 0 or an errno. What was opened is closed by its owner, with `close_ring`.
[[nodiscard]] int open_ring(io_uring& ring, unsigned entries) noexcept;
[[nodiscard]] int try_ring(io_uring& ring) noexcept;
void close_ring(io_uring& ring) noexcept;

}  // namespace kvpool
