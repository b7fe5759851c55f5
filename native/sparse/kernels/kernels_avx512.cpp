// The kernels compiled with AVX-512 with VNNI, and -ffp-contract=off as with each instruction set.
#include "sparse/kernels/all_kernels.h"

namespace kvpool::sparse_detail {

const SparseKernels AVX512_KERNELS = KERNELS;

}  // namespace kvpool::sparse_detail
