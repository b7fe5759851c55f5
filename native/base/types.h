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
// Generations end here: a number as great was never given, and what says so is damaged.
inline constexpr uint64_t GENERATION_END = uint64_t{1} << 62;
inline constexpr uint64_t PAGE_BYTES = 4096;
inline constexpr uint64_t HUGE_PAGE_BYTES = uint64_t{2} << 20;

[[nodiscard]] constexpr uint64_t round_up(uint64_t value, uint64_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

// A number of `Stored` bits, of which the largest says "not set".
template <typename Tag, typename Value = uint32_t, typename Stored = Value>
class Id {
 public:
  constexpr Id() noexcept = default;
  constexpr explicit Id(Value value) noexcept : value_(static_cast<Stored>(value)) {}
  [[nodiscard]] constexpr bool valid() const noexcept { return value_ != UNSET; }
  [[nodiscard]] constexpr Value value() const noexcept { return value_; }
  friend constexpr bool operator==(Id, Id) noexcept = default;

 private:
  static constexpr Stored UNSET = static_cast<Stored>(-1);
  Stored value_ = UNSET;
};

using RecordId = Id<struct RecordTag>;        // a chunk's record in the directory
using ClassId = Id<struct ClassTag, uint32_t, uint8_t>;  // a size class of slots: SlotArena has fewer than 255
using NamespaceId = Id<struct NamespaceTag>;  // a trust domain + model + layout
using HolderId = Id<struct HolderTag>;        // who protects chunks from eviction: a client's connection
inline constexpr HolderId OWN_WRITER{0};      // who writes to a slot is this process itself, and no connection's number is 0
using HoldId = uint64_t;                      // of holds, pins and reservations alike; 0 names none, and none repeats
using PageIndex = Id<struct PageTag, uint64_t>;  // offset in an arena, or over all files, / PAGE_BYTES

// A page index of 48 bits, as records keep it.
class PackedPage {
 public:
  constexpr PackedPage() noexcept = default;
  constexpr PackedPage(PageIndex page) noexcept  // NOLINT: the same thing in less room
      : words_{static_cast<uint16_t>(page.value()), static_cast<uint16_t>(page.value() >> 16),
               static_cast<uint16_t>(page.value() >> 32)} {}
  constexpr operator PageIndex() const noexcept {  // NOLINT
    const uint64_t value = packed();
    return value == UNSET ? PageIndex() : PageIndex(value);
  }
  [[nodiscard]] constexpr uint64_t value() const noexcept { return PageIndex(*this).value(); }
  [[nodiscard]] constexpr bool valid() const noexcept { return packed() != UNSET; }

 private:
  [[nodiscard]] constexpr uint64_t packed() const noexcept {
    return uint64_t{words_[2]} << 32 | (uint32_t{words_[1]} << 16 | words_[0]);
  }
  static constexpr uint64_t UNSET = (uint64_t{1} << 48) - 1;
  uint16_t words_[3] = {UINT16_MAX, UINT16_MAX, UINT16_MAX};
};
static_assert(sizeof(PackedPage) == 6);

// Which slot of which region: what its words in the shared index are found by. Regions are memory that slots are cut from, numbered
// in an index; a slot keeps its number for as long as its memory is cut the same way. One number on the wire: the region in the
// upper half.
struct SlotAddress {
  uint32_t region = UINT32_MAX;
  uint32_t number = UINT32_MAX;

  [[nodiscard]] constexpr bool valid() const noexcept { return region != UINT32_MAX; }
  [[nodiscard]] constexpr uint64_t packed() const noexcept { return uint64_t{region} << 32 | number; }
  [[nodiscard]] static constexpr SlotAddress unpacked(uint64_t packed) noexcept {
    return {static_cast<uint32_t>(packed >> 32), static_cast<uint32_t>(packed)};
  }
  friend constexpr bool operator==(SlotAddress, SlotAddress) noexcept = default;
};

// The number of a tier is the level that events and lookups report: lower is faster.
enum class Tier : uint8_t { HBM = 0, DRAM = 1, SSD = 2, PEER = 3 };
inline constexpr uint32_t MAX_TIERS = 8;  // a bit of a byte each

[[nodiscard]] constexpr uint8_t tier_bit(Tier tier) noexcept {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(tier));
}

// A level that says "in no tier".
inline constexpr uint8_t NO_LEVEL = 0xFF;
inline constexpr size_t TIER_LEVELS = 4;

inline constexpr size_t KEY_BYTES = 32;

// A chunk key as four words. Its bytes come from a cryptographic hash, so any word of it is a hash of the whole.
struct ChunkKey {
  uint64_t words[4];

  [[nodiscard]] static ChunkKey from_bytes(const uint8_t* bytes) noexcept {
    // Word by word: as one piece it would be copied through memory where its words are used at once.
    ChunkKey key;
    std::memcpy(&key.words[0], bytes, sizeof(uint64_t));
    std::memcpy(&key.words[1], bytes + sizeof(uint64_t), sizeof(uint64_t));
    std::memcpy(&key.words[2], bytes + 2 * sizeof(uint64_t), sizeof(uint64_t));
    std::memcpy(&key.words[3], bytes + 3 * sizeof(uint64_t), sizeof(uint64_t));
    return key;
  }
  friend bool operator==(const ChunkKey&, const ChunkKey&) noexcept = default;
};
static_assert(sizeof(ChunkKey) == KEY_BYTES);

}  // namespace kvpool
