// CRC-32C by folding vectors with carry-less multiplication, alone or while copying the same registers.
//
// Included by one source per instruction set, each compiled with its own flags; `Ops` is what that set brings. A fold
// replaces 16 bytes by their remainder `distance` bits further on: the low half times x^(distance+31), the high half times
// x^(distance-33), modulo the polynomial, everything bit-reflected. What is left at the end is one vector with the same
// remainder as the whole input, and the CRC instruction finishes that.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "checksum/crc32c_paths.h"

namespace kvpool::crc32c_detail {

inline constexpr size_t CACHE_LINE = 64;
inline constexpr unsigned FEW_REGISTERS = 4;

// x^n modulo the polynomial, reflected.
constexpr uint64_t power_of_x(unsigned n) {
  uint32_t remainder = 0x80000000U;
  for (unsigned i = 0; i < n; ++i) {
    remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? POLYNOMIAL : 0U);
  }
  return remainder;
}

enum class Store { NONE, PLAIN, STREAM };

template <typename Ops, Store Kind>
[[gnu::always_inline]] inline typename Ops::Vector move_vector(uint8_t* target, const uint8_t* source,
                                                               size_t offset) noexcept {
  typename Ops::Vector vector = Ops::load(source + offset);
  if constexpr (Kind != Store::NONE) {
    Ops::keep(vector);  // as load_once does
  }
  if constexpr (Kind == Store::PLAIN) {
    Ops::store(target + offset, vector);
  } else if constexpr (Kind == Store::STREAM) {
    Ops::stream(target + offset, vector);
  }
  return vector;
}

template <Prefetch Kind>
[[gnu::always_inline]] inline void prefetch_lines(const uint8_t* from, size_t size) noexcept {
  for (size_t line = 0; line < size; line += CACHE_LINE) {
    if constexpr (Kind == Prefetch::INTO_L2) {
      __builtin_prefetch(from + line, 0, 2);
    } else {
      __builtin_prefetch(from + line, 0, 3);
    }
  }
}

// The lines of one stride, `ahead` of those that are copied now.
template <Prefetch Kind, size_t Stride>
[[gnu::always_inline]] inline void prefetch_stride(const uint8_t* source, size_t size, const uint8_t* next,
                                                   size_t ahead) noexcept {
  if constexpr (Kind == Prefetch::INTO_L1 || Kind == Prefetch::INTO_L2) {
    prefetch_lines<Kind>(ahead < size ? source + ahead : next + (ahead - size), Stride);
  }
}

// REQUIRES: size is a multiple of a vector, at least `Registers` of them; for STREAM the target is aligned to a vector.
// `next` is as long as the source.
template <typename Ops, Store Kind, unsigned Registers, Prefetch Ahead, size_t AheadBytes>
uint32_t fold_vectors(uint32_t state, uint8_t* target, const uint8_t* source, size_t size, const uint8_t* next) noexcept {
  using Vector = typename Ops::Vector;
  constexpr size_t STEP = sizeof(Vector);
  constexpr size_t STRIDE = Registers * STEP;
  const Vector by_stride = Ops::template constants<power_of_x(STRIDE * 8 + 31), power_of_x(STRIDE * 8 - 33)>();
  const Vector by_step = Ops::template constants<power_of_x(STEP * 8 + 31), power_of_x(STEP * 8 - 33)>();
  const size_t ahead = std::min(AheadBytes, size);
  if constexpr (Ahead == Prefetch::NEXT_PIECE) {
    prefetch_lines<Ahead>(next, ahead);
  }
  Vector folded[Registers];
  prefetch_stride<Ahead, STRIDE>(source, size, next, ahead);
  for (unsigned i = 0; i < Registers; ++i) {
    folded[i] = move_vector<Ops, Kind>(target, source, i * STEP);
  }
  folded[0] = Ops::mix_in(folded[0], state);
  size_t offset = STRIDE;
  for (; offset + STRIDE <= size; offset += STRIDE) {
    prefetch_stride<Ahead, STRIDE>(source, size, next, offset + ahead);
#pragma GCC unroll 8
    for (unsigned i = 0; i < Registers; ++i) {
      folded[i] = Ops::fold(folded[i], by_stride, move_vector<Ops, Kind>(target, source, offset + i * STEP));
    }
  }
  Vector all = folded[0];
#pragma GCC unroll 8
  for (unsigned i = 1; i < Registers; ++i) {
    all = Ops::fold(all, by_step, folded[i]);
  }
  for (; offset < size; offset += STEP) {
    all = Ops::fold(all, by_step, move_vector<Ops, Kind>(target, source, offset));
  }
  alignas(STEP) uint8_t rest[STEP];
  Ops::store(rest, all);
  return Ops::update(0, rest, STEP);
}

using FoldFunction = uint32_t (*)(uint32_t, uint8_t*, const uint8_t*, size_t, const uint8_t*) noexcept;

template <typename Ops, size_t... Variant>
consteval std::array<FoldFunction, sizeof...(Variant)> make_fold_table(std::index_sequence<Variant...>) {
  return {&fold_vectors<Ops, COPY_VARIANTS[Variant].is_streaming ? Store::STREAM : Store::PLAIN,
                        COPY_VARIANTS[Variant].registers, COPY_VARIANTS[Variant].prefetch,
                        COPY_VARIANTS[Variant].prefetch_bytes>...};
}

template <typename Ops>
uint32_t update_folding(uint32_t state, const uint8_t* data, size_t size) noexcept {
  constexpr size_t STEP = sizeof(typename Ops::Vector);
  const size_t folded = size < FEW_REGISTERS * STEP ? 0 : size / STEP * STEP;
  if (folded > 0) {
    state = fold_vectors<Ops, Store::NONE, FEW_REGISTERS, Prefetch::NONE, 0>(state, nullptr, data, folded, data);
  }
  return Ops::update(state, data + folded, size - folded);
}

template <typename Ops>
uint32_t copy_folding(size_t variant, uint32_t state, uint8_t* target, const uint8_t* source, size_t size,
                      const uint8_t* next) noexcept {
  static constexpr auto FOLDS = make_fold_table<Ops>(std::make_index_sequence<COPY_VARIANTS.size()>{});
  constexpr size_t STEP = sizeof(typename Ops::Vector);
  const auto misalignment = reinterpret_cast<uintptr_t>(target) % STEP;
  const size_t head = std::min(size, misalignment == 0 ? 0 : STEP - misalignment);
  state = Ops::copy(state, target, source, head);
  const size_t folded = size - head < FEW_REGISTERS * STEP ? 0 : (size - head) / STEP * STEP;
  if (folded > 0) {
    const size_t fitting = folded < COPY_VARIANTS[variant].registers * STEP ? 0 : variant;
    state = FOLDS[fitting](state, target + head, source + head, folded, next);
  }
  const size_t done = head + folded;
  return Ops::copy(state, target + done, source + done, size - done);
}

}  // namespace kvpool::crc32c_detail
