#include "hash/packed_ids.h"

#include <limits>

namespace kvpool {
namespace {

// The type bytes of msgpack: github.com/msgpack/msgpack, spec.md.
constexpr uint8_t ARRAY_15 = 0x90, ARRAY_16 = 0xdc, ARRAY_32 = 0xdd;
constexpr uint8_t UINT_8 = 0xcc, UINT_16 = 0xcd, UINT_32 = 0xce;
constexpr uint8_t INT_8 = 0xd0, INT_16 = 0xd1, INT_32 = 0xd2;
constexpr size_t ITEM_BYTES_MAX = 5;
constexpr int32_t SHORT_MAX = 127, SHORT_MIN = -32;

uint8_t* put(uint8_t* at, uint32_t value, unsigned bytes) {
  for (unsigned shift = 8 * bytes; shift > 0; shift -= 8) {
    *at++ = static_cast<uint8_t>(value >> (shift - 8));
  }
  return at;
}

uint8_t* put_typed(uint8_t* at, uint8_t type, uint32_t value, unsigned bytes) {
  *at++ = type;
  return put(at, value, bytes);
}

uint8_t* put_count(uint8_t* at, size_t count) {
  const auto value = static_cast<uint32_t>(count);
  if (count <= 15) {
    return put(at, ARRAY_15 | value, 1);
  }
  return count <= std::numeric_limits<uint16_t>::max() ? put_typed(at, ARRAY_16, value, 2) : put_typed(at, ARRAY_32, value, 4);
}

uint8_t* put_id(uint8_t* at, int32_t id) {
  const auto value = static_cast<uint32_t>(id);
  if (id >= SHORT_MIN && id <= SHORT_MAX) {
    return put(at, value, 1);
  }
  if (id >= 0) {
    return value <= std::numeric_limits<uint8_t>::max()    ? put_typed(at, UINT_8, value, 1)
           : value <= std::numeric_limits<uint16_t>::max() ? put_typed(at, UINT_16, value, 2)
                                                           : put_typed(at, UINT_32, value, 4);
  }
  return id >= std::numeric_limits<int8_t>::min()    ? put_typed(at, INT_8, value, 1)
         : id >= std::numeric_limits<int16_t>::min() ? put_typed(at, INT_16, value, 2)
                                                     : put_typed(at, INT_32, value, 4);
}

}  // namespace

std::string pack_ids(std::span<const int32_t> ids) {
  std::string packed(ITEM_BYTES_MAX * (ids.size() + 1), '\0');
  auto* const begin = reinterpret_cast<uint8_t*>(packed.data());
  uint8_t* at = put_count(begin, ids.size());
  for (const int32_t id : ids) {
    at = put_id(at, id);
  }
  packed.resize(static_cast<size_t>(at - begin));
  return packed;
}

}  // namespace kvpool
