// An engine's layer and chunks beside it, on an emulated device, each with what it should have.
#pragma once

#include <algorithm>

#include "tests/device/device_setting.h"

namespace kvpool::testing {

struct Shape {
  uint32_t planes;
  uint64_t plane_block_bytes;
  uint64_t gap;  // between blocks
  size_t chunks;
  size_t chunk_blocks;
};

// An engine's layer on the device, with gaps between blocks and around planes, and what it should have.
struct Engine {
  static constexpr uint64_t BLOCKS = 40;
  static constexpr uint64_t MARGIN = 300;

  Engine(const std::shared_ptr<Device>& device, DeviceStream& on, Shape of) : shape(of), stream(on) {
    const uint64_t block_stride = shape.plane_block_bytes + shape.gap;
    const uint64_t plane_stride = BLOCKS * block_stride + MARGIN;
    bytes = random_bytes(2 * MARGIN + shape.planes * plane_stride, 5);
    memory = allocate(device, bytes.size());
    write_to(stream, memory->address(), bytes);
    view = {{nullptr, reinterpret_cast<uint8_t*>(memory->address() + MARGIN)}, shape.planes, BLOCKS, shape.plane_block_bytes,
            plane_stride, block_stride};
  }

  [[nodiscard]] uint64_t payload_bytes() const { return view.payload_bytes(shape.chunk_blocks); }
  [[nodiscard]] uint8_t* model(uint32_t plane, int64_t id) {
    return bytes.data() + MARGIN + plane * view.plane_stride + static_cast<uint64_t>(id) * view.block_stride;
  }
  // Calls `visit(model of a block's piece, its offset in its chunk's extent, chunk)` for all that are copied.
  template <typename Visit>
  void visit(const std::vector<int64_t>& ids, Visit visit) {
    for (size_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (uint32_t plane = 0; plane < shape.planes; ++plane) {
        for (size_t block = 0; block < shape.chunk_blocks; ++block) {
          const int64_t id = ids[chunk * shape.chunk_blocks + block];
          if (id != SKIP_BLOCK) {
            visit(model(plane, id), (plane * shape.chunk_blocks + block) * shape.plane_block_bytes, chunk);
          }
        }
      }
    }
  }
  [[nodiscard]] bool holds() { return read_from(stream, memory->address(), bytes.size()) == bytes; }

  const Shape shape;
  DeviceStream& stream;
  std::vector<uint8_t> bytes;
  std::shared_ptr<DeviceMemory> memory;
  CacheView view;
};

// Ids of distinct blocks, some of them neighbours, some skipped.
inline std::vector<int64_t> some_ids(size_t count, std::mt19937& dice) {
  std::vector<int64_t> ids(Engine::BLOCKS);
  for (size_t id = 0; id < ids.size(); ++id) {
    ids[id] = static_cast<int64_t>(id);
  }
  for (size_t swaps = 0; swaps < 10; ++swaps) {
    std::swap(ids[dice() % ids.size()], ids[dice() % ids.size()]);
  }
  ids.resize(count);
  for (int64_t& id : ids) {
    id = dice() % 5 == 0 ? SKIP_BLOCK : id;
  }
  return ids;
}

// Chunks' extents one behind the other, in memory of the host or the device.
struct Chunks {
  Chunks(const std::shared_ptr<Device>& device, DeviceStream& on, const Engine& engine, bool on_device)
      : stream(on),
        size(engine.payload_bytes()),
        mapping(Mapping::create("chunks", round_up(size * engine.shape.chunks + 64, 4096), false).mapping) {
    bytes = random_bytes(mapping->size(), 7);
    if (on_device) {
      memory = allocate(device, bytes.size());
      write_to(stream, memory->address(), bytes);
    } else {
      std::memcpy(mapping->data(), bytes.data(), bytes.size());
      pinned = PinnedMapping::pin(device, mapping, true);
    }
    for (size_t chunk = 0; chunk < engine.shape.chunks; ++chunk) {
      addresses.push_back((on_device ? memory->address() : address_of(mapping->data())) + 13 + chunk * size);
    }
  }
  [[nodiscard]] uint8_t* model(size_t chunk) { return bytes.data() + 13 + chunk * size; }
  [[nodiscard]] bool holds() {
    return memory != nullptr ? read_from(stream, memory->address(), bytes.size()) == bytes
                             : std::memcmp(mapping->data(), bytes.data(), bytes.size()) == 0;
  }

  DeviceStream& stream;
  const uint64_t size;
  const std::shared_ptr<Mapping> mapping;
  std::vector<uint8_t> bytes;
  std::shared_ptr<PinnedMapping> pinned;
  std::shared_ptr<DeviceMemory> memory;
  std::vector<uint64_t> addresses;
};

}  // namespace kvpool::testing
