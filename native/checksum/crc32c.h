// CRC-32C (Castagnoli), alone and in the same pass as a copy.
//
// What it is: the checksum of every extent of every chunk. What it is not: a hash of keys, or a defence against somebody
// who wants a collision.
// Some ways compute the same function: carry-less multiplication with AVX-512 or NEON, the instructions of SSE4.2 or ARMv8,
// a table. One is chosen once at run time, and of a copy's loop a variant too (copy_tuning.h). Folding by carry-less multiplication follows Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009; the constants are computed here, not copied.
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

enum class CrcPath : uint8_t { TABLE, SSE42, AVX512, ARM_CRC, ARM_PMULL };

[[nodiscard]] CrcPath crc32c_best_path() noexcept;

// The checksum of `size` more bytes behind data whose checksum is `crc` (0: no data yet).
[[nodiscard]] uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) noexcept;

// The same of a few words that follow no data: their checksum as bytes, little endian.
template <size_t Count>
[[nodiscard]] inline uint32_t crc32c_of(const std::array<uint64_t, Count>& words) noexcept {
#if defined(__x86_64__)
  if (crc32c_best_path() != CrcPath::TABLE) {
    uint64_t state = UINT32_MAX;
    for (const uint64_t word : words) {
      asm("crc32q %1, %0" : "+r"(state) : "rm"(word));  // a call for each costs several times as much
    }
    return ~static_cast<uint32_t>(state);
  }
#endif
  return crc32c(0, reinterpret_cast<const uint8_t*>(words.data()), sizeof(words));
}

// Puts this thread's copies before everything that it does after: later stores, non-temporal ones being the reason, and
// later loads, so that a generation read after the copy is not older than the bytes.
void copy_fence() noexcept;

[[nodiscard]] const char* crc32c_path() noexcept;

[[nodiscard]] bool crc32c_supports(CrcPath path) noexcept;

// For tests: one way or another. REQUIRES: the machine has it.
[[nodiscard]] uint32_t crc32c_with(CrcPath path, uint32_t crc, const uint8_t* data, size_t size) noexcept;

// Copies and returns the checksum of what it has stored, also while somebody else writes the source: each byte is read
// once, and the register that is stored is the one that is checksummed. With non-temporal stores where the variant has them
// and the target's alignment allows: `copy_fence` must follow before another thread is notified about the bytes. `next`: what
// will be copied after this, which may be prefetched and is not read.
// REQUIRES: the ranges do not overlap; the machine has the path; `variant` is one of COPY_VARIANTS.
[[nodiscard]] uint32_t copy_crc32c_with(CrcPath path, size_t variant, uint32_t crc, uint8_t* target, const uint8_t* source,
                                        size_t size, const uint8_t* next) noexcept;

// Whether the variants differ on a path; elsewhere all are the same loop.
[[nodiscard]] bool has_copy_variants(CrcPath path) noexcept;

// Puts bytes out of all caches, for measurements. Nothing where the path has no variants.
void flush_lines(const uint8_t* from, size_t size) noexcept;

}  // namespace kvpool
