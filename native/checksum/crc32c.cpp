#include "checksum/crc32c.h"

#include <array>
#include <atomic>

#include "base/processor.h"
#include "checksum/crc32c_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
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
  switch (path) {
#if defined(__x86_64__)
    case CrcPath::AVX512:
      return update_avx512(state, data, size);
    case CrcPath::SSE42:
      return update_sse42(state, data, size);
#elif defined(__aarch64__)
    case CrcPath::ARM_PMULL:
      return update_pmull(state, data, size);
    case CrcPath::ARM_CRC:
      return update_arm(state, data, size);
#endif
    default:
      return update_table(state, data, size);
  }
}

CrcPath find_best_path() noexcept {
  for (const CrcPath path : {CrcPath::AVX512, CrcPath::SSE42, CrcPath::ARM_PMULL, CrcPath::ARM_CRC}) {
    if (crc32c_supports(path)) {
      return path;
    }
  }
  return CrcPath::TABLE;
}

}  // namespace

CrcPath crc32c_best_path() noexcept {
  static const CrcPath path = find_best_path();
  return path;
}

bool crc32c_supports(CrcPath path) noexcept {
#if defined(__x86_64__)
  if (path == CrcPath::AVX512) {
    const ProcessorFeatures& has = processor_features();
    return has.avx512f && has.avx512vl && has.vpclmulqdq && has.sse42;
  }
  if (path == CrcPath::SSE42) {
    return processor_features().sse42;
  }
#elif defined(__aarch64__)
  const unsigned long has = getauxval(AT_HWCAP);
  if (path == CrcPath::ARM_PMULL) {
    return (has & HWCAP_CRC32) != 0 && (has & HWCAP_PMULL) != 0;
  }
  if (path == CrcPath::ARM_CRC) {
    return (has & HWCAP_CRC32) != 0;
  }
#endif
  return path == CrcPath::TABLE;
}

bool has_copy_variants(CrcPath path) noexcept { return path == CrcPath::AVX512 || path == CrcPath::ARM_PMULL; }

uint32_t crc32c_with(CrcPath path, uint32_t crc, const uint8_t* data, size_t size) noexcept {
  return ~update(path, ~crc, data, size);
}

uint32_t copy_crc32c_with(CrcPath path, size_t variant, uint32_t crc, uint8_t* target, const uint8_t* source,
                          size_t size, const uint8_t* next) noexcept {
  switch (path) {
#if defined(__x86_64__)
    case CrcPath::AVX512:
      return ~copy_avx512(variant, ~crc, target, source, size, next);
    case CrcPath::SSE42:
      return ~copy_sse42(~crc, target, source, size);
#elif defined(__aarch64__)
    case CrcPath::ARM_PMULL:
      return ~copy_pmull(variant, ~crc, target, source, size, next);
    case CrcPath::ARM_CRC:
      return ~copy_arm(~crc, target, source, size);
#endif
    default:
      return ~copy_table(~crc, target, source, size);
  }
}

uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) noexcept {
  return crc32c_with(crc32c_best_path(), crc, data, size);
}

void copy_fence() noexcept {
#if defined(__x86_64__)
  _mm_mfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void flush_lines(const uint8_t* from, size_t size) noexcept {
#if defined(__x86_64__)
  if (crc32c_best_path() == CrcPath::AVX512) {
    flush_lines_avx512(from, size);
  }
#elif defined(__aarch64__)
  flush_lines_arm(from, size);
#endif
}

const char* crc32c_path() noexcept {
  switch (crc32c_best_path()) {
    case CrcPath::AVX512:
      return "avx512";
    case CrcPath::SSE42:
      return "sse4.2";
    case CrcPath::ARM_PMULL:
      return "pmull";
    case CrcPath::ARM_CRC:
      return "armv8-crc";
    case CrcPath::TABLE:
      return "table";
  }
  return "table";
}

}  // namespace kvpool
