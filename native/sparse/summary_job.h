// One job of a copy pool that builds the summaries of saved chunks, behind their layers or in memory of the caller's.
//
// A piece is one layer of one chunk. Whoever ends the last layer of a chunk zeroes what its summary extents have left and computes
// their checksums. Goes with the saves, behind all loads.
// Threads: any; see PieceJob.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "copy/piece_job.h"
#include "sparse/summary_format.h"

namespace kvpool {

// A layer of a chunk is its keys, then its values: [chunk_tokens][kv_heads][head_dim] each. Summaries of a chunk are
// [layer][block][kv_head] records in `extents` extents of layer_bytes: behind the layers in the arena where `target` is nullptr,
// else at target + chunk * extents * layer_bytes.
struct SummaryPlan {
  std::shared_ptr<const Mapping> arena;
  std::vector<uint64_t> offsets;  // of chunks
  uint8_t* target = nullptr;
  uint64_t target_bytes = 0;
  SummaryForm form = SummaryForm::CLUSTERS7;
  KvType type = KvType::BFLOAT16;
  uint32_t head_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t layers = 0;
  uint64_t layer_bytes = 0;
  uint32_t chunk_tokens = 0;
  uint32_t block_tokens = 0;
  uint32_t extents = 0;

  [[nodiscard]] uint64_t layer_records_bytes() const noexcept {
    return uint64_t{chunk_tokens / block_tokens} * kv_heads * summary_bytes(form, head_dim);
  }
};

// What is wrong with a plan, or nullptr.
[[nodiscard]] const char* summary_fault(const SummaryPlan& plan) noexcept;

class SummaryJob final : public PieceJob {
 public:
  // REQUIRES: summary_fault(plan) is nullptr.
  explicit SummaryJob(SummaryPlan plan);

  [[nodiscard]] bool is_load() const noexcept override { return false; }

  // CRC-32C by [chunk][extent]; empty unless all was built.
  [[nodiscard]] std::vector<uint32_t> checksums() const;

 private:
  [[nodiscard]] uint8_t* extents_of(uint64_t chunk) const noexcept;
  void build_layer(uint64_t chunk, uint32_t layer) const noexcept;
  void finish_chunk(uint64_t chunk) noexcept;
  bool claim(Piece& piece) override;
  uint64_t copy(const Piece& piece) override;
  bool settle(const Piece&) override { return false; }
  [[nodiscard]] bool has_next() const override { return next_ < wanted_; }

  const SummaryPlan plan_;

  uint64_t next_ = 0;                   // guarded by lock_
  std::vector<uint32_t> built_layers_;  // by chunk; guarded by lock_
  std::vector<uint32_t> checksums_;  // written by the threads, each its own words
};

}  // namespace kvpool
