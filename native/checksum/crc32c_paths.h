// The ways of crc32c.cpp, each in a source compiled with its own flags. They work on the inverted state: no initial or
// final inversion. Not for anybody else.
// A copy reads each byte of its source once and checksums the very register that it stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy_variants.h"

namespace kvpool::crc32c_detail {

inline constexpr uint32_t POLYNOMIAL = 0x82F63B78;  // reflected

// Loads one value, once: the compiler must go on with what the register holds. Whoever else writes the source meanwhile,
// what is stored and what is checksummed are then the same.
template <typename Word>
[[nodiscard, gnu::always_inline]] inline Word load_once(const uint8_t* source) noexcept {
  Word word;
  std::memcpy(&word, source, sizeof(word));
  asm volatile("" : "+r"(word));
  return word;
}

template <typename Word>
[[gnu::always_inline]] inline void store(uint8_t* target, Word word) noexcept {
  std::memcpy(target, &word, sizeof(word));
}

#if defined(__x86_64__)
uint32_t update_sse42(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t update_avx512(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t copy_sse42(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept;
uint32_t copy_avx512(size_t variant, uint32_t state, uint8_t* target, const uint8_t* source, size_t size,
                     const uint8_t* next) noexcept;
void flush_lines_avx512(const uint8_t* from, size_t size) noexcept;
#elif defined(__aarch64__)
uint32_t update_arm(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t update_pmull(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t copy_arm(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept;
uint32_t copy_pmull(size_t variant, uint32_t state, uint8_t* target, const uint8_t* source, size_t size,
                    const uint8_t* next) noexcept;
void flush_lines_arm(const uint8_t* from, size_t size) noexcept;
#endif

}  // namespace kvpool::crc32c_detail
