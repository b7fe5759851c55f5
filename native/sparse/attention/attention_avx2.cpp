// Attention with AVX2, FMA and F16C: eight tokens at a time.
#include <immintrin.h>

#include "sparse/attention/attention_kernel.h"

namespace kvpool::attention_detail {
namespace {

struct Avx2 {
  static constexpr size_t WIDTH = lanes_of(AttentionPath::AVX2);
  static constexpr uint32_t PASS = 1;
  static constexpr size_t TOKENS = 2;
  using F = Lanes<WIDTH>::F;

  [[gnu::always_inline]] static F fma(F a, F b, F c) noexcept {
    return reinterpret_cast<F>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
  }
  [[gnu::always_inline]] static F broadcast(float x) noexcept { return reinterpret_cast<F>(_mm256_set1_ps(x)); }
  [[gnu::always_inline]] static F from_halves(Lanes<WIDTH>::H raw) noexcept {
    return reinterpret_cast<F>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(raw)));
  }
};

}  // namespace

void attend_slice_avx2(const Slice& slice, const Partial& partial) { attend_slice<Avx2>(slice, partial); }

}  // namespace kvpool::attention_detail
