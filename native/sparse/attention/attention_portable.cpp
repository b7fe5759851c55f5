// Attention with what every processor of the architecture has: four tokens at a time.
#include "sparse/attention/attention_kernel.h"

namespace kvpool::attention_detail {
namespace {

struct Portable {
  static constexpr size_t WIDTH = lanes_of(AttentionPath::PORTABLE);
  static constexpr uint32_t PASS = 1;
  static constexpr size_t TOKENS = 1;
  using V = Lanes<WIDTH>;

  [[gnu::always_inline]] static V::F fma(V::F a, V::F b, V::F c) noexcept { return a * b + c; }
  [[gnu::always_inline]] static V::F broadcast(float x) noexcept { return V::F{x, x, x, x}; }
  // The exponent moves from a bias of 15 to one of 127; subnormal numbers become normal by the multiplication.
  [[gnu::always_inline]] static V::F from_halves(V::H raw) noexcept {
    const V::U wide = __builtin_convertvector(raw, V::U);
    const V::U is_special = std::bit_cast<V::U>((wide & 0x7C00U) == 0x7C00U);
    const V::F magnitude = std::bit_cast<V::F>((wide & 0x7FFFU) << 13U) * 0x1p112F;
    const V::U bits = std::bit_cast<V::U>(magnitude) | (is_special & 0x7F800000U);
    return std::bit_cast<V::F>(bits | ((wide & 0x8000U) << 16U));
  }
};

}  // namespace

void attend_slice_portable(const Slice& slice, const Partial& partial) { attend_slice<Portable>(slice, partial); }

}  // namespace kvpool::attention_detail
