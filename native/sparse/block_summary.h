// Builds summaries of blocks of keys and values: one block of one KV head, or all KV heads of a block.
//
// What it is: the entry to the kernels, on the instruction set that sparse_path.h has chosen. What it is not: an owner of memory.
// A block with NaN or infinity, or with numbers whose scales have no fp16, gets a summary that says so: recall takes it always.
// The same tokens make the same bytes on each machine. Any thread; half a megabyte of its stack is used.
#pragma once

#include <cstdint>

#include "sparse/summary_format.h"

namespace kvpool {

// Token t's key is at keys + t * token_stride (bytes), and its value likewise. `out` has room for summary_bytes(form, head_dim).
// REQUIRES: is_head_dim(head_dim); 1 <= tokens <= SUMMARY_TOKENS_MAX.
void build_summary(SummaryForm form, KvType type, uint32_t head_dim, const uint8_t* keys, const uint8_t* values,
                   uint64_t token_stride, uint32_t tokens, uint8_t* out) noexcept;

}  // namespace kvpool
