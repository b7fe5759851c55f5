// What this processor can do, as it says itself (cpuid), and the system keeps from one thread to the next (xgetbv).
//
// Asked here and not of the compiler: what __builtin_cpu_supports looks up is filled in by the compiler's run-time library, and that of
// the wheels' compiler fills in nothing, so that every answer would be no.
#pragma once

#if defined(__x86_64__)

namespace kvpool {

struct ProcessorFeatures {
  bool sse42;
  bool avx2;
  bool fma;
  bool f16c;
  bool avx512f;
  bool avx512bw;
  bool avx512dq;
  bool avx512vl;
  bool avx512vnni;
  bool vpclmulqdq;
};

// Any thread.
[[nodiscard]] const ProcessorFeatures& processor_features() noexcept;

}  // namespace kvpool

#endif
