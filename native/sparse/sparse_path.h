// Which instruction set builds summaries and recalls blocks.
//
// The best that the machine has, chosen once at run time. Results are the same bits with each. Any thread.
#pragma once

#include <cstdint>

#include "sparse/kernels/sparse_kernels.h"

namespace kvpool {

enum class SparsePath : uint8_t { PORTABLE, AVX2, AVX512 };

[[nodiscard]] bool sparse_supports(SparsePath path) noexcept;
[[nodiscard]] SparsePath sparse_best_path() noexcept;

// What runs: the best one, or what a test has chosen.
[[nodiscard]] SparsePath sparse_path() noexcept;
[[nodiscard]] const char* sparse_path_name(SparsePath path) noexcept;

// For tests, of the whole process. REQUIRES: the machine has it.
void choose_sparse_path(SparsePath path) noexcept;

[[nodiscard]] const sparse_detail::SparseKernels& sparse_kernels() noexcept;

}  // namespace kvpool
