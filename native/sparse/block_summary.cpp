#include "sparse/block_summary.h"

#include "base/check.h"
#include "sparse/sparse_path.h"

namespace kvpool {

void build_summary(SummaryForm form, KvType type, uint32_t head_dim, const uint8_t* keys, const uint8_t* values,
                   uint64_t token_stride, uint32_t tokens, uint8_t* out) noexcept {
  KVPOOL_CHECK(is_head_dim(head_dim));
  KVPOOL_CHECK(tokens >= 1 && tokens <= SUMMARY_TOKENS_MAX);
  const sparse_detail::BlockSource source{type, head_dim, tokens, token_stride, keys, values};
  const sparse_detail::SparseKernels& kernels = sparse_kernels();
  (form == SummaryForm::MEAN ? kernels.build_mean : kernels.build_clusters)(source, out);
}

}  // namespace kvpool
