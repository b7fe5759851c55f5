// CRC-32C (Castagnoli), alone and in the same pass as a copy.
//
// What it is: the checksum of every layer of every chunk. What it is not: a hash of keys, or a defence against somebody
// who wants a collision.
// Three ways compute the same function: AVX-512 with carry-less multiplication, the SSE4.2 instruction, a table. One is
// chosen once at run time. Folding by carry-less multiplication follows Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009; the constants are computed here, not copied.
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

enum class CrcPath : uint8_t { TABLE, SSE42, AVX512 };

// The checksum of `size` more bytes behind data whose checksum is `crc` (0: no data yet).
[[nodiscard]] uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) noexcept;

// Copies and returns the checksum of what it has stored, also while somebody else writes the source: each byte is read
// once, and the register that is stored is the one that is checksummed. With non-temporal stores where the target's
// alignment allows: `copy_fence` must follow before another thread is told about the bytes.
// REQUIRES: the ranges do not overlap.
[[nodiscard]] uint32_t copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) noexcept;

// Puts this thread's copies before everything that it does after: later stores, non-temporal ones being the reason, and
// later loads, so that a generation read after the copy is not older than the bytes.
void copy_fence() noexcept;

[[nodiscard]] const char* crc32c_path() noexcept;

// For tests: one way or another. REQUIRES: the machine has it.
[[nodiscard]] bool crc32c_supports(CrcPath path) noexcept;
[[nodiscard]] uint32_t crc32c_with(CrcPath path, uint32_t crc, const uint8_t* data, size_t size) noexcept;
[[nodiscard]] uint32_t copy_crc32c_with(CrcPath path, uint32_t crc, uint8_t* target, const uint8_t* source,
                                        size_t size) noexcept;

}  // namespace kvpool
