// The CRC-32C instruction, eight bytes at a time; compiled with -msse4.2.
#include <nmmintrin.h>

#include <cstring>

#include "checksum/crc32c_paths.h"

namespace kvpool::crc32c_detail {

uint32_t update_sse42(uint32_t state, const uint8_t* data, size_t size) noexcept {
  uint64_t wide = state;
  const auto add_word = [&wide](const uint8_t* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  };
  for (; size >= 64; size -= 64, data += 64) {
#pragma GCC unroll 8
    for (size_t at = 0; at < 64; at += 8) {  // a third of the instructions of the loop below
      add_word(data + at);
    }
  }
  for (; size >= 8; size -= 8, data += 8) {
    add_word(data);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++data) {
    narrow = _mm_crc32_u8(narrow, *data);
  }
  return narrow;
}

uint32_t copy_sse42(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  uint64_t wide = state;
  for (; size >= 8; size -= 8, source += 8, target += 8) {
    const auto word = load_once<uint64_t>(source);
    store(target, word);
    wide = _mm_crc32_u64(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++source, ++target) {
    const auto byte = load_once<uint8_t>(source);
    *target = byte;
    narrow = _mm_crc32_u8(narrow, byte);
  }
  return narrow;
}

}  // namespace kvpool::crc32c_detail
