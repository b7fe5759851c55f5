// The ways of crc32c.cpp, each in a source compiled with its own flags. They work on the inverted state: no initial or
// final inversion. Not for anybody else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool::crc32c_detail {

inline constexpr uint32_t POLYNOMIAL = 0x82F63B78;  // reflected

uint32_t update_sse42(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t update_avx512(uint32_t state, const uint8_t* data, size_t size) noexcept;
uint32_t copy_avx512(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept;

}  // namespace kvpool::crc32c_detail
