#include "copy/extent_copy.h"

#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"

namespace kvpool {

uint32_t gather_layer(const CacheView& view, size_t layer, std::span<const int64_t> block_ids,
                      uint8_t* extent) noexcept {
  const size_t variant = copy_variant(CopyKind::SAVE, view.plane_block_bytes);
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (size_t number = 0; number < block_ids.size(); ++number) {
      const uint8_t* const block = view.block(layer, plane, block_ids[number]);
      const uint8_t* const next = number + 1 < block_ids.size() ? view.block(layer, plane, block_ids[number + 1])
                                  : plane + 1 < view.planes     ? view.block(layer, plane + 1, block_ids[0])
                                                                : block;
      crc = copy_piece(variant, crc, extent, block, view.plane_block_bytes, next);
      extent += view.plane_block_bytes;
    }
  }
  copy_fence();
  return crc;
}

uint32_t scatter_layer(const CacheView& view, size_t layer, std::span<const int64_t> block_ids,
                       const uint8_t* extent) noexcept {
  const size_t variant = copy_variant(CopyKind::LOAD, view.plane_block_bytes);
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : block_ids) {
      const uint8_t* const next = extent + view.plane_block_bytes;
      crc = id == SKIP_BLOCK ? crc32c(crc, extent, view.plane_block_bytes)
                             : copy_piece(variant, crc, view.block(layer, plane, id), extent, view.plane_block_bytes, next);
      extent = next;
    }
  }
  copy_fence();
  return crc;
}

void copy_layers(uint8_t* target, const uint8_t* source, uint32_t layers, uint64_t layer_bytes,
                 uint32_t* crcs) noexcept {
  for (uint32_t layer = 0; layer < layers; ++layer) {
    crcs[layer] = copy_crc32c(0, target + layer * layer_bytes, source + layer * layer_bytes, layer_bytes);
  }
  copy_fence();
}

}  // namespace kvpool
