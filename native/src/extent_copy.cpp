#include "kvpool/extent_copy.h"

#include "kvpool/crc32c.h"

namespace kvpool {

uint32_t gather_layer(const CacheView& view, size_t layer, std::span<const int64_t> block_ids,
                      uint8_t* extent) noexcept {
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : block_ids) {
      crc = copy_crc32c(crc, extent, view.block(layer, plane, id), view.plane_block_bytes);
      extent += view.plane_block_bytes;
    }
  }
  copy_fence();
  return crc;
}

uint32_t scatter_layer(const CacheView& view, size_t layer, std::span<const int64_t> block_ids,
                       const uint8_t* extent) noexcept {
  uint32_t crc = 0;
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : block_ids) {
      crc = id == SKIP_BLOCK ? crc32c(crc, extent, view.plane_block_bytes)
                             : copy_crc32c(crc, view.block(layer, plane, id), extent, view.plane_block_bytes);
      extent += view.plane_block_bytes;
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
