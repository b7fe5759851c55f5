// One job of a copy pool that builds the summaries of saved chunks, behind their layers or in memory of the caller's.
//
//   RUNNING --all pieces done--> DONE
//      \----cancel, last running piece done--> ENDED
//
// A piece is one layer of one chunk. Whoever ends the last layer of a chunk zeroes what its summary extents have left and computes
// their checksums. Goes with the saves, behind all loads.
// Threads: any. All mutable state is guarded by `lock_`, which is not held while summaries are built.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "copy/copy_pool.h"
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

class SummaryJob final : public CopyJob {
 public:
  // REQUIRES: summary_fault(plan) is nullptr.
  explicit SummaryJob(SummaryPlan plan);

  uint64_t run_piece() override;
  [[nodiscard]] bool has_pieces() const override;
  // When it returns nothing is written any more.
  void cancel() override;
  [[nodiscard]] bool is_load() const noexcept override { return false; }

  // Whether all was built, or the job cancelled, within the time.
  [[nodiscard]] bool wait(double timeout_s) const;
  [[nodiscard]] bool is_cancelled() const;
  // Layers of chunks that are done.
  [[nodiscard]] uint64_t progress() const;
  // CRC-32C by [chunk][extent]; empty unless all was built.
  [[nodiscard]] std::vector<uint32_t> checksums() const;

 private:
  [[nodiscard]] uint8_t* extents_of(uint64_t chunk) const noexcept;
  void build_layer(uint64_t chunk, uint32_t layer) const noexcept;
  void finish_chunk(uint64_t chunk) noexcept;
  [[nodiscard]] bool is_whole() const { return settled_ == pieces_; }
  [[nodiscard]] bool is_at_rest() const { return running_ == 0 && (cancelled_ || is_whole()); }

  const SummaryPlan plan_;
  const uint64_t pieces_;

  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  uint64_t next_ = 0;
  uint64_t running_ = 0;
  uint64_t settled_ = 0;
  std::vector<uint32_t> built_layers_;  // by chunk
  bool cancelled_ = false;
  std::vector<uint32_t> checksums_;  // written by the threads, each its own words
};

}  // namespace kvpool
