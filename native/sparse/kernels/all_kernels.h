// One table of all kernels, for the source of each instruction set. Internal linkage, as lanes.h.
#pragma once

#include "sparse/kernels/summary_record.h"
#include "sparse/kernels/tail_kernel.h"

namespace kvpool::sparse_detail {
namespace {

constexpr SparseKernels KERNELS = {&build_clusters, &build_mean, &encode_query, &score_part, &share_blocks,
                                   &weigh_tail,     &sum_tail,   &rank_means,   &count_at_least};

}  // namespace
}  // namespace kvpool::sparse_detail
