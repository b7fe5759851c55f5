// Sixteen lanes of a number each, with the registers that the instruction set of the including source has.
//
// What it is: the arithmetic that the kernels are written in. Each operation is exactly rounded, nothing is fused, and sums across
// lanes have one fixed order, so that a kernel's results are the same bits with every instruction set.
// What it is not: a header for anybody but the sources of this folder. All of it has internal linkage, since they differ in flags.
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVPOOL_LANES [[gnu::always_inline, maybe_unused]] static inline
#define KVPOOL_INLINE __attribute__((always_inline))

namespace kvpool::sparse_detail {
namespace {

#if defined(__AVX512F__)
constexpr size_t WIDTH = 16;
#elif defined(__AVX2__)
constexpr size_t WIDTH = 8;
#else
constexpr size_t WIDTH = 4;
#endif
#if defined(__AVX512F__)
// The compiler takes intrinsics without a mask for reads of what was never set.
constexpr __mmask16 ALL_LANES = 0xFFFF;
#endif
constexpr size_t LANES = 16;
constexpr size_t PARTS = LANES / WIDTH;

using FloatPart = float __attribute__((vector_size(WIDTH * 4)));
using IntPart = int32_t __attribute__((vector_size(WIDTH * 4)));
using UnsignedPart = uint32_t __attribute__((vector_size(WIDTH * 4)));
using WordPart = int16_t __attribute__((vector_size(WIDTH * 4)));
using Bytes16 = uint8_t __attribute__((vector_size(16)));

struct Floats {
  FloatPart part[PARTS];
};
struct Ints {
  IntPart part[PARTS];
};
// Two 16-bit numbers a lane.
struct Words {
  WordPart part[PARTS];
};

template <size_t INDEX>
struct Index {
  static constexpr size_t value = INDEX;
};

// function(Index<i>) for i in 0..COUNT-1: a loop that is none, so that arrays indexed by it are registers.
template <size_t COUNT, typename Function>
KVPOOL_LANES void unrolled(const Function& function) noexcept {
  [&]<size_t... INDEX>(std::index_sequence<INDEX...>) KVPOOL_INLINE {
    (function(Index<INDEX>{}), ...);
  }(std::make_index_sequence<COUNT>{});
}

template <typename Out, typename Function>
KVPOOL_LANES Out each_part(const Function& function) noexcept {
  return [&]<size_t... INDEX>(std::index_sequence<INDEX...>) KVPOOL_INLINE {
    return Out{{function(INDEX)...}};
  }(std::make_index_sequence<PARTS>{});
}

KVPOOL_LANES Floats operator+(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return a.part[i] + b.part[i]; });
}
KVPOOL_LANES Floats operator-(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return a.part[i] - b.part[i]; });
}
KVPOOL_LANES Floats operator*(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return a.part[i] * b.part[i]; });
}
KVPOOL_LANES Floats operator/(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return a.part[i] / b.part[i]; });
}
// All bits of a lane, or none.
KVPOOL_LANES Ints operator>(Floats a, Floats b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] > b.part[i]; });
}
KVPOOL_LANES Ints operator>=(Floats a, Floats b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] >= b.part[i]; });
}
KVPOOL_LANES Ints operator>=(Ints a, Ints b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] >= b.part[i]; });
}
// Sums and differences of integers wrap around: a lane that is not used may hold anything.
KVPOOL_LANES IntPart wrapped(UnsignedPart part) noexcept { return reinterpret_cast<IntPart>(part); }
KVPOOL_LANES UnsignedPart unwrapped(IntPart part) noexcept { return reinterpret_cast<UnsignedPart>(part); }
KVPOOL_LANES Ints operator+(Ints a, Ints b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return wrapped(unwrapped(a.part[i]) + unwrapped(b.part[i])); });
}
KVPOOL_LANES Ints operator-(Ints a, Ints b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return wrapped(unwrapped(a.part[i]) - unwrapped(b.part[i])); });
}
KVPOOL_LANES Ints operator|(Ints a, Ints b) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] | b.part[i]; });
}
KVPOOL_LANES Floats select(Ints mask, Floats yes, Floats no) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
KVPOOL_LANES Ints select(Ints mask, Ints yes, Ints no) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
template <int COUNT>
KVPOOL_LANES Ints shifted_left(Ints a) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] << COUNT; });
}
template <int COUNT>
KVPOOL_LANES Ints shifted_right(Ints a) noexcept {  // arithmetically
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return a.part[i] >> COUNT; });
}
KVPOOL_LANES Floats as_floats(Ints a) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return reinterpret_cast<FloatPart>(a.part[i]); });
}
KVPOOL_LANES Ints as_ints(Floats a) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return reinterpret_cast<IntPart>(a.part[i]); });
}
KVPOOL_LANES Floats to_floats(Ints a) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return __builtin_convertvector(a.part[i], FloatPart); });
}
// All lanes of a part. Not a zero plus the value, which changes the sign of zero and costs an addition.
template <typename Part, typename Number, size_t... LANE>
KVPOOL_LANES Part filled_part(Number value, std::index_sequence<LANE...>) noexcept {
  return Part{(static_cast<void>(LANE), value)...};
}
KVPOOL_LANES FloatPart filled(float value) noexcept { return filled_part<FloatPart>(value, std::make_index_sequence<WIDTH>{}); }
KVPOOL_LANES IntPart filled(int32_t value) noexcept { return filled_part<IntPart>(value, std::make_index_sequence<WIDTH>{}); }
KVPOOL_LANES Floats splat(float value) noexcept {
  return each_part<Floats>([&](size_t) KVPOOL_INLINE { return filled(value); });
}
KVPOOL_LANES Ints splat(int32_t value) noexcept {
  return each_part<Ints>([&](size_t) KVPOOL_INLINE { return filled(value); });
}
// Into the second-level cache: the first has room for no more than what is read now.
KVPOOL_LANES void prefetch_far(const uint8_t* from) noexcept { __builtin_prefetch(from, 0, 2); }

template <typename Part>
KVPOOL_LANES Part load_part(const void* from) noexcept {
  Part part;
  std::memcpy(&part, from, sizeof(part));
  return part;
}
KVPOOL_LANES Floats load(const float* from) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE { return load_part<FloatPart>(from + i * WIDTH); });
}
KVPOOL_LANES Ints load(const int32_t* from) noexcept {
  return each_part<Ints>([&](size_t i) KVPOOL_INLINE { return load_part<IntPart>(from + i * WIDTH); });
}
KVPOOL_LANES void store(float* to, Floats value) noexcept {
  unrolled<PARTS>([&](auto i) KVPOOL_INLINE { std::memcpy(to + i.value * WIDTH, &value.part[i.value], sizeof(FloatPart)); });
}
KVPOOL_LANES void store(int32_t* to, Ints value) noexcept {
  unrolled<PARTS>([&](auto i) KVPOOL_INLINE { std::memcpy(to + i.value * WIDTH, &value.part[i.value], sizeof(IntPart)); });
}
KVPOOL_LANES Bytes16 load_bytes(const uint8_t* from) noexcept {
  Bytes16 out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

// a where a < b, else b, and so b where either is NaN; `largest` likewise.
KVPOOL_LANES Floats smallest(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE {
#if defined(__AVX512F__)
    return reinterpret_cast<FloatPart>(_mm512_maskz_min_ps(ALL_LANES, reinterpret_cast<__m512>(a.part[i]), reinterpret_cast<__m512>(b.part[i])));
#elif defined(__AVX2__)
    return reinterpret_cast<FloatPart>(_mm256_min_ps(reinterpret_cast<__m256>(a.part[i]), reinterpret_cast<__m256>(b.part[i])));
#elif defined(__SSE2__)
    return reinterpret_cast<FloatPart>(_mm_min_ps(reinterpret_cast<__m128>(a.part[i]), reinterpret_cast<__m128>(b.part[i])));
#else
    return a.part[i] < b.part[i] ? a.part[i] : b.part[i];
#endif
  });
}
KVPOOL_LANES Floats largest(Floats a, Floats b) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE {
#if defined(__AVX512F__)
    return reinterpret_cast<FloatPart>(_mm512_maskz_max_ps(ALL_LANES, reinterpret_cast<__m512>(a.part[i]), reinterpret_cast<__m512>(b.part[i])));
#elif defined(__AVX2__)
    return reinterpret_cast<FloatPart>(_mm256_max_ps(reinterpret_cast<__m256>(a.part[i]), reinterpret_cast<__m256>(b.part[i])));
#elif defined(__SSE2__)
    return reinterpret_cast<FloatPart>(_mm_max_ps(reinterpret_cast<__m128>(a.part[i]), reinterpret_cast<__m128>(b.part[i])));
#else
    return a.part[i] > b.part[i] ? a.part[i] : b.part[i];
#endif
  });
}

template <size_t STEP, size_t... LANE>
KVPOOL_LANES FloatPart exchanged_part(FloatPart a, std::index_sequence<LANE...>) noexcept {
  return __builtin_shufflevector(a, a, (LANE ^ STEP)...);
}
// Lane i gets lane i ^ STEP.
template <size_t STEP>
KVPOOL_LANES Floats exchanged(Floats a) noexcept {
  return each_part<Floats>([&](size_t i) KVPOOL_INLINE {
    if constexpr (STEP < WIDTH) {
      return exchanged_part<STEP>(a.part[i], std::make_index_sequence<WIDTH>{});
    } else {
      return a.part[i ^ (STEP / WIDTH)];
    }
  });
}
// In each lane the sum, or the largest, of the eight lanes of its half. Each lane has the same bits, since a sum of two commutes.
KVPOOL_LANES Floats sum_of_halves(Floats a) noexcept {
  a = a + exchanged<4>(a);
  a = a + exchanged<2>(a);
  return a + exchanged<1>(a);
}
KVPOOL_LANES Floats largest_of_halves(Floats a) noexcept {
  a = largest(a, exchanged<4>(a));
  a = largest(a, exchanged<2>(a));
  return largest(a, exchanged<1>(a));
}
KVPOOL_LANES float first_lane(Floats a) noexcept { return a.part[0][0]; }
KVPOOL_LANES float sum_of_lanes(Floats a) noexcept { return first_lane(sum_of_halves(a + exchanged<8>(a))); }
template <size_t STEP>
KVPOOL_LANES Ints plus_exchanged(Ints a) noexcept { return a + as_ints(exchanged<STEP>(as_floats(a))); }
KVPOOL_LANES int32_t sum_of_lanes(Ints a) noexcept {
  return plus_exchanged<1>(plus_exchanged<2>(plus_exchanged<4>(plus_exchanged<8>(a)))).part[0][0];
}
// In each lane.
KVPOOL_LANES Floats largest_of_lanes(Floats a) noexcept { return largest_of_halves(largest(a, exchanged<8>(a))); }
KVPOOL_LANES float largest_lane(Floats a) noexcept { return first_lane(largest_of_lanes(a)); }

}  // namespace
}  // namespace kvpool::sparse_detail
