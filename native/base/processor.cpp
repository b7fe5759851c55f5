// Features of the processor. See processor.h.
#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace kvpool {
namespace {

// Registers whose content the system keeps: of AVX, and those of AVX-512 besides.
constexpr uint32_t KEPT_AVX = 0x06;
constexpr uint32_t KEPT_AVX512 = 0xe6;

uint32_t kept_registers() noexcept {
  uint32_t low = 0;
  uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

ProcessorFeatures read_features() noexcept {
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c1 = 0;
  uint32_t b7 = 0;
  uint32_t c7 = 0;
  uint32_t d = 0;
  if (__get_cpuid(1, &a, &b, &c1, &d) == 0) {
    return {};
  }
  if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d) == 0) {
    b7 = c7 = 0;
  }
  const uint32_t kept = (c1 & bit_OSXSAVE) != 0 ? kept_registers() : 0;
  const bool has_avx = (c1 & bit_AVX) != 0 && (kept & KEPT_AVX) == KEPT_AVX;
  const bool has_avx512 = has_avx && (kept & KEPT_AVX512) == KEPT_AVX512 && (b7 & bit_AVX512F) != 0;
  return {
      .sse42 = (c1 & bit_SSE4_2) != 0,
      .avx2 = has_avx && (b7 & bit_AVX2) != 0,
      .fma = has_avx && (c1 & bit_FMA) != 0,
      .f16c = has_avx && (c1 & bit_F16C) != 0,
      .avx512f = has_avx512,
      .avx512bw = has_avx512 && (b7 & bit_AVX512BW) != 0,
      .avx512dq = has_avx512 && (b7 & bit_AVX512DQ) != 0,
      .avx512vl = has_avx512 && (b7 & bit_AVX512VL) != 0,
      .avx512vnni = has_avx512 && (c7 & bit_AVX512VNNI) != 0,
      .vpclmulqdq = has_avx && (c7 & bit_VPCLMULQDQ) != 0,
  };
}

}  // namespace

const ProcessorFeatures& processor_features() noexcept {
  static const ProcessorFeatures FEATURES = read_features();
  return FEATURES;
}

}  // namespace kvpool

#endif
