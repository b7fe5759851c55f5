// Freed memory: what a process keeps of it for its next allocations, instead of giving it back to the kernel at once.
//
// A request of half a megabyte takes memory for what arrived, for the whole frame and for its columns. The C library gives such
// blocks back as they are freed, so that each request pays for 400 pages anew: 0.6 ms, measured, half of a commit. What it is not: a
// bound on what is allocated. Threads: at the start, before there are others.
#pragma once

#include <cstddef>

namespace kvpool {

// From now on up to `kept_bytes` of freed memory stay, and blocks of up to `block_bytes` come from it. False where the C library
// has no such setting.
[[nodiscard]] bool keep_freed_memory(size_t kept_bytes, size_t block_bytes) noexcept;

}  // namespace kvpool
