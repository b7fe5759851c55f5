#include "sparse/sparse_path.h"

#include <atomic>

#include "base/check.h"
#include "base/processor.h"

namespace kvpool {
namespace {

SparsePath find_best_path() noexcept {
  for (const SparsePath path : {SparsePath::AVX512, SparsePath::AVX2}) {
    if (sparse_supports(path)) {
      return path;
    }
  }
  return SparsePath::PORTABLE;
}

std::atomic<SparsePath>& chosen_path() noexcept {
  static std::atomic<SparsePath> path = find_best_path();
  return path;
}

}  // namespace

bool sparse_supports(SparsePath path) noexcept {
#if defined(__x86_64__)
  if (path == SparsePath::AVX512) {
    const ProcessorFeatures& has = processor_features();
    return has.avx512f && has.avx512bw && has.avx512vl && has.avx512dq && has.avx512vnni && sparse_supports(SparsePath::AVX2);
  }
  if (path == SparsePath::AVX2) {
    return processor_features().avx2 && processor_features().fma && processor_features().f16c;
  }
#endif
  return path == SparsePath::PORTABLE;
}

SparsePath sparse_best_path() noexcept {
  static const SparsePath path = find_best_path();
  return path;
}

SparsePath sparse_path() noexcept { return chosen_path().load(std::memory_order_relaxed); }

const char* sparse_path_name(SparsePath path) noexcept {
  switch (path) {
    case SparsePath::AVX512:
      return "avx512";
    case SparsePath::AVX2:
      return "avx2";
    case SparsePath::PORTABLE:
      return "portable";
  }
  return "portable";
}

void choose_sparse_path(SparsePath path) noexcept {
  KVPOOL_CHECK(sparse_supports(path));
  chosen_path().store(path, std::memory_order_relaxed);
}

const sparse_detail::SparseKernels& sparse_kernels() noexcept {
#if defined(__x86_64__)
  switch (sparse_path()) {
    case SparsePath::AVX512:
      return sparse_detail::AVX512_KERNELS;
    case SparsePath::AVX2:
      return sparse_detail::AVX2_KERNELS;
    case SparsePath::PORTABLE:
      break;
  }
#endif
  return sparse_detail::PORTABLE_KERNELS;
}

}  // namespace kvpool
