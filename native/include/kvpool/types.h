// Small shared types of the native core: ids, keys, tiers, page arithmetic.
//
// Not here: anything with behaviour or state. An id is a type of its own, so that a record is never taken for a
// class; an id that was not set says so through `valid()`. Everything here is immutable or a plain value and may
// be used from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvpool {

// Slots, arenas and segments are multiples of this: the alignment of O_DIRECT and of a memory page.
inline constexpr uint64_t PAGE_BYTES = 4096;
inline constexpr uint64_t HUGE_PAGE_BYTES = uint64_t{2} << 20;

[[nodiscard]] constexpr uint64_t round_up(uint64_t value, uint64_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

template <typename Tag>
class Id {
 public:
  constexpr Id() noexcept = default;
  constexpr explicit Id(uint32_t value) noexcept : value_(value) {}
  [[nodiscard]] constexpr bool valid() const noexcept { return value_ != UNSET; }
  [[nodiscard]] constexpr uint32_t value() const noexcept { return value_; }
  friend constexpr bool operator==(Id, Id) noexcept = default;

 private:
  static constexpr uint32_t UNSET = UINT32_MAX;
  uint32_t value_ = UNSET;
};

using RecordId = Id<struct RecordTag>;        // a chunk's record in the directory
using ClassId = Id<struct ClassTag>;          // a size class of slots
using NamespaceId = Id<struct NamespaceTag>;  // a trust domain + model + layout
using PageIndex = Id<struct PageTag>;         // arena offset / PAGE_BYTES

// The number of a tier is the level that events and lookups report: lower is faster.
enum class Tier : uint8_t { HBM = 0, DRAM = 1, SSD = 2, PEER = 3 };

[[nodiscard]] constexpr uint8_t tier_bit(Tier tier) noexcept {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(tier));
}

// A level that says "in no tier".
inline constexpr uint8_t NO_LEVEL = 0xFF;

inline constexpr size_t KEY_BYTES = 32;

// A chunk key as four words. Its bytes come from a cryptographic hash, so any word of it is a hash of the whole.
struct ChunkKey {
  uint64_t words[4];

  [[nodiscard]] static ChunkKey from_bytes(const uint8_t* bytes) noexcept {
    ChunkKey key;
    std::memcpy(key.words, bytes, KEY_BYTES);
    return key;
  }
  friend bool operator==(const ChunkKey&, const ChunkKey&) noexcept = default;
};
static_assert(sizeof(ChunkKey) == KEY_BYTES);

}  // namespace kvpool
