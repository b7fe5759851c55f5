#include "kvpool/crc32c.h"

#include <array>
#include <atomic>

#include "crc32c_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {
namespace {

using namespace crc32c_detail;

consteval std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? POLYNOMIAL : 0U);
    }
    table[byte] = remainder;
  }
  return table;
}

constexpr auto TABLE = make_table();

uint32_t update_table(uint32_t state, const uint8_t* data, size_t size) noexcept {
  for (size_t i = 0; i < size; ++i) {
    state = (state >> 8) ^ TABLE[(state ^ data[i]) & 0xFFU];
  }
  return state;
}

uint32_t copy_table(uint32_t state, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  for (size_t i = 0; i < size; ++i) {
    const auto byte = load_once<uint8_t>(source + i);
    target[i] = byte;
    state = (state >> 8) ^ TABLE[(state ^ byte) & 0xFFU];
  }
  return state;
}

uint32_t update(CrcPath path, uint32_t state, const uint8_t* data, size_t size) noexcept {
#if defined(__x86_64__)
  if (path == CrcPath::AVX512) {
    return update_avx512(state, data, size);
  }
  if (path == CrcPath::SSE42) {
    return update_sse42(state, data, size);
  }
#endif
  return update_table(state, data, size);
}

CrcPath best_path() noexcept {
  static const CrcPath path = crc32c_supports(CrcPath::AVX512)  ? CrcPath::AVX512
                              : crc32c_supports(CrcPath::SSE42) ? CrcPath::SSE42
                                                                : CrcPath::TABLE;
  return path;
}

}  // namespace

bool crc32c_supports(CrcPath path) noexcept {
#if defined(__x86_64__)
  if (path == CrcPath::AVX512) {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
           __builtin_cpu_supports("vpclmulqdq") != 0 && __builtin_cpu_supports("sse4.2") != 0;
  }
  if (path == CrcPath::SSE42) {
    return __builtin_cpu_supports("sse4.2") != 0;
  }
#endif
  return path == CrcPath::TABLE;
}

uint32_t crc32c_with(CrcPath path, uint32_t crc, const uint8_t* data, size_t size) noexcept {
  return ~update(path, ~crc, data, size);
}

uint32_t copy_crc32c_with(CrcPath path, uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) noexcept {
#if defined(__x86_64__)
  if (path == CrcPath::AVX512) {
    return ~copy_avx512(~crc, target, source, size);
  }
  if (path == CrcPath::SSE42) {
    return ~copy_sse42(~crc, target, source, size);
  }
#endif
  return ~copy_table(~crc, target, source, size);
}

uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) noexcept {
  return crc32c_with(best_path(), crc, data, size);
}

uint32_t copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  return copy_crc32c_with(best_path(), crc, target, source, size);
}

void copy_fence() noexcept {
#if defined(__x86_64__)
  _mm_mfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

const char* crc32c_path() noexcept {
  switch (best_path()) {
    case CrcPath::AVX512:
      return "avx512";
    case CrcPath::SSE42:
      return "sse4.2";
    case CrcPath::TABLE:
      return "table";
  }
  return "table";
}

}  // namespace kvpool
