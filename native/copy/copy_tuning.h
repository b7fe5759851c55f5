// Which of COPY_VARIANTS copies: chosen by measurement on this processor, for each kind of copy and each class of lengths.
//
// What it is: a choice of a process, made once for each class, the first time that somebody asks for it; before that, and on
// a path without variants, the first variant copies. What it is not: a part of what is stored; every variant is right.
// KVPOOL_COPY_VARIANT in the environment names one for everything, and nothing is measured.
// A measurement copies between two regions of its own which it puts out of the caches before each turn, the variants in
// turn, and takes the one with the least median of CPU time. What a plain store leaves in a cache is charged to it.
// Any thread. Whoever comes while another thread measures goes on without, and may ask again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/copy_variants.h"

namespace kvpool {

// A save gathers pieces into one extent, a load scatters one extent into pieces.
enum class CopyKind : uint8_t { SAVE, LOAD };
inline constexpr size_t COPY_KINDS = 2;

// A class is named by the length that is measured for it, and reaches up to `max_bytes`.
struct PieceClass {
  const char* name;
  size_t measured_bytes;
  size_t max_bytes;
};
inline constexpr std::array<PieceClass, 3> PIECE_CLASSES = {{
    {"4 KiB", size_t{4} << 10, size_t{6} << 10},
    {"8 KiB", size_t{8} << 10, size_t{16} << 10},
    {"32 KiB", size_t{32} << 10, SIZE_MAX},
}};

struct CopyChoice {
  size_t variant;
  bool is_measured;
  double gb_per_s;        // of the chosen one, where it was measured
  double first_gb_per_s;  // of the first variant in the same measurement
};

[[nodiscard]] size_t copy_variant(CopyKind kind, size_t piece_bytes) noexcept;

// Copies one piece of its kind by the chosen variant; see copy_crc32c_with.
[[nodiscard]] uint32_t copy_piece(size_t variant, uint32_t crc, uint8_t* target, const uint8_t* source, size_t size,
                                  const uint8_t* next) noexcept;

// Copies bytes that lie one behind the other, as does what is copied next.
[[nodiscard]] uint32_t copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) noexcept;

// Measures the class of such pieces, unless that has been done or another measurement is under way: some 5 ms of CPU time.
void tune_copies(size_t piece_bytes) noexcept;

[[nodiscard]] CopyChoice copy_choice(CopyKind kind, size_t piece_class) noexcept;

// CPU time of all measurements of this process.
[[nodiscard]] double copy_tuning_seconds() noexcept;

// Whether the environment names a variant, and what it names that is none, or nullptr.
[[nodiscard]] bool is_copy_variant_given() noexcept;
[[nodiscard]] const char* unknown_copy_variant() noexcept;

}  // namespace kvpool
