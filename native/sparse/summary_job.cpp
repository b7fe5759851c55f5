#include "sparse/summary_job.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"
#include "copy/copy_checks.h"
#include "sparse/block_summary.h"

namespace kvpool {

const char* summary_fault(const SummaryPlan& plan) noexcept {
  if (!is_head_dim(plan.head_dim)) {
    return "head_dim must be a multiple of 32, 32 to 256";
  }
  if (plan.kv_heads == 0 || plan.layers == 0 || plan.extents == 0) {
    return "kv_heads, layers and extents must be positive";
  }
  if (plan.block_tokens == 0 || plan.block_tokens > SUMMARY_TOKENS_MAX || plan.chunk_tokens == 0 ||
      plan.chunk_tokens % plan.block_tokens != 0) {
    return "block_tokens must be 1 to 255 and divide chunk_tokens";
  }
  // Each below 2^32, and their product below 2^64 only if the first two are.
  const uint64_t token_bytes = uint64_t{plan.head_dim} * kv_type_bytes(plan.type) * 2;
  uint64_t layer_bytes = 0;
  if (__builtin_mul_overflow(token_bytes * plan.kv_heads, uint64_t{plan.chunk_tokens}, &layer_bytes) ||
      layer_bytes != plan.layer_bytes) {
    return "keys and values of a chunk do not make up its layer";
  }
  uint64_t room = 0;
  uint64_t needed = 0;
  if (__builtin_mul_overflow(plan.layer_bytes, uint64_t{plan.extents}, &room) ||
      __builtin_mul_overflow(plan.layer_records_bytes(), uint64_t{plan.layers}, &needed) || needed > room) {
    return "the extents have no room for the summaries";
  }
  const bool is_in_place = plan.target == nullptr;
  const uint32_t all = plan.layers + (is_in_place ? plan.extents : 0);
  if (all < plan.layers) {
    return "too many extents";
  }
  if (is_in_place && !plan.arena->is_writable()) {
    return "the arena is mapped read-only";
  }
  uint64_t target_bytes = 0;
  if (!is_in_place && (__builtin_mul_overflow(room, uint64_t{plan.offsets.size()}, &target_bytes) ||
                       target_bytes != plan.target_bytes)) {
    return "the target must be extents * layer_bytes for each chunk";
  }
  return extents_fault(*plan.arena, plan.offsets, all, plan.layer_bytes);
}

SummaryJob::SummaryJob(SummaryPlan plan)
    : PieceJob(plan.offsets.size() * plan.layers),
      plan_(std::move(plan)),
      built_layers_(plan_.offsets.size()),
      checksums_(plan_.offsets.size() * plan_.extents) {
  KVPOOL_CHECK(summary_fault(plan_) == nullptr);
}

bool SummaryJob::claim(Piece& piece) {
  if (!has_next()) {
    return false;
  }
  piece = {static_cast<uint32_t>(next_ % plan_.layers), 1, next_ / plan_.layers, 1};
  ++next_;
  return true;
}

uint64_t SummaryJob::copy(const Piece& piece) {
  build_layer(piece.first, piece.extent);
  bool is_last = false;
  {
    const std::lock_guard guard(lock_);
    is_last = ++built_layers_[piece.first] == plan_.layers;
  }
  if (is_last) {
    finish_chunk(piece.first);
  }
  return plan_.layer_bytes;
}

uint8_t* SummaryJob::extents_of(uint64_t chunk) const noexcept {
  if (plan_.target != nullptr) {
    return plan_.target + chunk * plan_.extents * plan_.layer_bytes;
  }
  return plan_.arena->data() + plan_.offsets[chunk] + plan_.layers * plan_.layer_bytes;
}

void SummaryJob::build_layer(uint64_t chunk, uint32_t layer) const noexcept {
  const uint64_t head_bytes = uint64_t{plan_.head_dim} * kv_type_bytes(plan_.type);
  const uint64_t token_bytes = head_bytes * plan_.kv_heads;
  const uint64_t record_bytes = summary_bytes(plan_.form, plan_.head_dim);
  const uint8_t* keys = plan_.arena->data() + plan_.offsets[chunk] + layer * plan_.layer_bytes;
  const uint8_t* values = keys + plan_.layer_bytes / 2;
  uint8_t* out = extents_of(chunk) + layer * plan_.layer_records_bytes();
  for (uint64_t token = 0; token < plan_.chunk_tokens; token += plan_.block_tokens) {
    for (uint32_t kv_head = 0; kv_head < plan_.kv_heads; ++kv_head) {
      const uint64_t at = token * token_bytes + kv_head * head_bytes;
      build_summary(plan_.form, plan_.type, plan_.head_dim, keys + at, values + at, token_bytes, plan_.block_tokens, out);
      out += record_bytes;
    }
  }
}

void SummaryJob::finish_chunk(uint64_t chunk) noexcept {
  uint8_t* extents = extents_of(chunk);
  const uint64_t used = plan_.layers * plan_.layer_records_bytes();
  std::memset(extents + used, 0, plan_.extents * plan_.layer_bytes - used);
  for (uint32_t extent = 0; extent < plan_.extents; ++extent) {
    checksums_[chunk * plan_.extents + extent] = crc32c(0, extents + extent * plan_.layer_bytes, plan_.layer_bytes);
  }
}

std::vector<uint32_t> SummaryJob::checksums() const {
  const std::lock_guard guard(lock_);
  return running_ == 0 && is_whole() ? checksums_ : std::vector<uint32_t>();
}

}  // namespace kvpool
