// The kernels compiled with the flags of the rest, and -ffp-contract=off as with each instruction set.
#include "sparse/kernels/all_kernels.h"

namespace kvpool::sparse_detail {

const SparseKernels PORTABLE_KERNELS = KERNELS;

}  // namespace kvpool::sparse_detail
