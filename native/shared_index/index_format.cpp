// Sums of the index's layout, and the one look that a reader takes at its header. See index_format.h.
#include "shared_index/index_format.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace kvpool {
namespace {

// Beyond any machine: in these bounds no sum of a layout overflows, and numbers of slots and checksums fit 32 bits.
constexpr uint64_t REGION_BYTES_MAX = uint64_t{1} << 48;

bool is_in_range(const RegionShape& region) noexcept {
  return region.bytes != 0 && region.bytes % PAGE_BYTES == 0 && region.bytes <= REGION_BYTES_MAX && region.slots != 0 &&
         region.slots < UINT32_MAX && region.checksums != 0 && region.checksums < UINT32_MAX &&
         static_cast<size_t>(region.tier) < TIER_LEVELS && region.backing >= Backing::MEMFD && region.backing <= Backing::FILE;
}

bool lies_inside(uint64_t offset, uint64_t count, uint64_t item_bytes, uint64_t size) noexcept {
  return offset % PART_ALIGNMENT == 0 && offset >= PAGE_BYTES && offset <= size && count <= (size - offset) / item_bytes;
}

}  // namespace

uint64_t IndexShape::slots_for(uint64_t entries) noexcept {
  return std::max(MIN_TABLE_SLOTS, (entries + 4) / 5 * 8);
}

bool IndexShape::has_further_tiers() const noexcept {
  return std::any_of(regions.begin(), regions.end(), [&](const RegionShape& one) { return one.tier != regions.front().tier; });
}

bool IndexShape::valid() const noexcept {
  return slots >= MIN_TABLE_SLOTS && slots <= MAX_TABLE_SLOTS && !regions.empty() && regions.size() <= REGIONS_MAX &&
         std::all_of(regions.begin(), regions.end(), is_in_range);
}

IndexLayout IndexShape::layout() const {
  IndexLayout layout;
  uint64_t at = table_end();
  const auto place = [&at](uint64_t count, uint64_t item_bytes) {
    const uint64_t offset = at;
    at = round_up(at + count * item_bytes, PART_ALIGNMENT);
    return offset;
  };
  if (has_further_tiers()) {
    layout.further_offset = place(slots, sizeof(FurtherSlot));
  }
  for (const RegionShape& region : regions) {
    const uint64_t words_offset = place(region.slots, sizeof(SlotWords));
    const uint64_t checksums_offset = place(region.checksums, sizeof(uint32_t));
    layout.regions.push_back({region.bytes, region.slots, region.checksums, words_offset, checksums_offset,
                              static_cast<uint8_t>(region.tier), static_cast<uint8_t>(region.backing), {}});
  }
  layout.total_bytes = round_up(at, PAGE_BYTES);
  return layout;
}

bool read_index_header(const uint8_t* region, uint64_t size, FoundIndex& found) {
  if (size < PAGE_BYTES) {
    return false;
  }
  // Not the counters between the two, which change.
  IndexHeader header{};
  std::memcpy(static_cast<void*>(&header), region, offsetof(IndexHeader, moves));
  std::memcpy(header.region, region + offsetof(IndexHeader, region), sizeof(header.region));
  if (std::memcmp(header.magic, INDEX_MAGIC, sizeof(INDEX_MAGIC)) != 0 || header.version != INDEX_VERSION ||
      header.regions > REGIONS_MAX) {
    return false;
  }
  found.shape = {header.slots, {}};
  found.layout = {header.further_offset, {}, size};
  found.seed = header.seed;
  for (uint32_t number = 0; number < header.regions; ++number) {
    const RegionHeader& one = header.region[number];
    found.shape.regions.push_back(
        {one.bytes, one.slots, one.checksums, static_cast<Tier>(one.tier), static_cast<Backing>(one.backing)});
    found.layout.regions.push_back(one);
  }
  if (!found.shape.valid() || !lies_inside(PAGE_BYTES, header.slots, sizeof(TableSlot), size) ||
      found.shape.has_further_tiers() != (header.further_offset != 0) ||
      (header.further_offset != 0 && !lies_inside(header.further_offset, header.slots, sizeof(FurtherSlot), size))) {
    return false;
  }
  return std::all_of(found.layout.regions.begin(), found.layout.regions.end(), [size](const RegionHeader& one) {
    return lies_inside(one.words_offset, one.slots, sizeof(SlotWords), size) &&
           lies_inside(one.checksums_offset, one.checksums, sizeof(uint32_t), size);
  });
}

}  // namespace kvpool
