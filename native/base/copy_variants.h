// The ways to run the loop that copies and checksums: what it prefetches, how many registers it folds, how it stores.
//
// What it is: a list; all of them store the same bytes and compute the same checksum. Which one is fastest differs from one
// processor to the next (copy_tuning.h). What it is not: a choice.
// A prefetch is a hint: it reads nothing that anybody sees, and no address of it can fault.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

enum class Prefetch : uint8_t {
  NONE,
  NEXT_PIECE,  // the beginning of the next piece, all at once
  INTO_L1,     // so many bytes ahead, going over from the piece into the next one
  INTO_L2,
};

struct CopyVariant {
  const char* name;
  Prefetch prefetch;
  uint16_t prefetch_bytes;
  uint8_t registers;
  bool is_streaming;  // stores past the caches
};

// The first is the one that copies where nothing has been measured.
inline constexpr std::array<CopyVariant, 7> COPY_VARIANTS = {{
    {"stream", Prefetch::NONE, 0, 4, true},
    {"stream-next256", Prefetch::NEXT_PIECE, 256, 4, true},
    {"stream-l1-2k", Prefetch::INTO_L1, 2048, 4, true},
    {"stream-l1-4k", Prefetch::INTO_L1, 4096, 4, true},
    {"stream-l2-4k", Prefetch::INTO_L2, 4096, 4, true},
    {"stream-l2-4k-wide", Prefetch::INTO_L2, 4096, 8, true},
    {"plain-l1-2k", Prefetch::INTO_L1, 2048, 4, false},
}};

}  // namespace kvpool
