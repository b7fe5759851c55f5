// Which chunks stand for all of them: one in sixteen, always the same ones in a process.
//
// What it is: a hash of a key that clients cannot foresee, for they choose the keys: whoever could choose what is sampled could
// make every estimate say anything. What it is not: the same in the next process.
// Threads: any.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace kvpool {

inline constexpr double SAMPLED_SHARE = 1.0 / 16;

[[nodiscard]] uint64_t sampling_word(const ChunkKey& key) noexcept;
[[nodiscard]] inline bool is_in_sample(const ChunkKey& key) noexcept { return sampling_word(key) >> 60 == 0; }

}  // namespace kvpool
