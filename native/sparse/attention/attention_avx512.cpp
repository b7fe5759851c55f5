// Attention with AVX-512: sixteen tokens at a time.
#include <immintrin.h>

#include "sparse/attention/attention_kernel.h"

namespace kvpool::attention_detail {
namespace {

struct Avx512 {
  static constexpr size_t WIDTH = lanes_of(AttentionPath::AVX512);
  static constexpr uint32_t PASS = 2;
  static constexpr size_t TOKENS = 4;
  using F = Lanes<WIDTH>::F;

  [[gnu::always_inline]] static F fma(F a, F b, F c) noexcept {
    return reinterpret_cast<F>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
  }
  [[gnu::always_inline]] static F broadcast(float x) noexcept { return reinterpret_cast<F>(_mm512_set1_ps(x)); }
  [[gnu::always_inline]] static F from_halves(Lanes<WIDTH>::H raw) noexcept {
    // With a mask: the plain intrinsic makes GCC 12 warn of its own undefined register.
    return reinterpret_cast<F>(_mm512_maskz_cvtph_ps(0xFFFFU, reinterpret_cast<__m256i>(raw)));
  }
};

}  // namespace

void attend_slice_avx512(const Slice& slice, const Partial& partial) { attend_slice<Avx512>(slice, partial); }

}  // namespace kvpool::attention_detail
