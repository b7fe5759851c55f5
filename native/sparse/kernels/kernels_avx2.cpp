// The kernels compiled with -mavx2 -mfma -mf16c, and -ffp-contract=off as with each instruction set.
#include "sparse/kernels/all_kernels.h"

namespace kvpool::sparse_detail {

const SparseKernels AVX2_KERNELS = KERNELS;

}  // namespace kvpool::sparse_detail
