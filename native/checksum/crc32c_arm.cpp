// The CRC-32C instructions of ARMv8, eight bytes at a time, and folding 16 bytes a register with its carry-less
// multiplication. Compiled with -march=armv8-a+crc+crypto.
#include <arm_acle.h>
#include <arm_neon.h>

#include <cstring>

#include "checksum/crc32c_fold.h"

namespace kvpool::crc32c_detail {
namespace {

struct Neon {
  using Vector = uint64x2_t;

  template <uint64_t Low, uint64_t High>
  [[gnu::always_inline]] static Vector constants() noexcept {
    return vcombine_u64(vcreate_u64(Low), vcreate_u64(High));
  }
  [[gnu::always_inline]] static Vector fold(Vector folded, Vector constants, Vector next) noexcept {
    const auto low = vreinterpretq_u64_p128(
        vmull_p64(static_cast<poly64_t>(vgetq_lane_u64(folded, 0)), static_cast<poly64_t>(vgetq_lane_u64(constants, 0))));
    const auto high =
        vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(folded), vreinterpretq_p64_u64(constants)));
    return veorq_u64(veorq_u64(low, high), next);
  }
  [[gnu::always_inline]] static Vector mix_in(Vector first, uint32_t state) noexcept {
    return veorq_u64(first, vcombine_u64(vcreate_u64(state), vcreate_u64(0)));
  }
  [[gnu::always_inline]] static Vector load(const uint8_t* source) noexcept {
    return vreinterpretq_u64_u8(vld1q_u8(source));
  }
  [[gnu::always_inline]] static void keep(Vector& vector) noexcept { asm volatile("" : "+w"(vector)); }
  [[gnu::always_inline]] static void store(uint8_t* target, Vector vector) noexcept {
    vst1q_u8(target, vreinterpretq_u8_u64(vector));
  }
  [[gnu::always_inline]] static void stream(uint8_t* target, Vector vector) noexcept {
    asm volatile("stnp %d1, %d2, [%0]" : : "r"(target), "w"(vget_low_u64(vector)), "w"(vget_high_u64(vector)) : "memory");
  }
  static uint32_t update(uint32_t state, const uint8_t* data, size_t size) noexcept {
    return update_arm(state, data, size);
  }
  static uint32_t copy(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
    return copy_arm(state, target, source, size);
  }
};

}  // namespace

uint32_t update_arm(uint32_t state, const uint8_t* data, size_t size) noexcept {
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    state = __crc32cd(state, word);
  }
  for (; size > 0; --size, ++data) {
    state = __crc32cb(state, *data);
  }
  return state;
}

uint32_t copy_arm(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  for (; size >= 8; size -= 8, source += 8, target += 8) {
    const auto word = load_once<uint64_t>(source);
    store(target, word);
    state = __crc32cd(state, word);
  }
  for (; size > 0; --size, ++source, ++target) {
    const auto byte = load_once<uint8_t>(source);
    *target = byte;
    state = __crc32cb(state, byte);
  }
  return state;
}

uint32_t update_pmull(uint32_t state, const uint8_t* data, size_t size) noexcept {
  return update_folding<Neon>(state, data, size);
}

uint32_t copy_pmull(size_t variant, uint32_t state, uint8_t* target, const uint8_t* source, size_t size,
                    const uint8_t* next) noexcept {
  return copy_folding<Neon>(variant, state, target, source, size, next);
}

void flush_lines_arm(const uint8_t* from, size_t size) noexcept {
  for (size_t line = 0; line < size; line += CACHE_LINE) {
    asm volatile("dc civac, %0" : : "r"(from + line) : "memory");
  }
}

}  // namespace kvpool::crc32c_detail
