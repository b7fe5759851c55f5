// Headers of the shared index that were cut short or forged, and what an index of several regions is made of.
#include <cstring>
#include <functional>

#include "tests/harness.h"
#include "shared_index/chunk_table.h"

using namespace kvpool;

namespace {

constexpr uint8_t EPOCH[16] = {7};

IndexShape two_tiers() {
  return {64, {{64 * PAGE_BYTES, 16, 100}, {32 * PAGE_BYTES, 8, 33, Tier::HBM, Backing::DEVICE}}};
}

std::shared_ptr<Mapping> formatted(const IndexShape& shape) {
  auto mapping = Mapping::create("index", shape.total_bytes(), false).mapping;
  const ChunkTable table(mapping, shape, EPOCH);
  return mapping;
}

// Whether a reader takes an index whose header was changed.
bool is_taken(const IndexShape& shape, const std::function<void(IndexHeader&)>& forge) {
  const auto mapping = formatted(shape);
  forge(*reinterpret_cast<IndexHeader*>(mapping->data()));
  return IndexView::attach(mapping) != nullptr;
}

}  // namespace

TEST(parts_begin_at_whole_lines_and_do_not_overlap) {
  const IndexShape shape = two_tiers();
  const IndexLayout layout = shape.layout();
  EXPECT(layout.further_offset == PAGE_BYTES + 64 * 64);
  uint64_t end = layout.further_offset + 64 * 64;
  for (const RegionHeader& region : layout.regions) {
    EXPECT(region.words_offset >= end);
    EXPECT(region.words_offset % 64 == 0);
    EXPECT(region.checksums_offset >= region.words_offset + region.slots * sizeof(SlotWords));
    EXPECT(region.checksums_offset % 64 == 0);
    end = region.checksums_offset + region.checksums * sizeof(uint32_t);
  }
  EXPECT(layout.total_bytes >= end);
  EXPECT(layout.total_bytes % PAGE_BYTES == 0);
  // Nothing is kept for further tiers where there are none.
  const IndexShape one{64, {{64 * PAGE_BYTES, 16, 100}, {32 * PAGE_BYTES, 8, 33}}};
  EXPECT(one.layout().further_offset == 0);
  EXPECT(one.layout().total_bytes < layout.total_bytes);
}

TEST(a_reader_sees_the_regions_as_they_were_made) {
  const auto view = IndexView::attach(formatted(two_tiers()));
  EXPECT(view != nullptr);
  const auto& regions = view->shape().regions;
  EXPECT(regions.size() == 2);
  EXPECT(regions[0].tier == Tier::DRAM);
  EXPECT(regions[0].backing == Backing::MEMFD);
  EXPECT(regions[1].tier == Tier::HBM);
  EXPECT(regions[1].backing == Backing::DEVICE);
  EXPECT(regions[1].bytes == 32 * PAGE_BYTES);
  EXPECT(view->landing_word({1, 7}) != nullptr);
  EXPECT(view->landing_word({1, 8}) == nullptr);
  EXPECT(view->covers({1, 7}, 33));
  EXPECT(!view->covers({1, 7}, 34));
}

TEST(an_index_cut_short_is_not_read) {
  const IndexShape shape = two_tiers();
  const auto whole = formatted(shape);
  for (uint64_t pages = 1; pages <= shape.total_bytes() / PAGE_BYTES; ++pages) {
    const auto part = Mapping::create("part", pages * PAGE_BYTES, false).mapping;
    std::memcpy(part->data(), whole->data(), pages * PAGE_BYTES);
    const IndexLayout layout = shape.layout();
    const uint64_t end = layout.regions[1].checksums_offset + layout.regions[1].checksums * sizeof(uint32_t);
    EXPECT((IndexView::attach(part) != nullptr) == (pages * PAGE_BYTES >= end));
  }
  EXPECT(IndexView::attach(Mapping::create("less", 512, false).mapping) == nullptr);
}

TEST(a_forged_header_is_not_read) {
  const IndexShape shape = two_tiers();
  EXPECT(is_taken(shape, [](IndexHeader&) {}));
  const auto refuses = [&](const std::function<void(IndexHeader&)>& forge) { EXPECT(!is_taken(shape, forge)); };
  refuses([](IndexHeader& header) { header.magic[0] ^= 1; });
  refuses([](IndexHeader& header) { header.version = 0; });
  refuses([](IndexHeader& header) { header.version = 2; });
  refuses([](IndexHeader& header) { header.regions = 0; });
  refuses([](IndexHeader& header) { header.regions = REGIONS_MAX + 1; });
  refuses([](IndexHeader& header) { header.regions = UINT32_MAX; });
  refuses([](IndexHeader& header) { header.regions = 3; });  // the third one is blank
  refuses([](IndexHeader& header) { header.slots = 63; });
  refuses([](IndexHeader& header) { header.slots = uint64_t{1} << 29; });
  refuses([](IndexHeader& header) { header.slots = UINT64_MAX / 64; });
  refuses([](IndexHeader& header) { header.further_offset = 0; });
  refuses([](IndexHeader& header) { header.further_offset += 8; });
  refuses([](IndexHeader& header) { header.further_offset = UINT64_MAX - 63; });
  refuses([](IndexHeader& header) { header.further_offset = 0x1000000; });
  for (uint32_t region = 0; region < 2; ++region) {
    refuses([=](IndexHeader& header) { header.region[region].bytes = 0; });
    refuses([=](IndexHeader& header) { header.region[region].bytes = 4097; });
    refuses([=](IndexHeader& header) { header.region[region].slots = 0; });
    refuses([=](IndexHeader& header) { header.region[region].slots = 100'000; });
    refuses([=](IndexHeader& header) { header.region[region].slots = UINT64_MAX / 16 + 1; });
    refuses([=](IndexHeader& header) { header.region[region].checksums = 0; });
    refuses([=](IndexHeader& header) { header.region[region].checksums = 1'000'000; });
    refuses([=](IndexHeader& header) { header.region[region].words_offset = UINT64_MAX - 63; });
    refuses([=](IndexHeader& header) { header.region[region].words_offset += 4; });
    refuses([=](IndexHeader& header) { header.region[region].words_offset = 0; });  // the header itself
    refuses([=](IndexHeader& header) { header.region[region].checksums_offset = uint64_t{1} << 40; });
    refuses([=](IndexHeader& header) { header.region[region].tier = 4; });
    refuses([=](IndexHeader& header) { header.region[region].backing = 0; });
    refuses([=](IndexHeader& header) { header.region[region].backing = 99; });
  }
  // Of one tier, and yet with a part for others.
  const IndexShape one{64, {{64 * PAGE_BYTES, 16, 100}}};
  EXPECT(!is_taken(one, [](IndexHeader& header) { header.further_offset = PAGE_BYTES; }));
}

// A slot says where its checksums begin: the reader believes it within its region, and asks for the generation afterwards.
TEST(checksums_with_an_address_outside_the_region_are_not_read) {
  const IndexShape shape = two_tiers();
  const auto mapping = formatted(shape);
  const auto view = IndexView::attach(mapping);
  const IndexLayout layout = shape.layout();
  auto* const words = reinterpret_cast<SlotWords*>(mapping->data() + layout.regions[1].words_offset);
  for (const uint32_t first : {31U, 33U, 34U, UINT32_MAX - 1, UINT32_MAX}) {
    words[3].first_checksum = first;
    EXPECT(view->covers({1, 3}, 2) == (first == 31));
    EXPECT(view->checksum_at({1, 3}, 2) == 0);
    EXPECT(view->checksum_at({1, 3}, UINT32_MAX) == 0);
  }
}

TEST(numbers_out_of_range_make_no_index) {
  const auto is_valid = [](RegionShape region) { return IndexShape{64, {region}}.valid(); };
  EXPECT(is_valid({PAGE_BYTES, 1, 1}));
  EXPECT(!is_valid({0, 1, 1}));
  EXPECT(!is_valid({PAGE_BYTES + 1, 1, 1}));
  EXPECT(!is_valid({PAGE_BYTES, 0, 1}));
  EXPECT(!is_valid({PAGE_BYTES, UINT32_MAX, 1}));
  EXPECT(!is_valid({PAGE_BYTES, 1, UINT32_MAX}));
  EXPECT(!(IndexShape{64, {}}).valid());
  EXPECT(!(IndexShape{64, std::vector<RegionShape>(REGIONS_MAX + 1, {PAGE_BYTES, 1, 1})}).valid());
}
