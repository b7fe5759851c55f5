// The header page: what is written is read, and anything else is refused with its reason.
#include <random>

#include "tests/harness.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_format.h"

using namespace kvpool;

namespace {

SsdHeader sample(uint32_t layers) {
  SsdHeader made{{1, 2, 3}, {4, 5}, {6}, {7}, 42, 8192, std::vector<uint32_t>(layers), {}};
  for (uint32_t layer = 0; layer < layers; ++layer) {
    made.layer_crcs[layer] = layer * 2654435761U;
  }
  return made;
}

}  // namespace

TEST(a_header_reads_as_it_was_written) {
  for (const uint32_t layers : {1U, 32U, SSD_LAYERS_MAX}) {
    SsdPage page;
    encode_ssd_header(sample(layers), page.data());
    SsdHeader found;
    EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::OK);
    EXPECT(compare_ssd_headers(found, sample(layers)) == SsdStatus::OK);
    EXPECT(found.layer_crcs == sample(layers).layer_crcs);
    EXPECT(found.chunk_bytes() == layers * uint64_t{8192});
  }
}

TEST(token_ids_are_kept_where_there_is_room) {
  for (const size_t tokens : {size_t{0}, size_t{1}, size_t{256}, size_t{SSD_LAYERS_MAX - 32}, size_t{SSD_LAYERS_MAX - 31}}) {
    SsdHeader made = sample(32);
    for (size_t token = 0; token < tokens; ++token) {
      made.tokens.push_back(static_cast<int32_t>(token * 77777) - 5);
    }
    SsdPage page;
    encode_ssd_header(made, page.data());
    SsdHeader found;
    EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::OK);
    EXPECT(found.layer_crcs == made.layer_crcs);
    EXPECT(found.tokens == (tokens <= SSD_LAYERS_MAX - 32 ? made.tokens : std::vector<int32_t>{}));
  }
}

TEST(more_words_than_a_page_holds_are_a_bad_header) {
  SsdPage page;
  encode_ssd_header(sample(980), page.data());
  SsdHeaderFields fields;
  std::memcpy(&fields, page.data(), sizeof(fields));
  fields.tokens = 7;
  fields.header_crc = 0;
  std::memcpy(page.data(), &fields, sizeof(fields));
  fields.header_crc = crc32c(0, page.data(), page.size());
  std::memcpy(page.data(), &fields, sizeof(fields));
  SsdHeader found;
  EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::BAD_HEADER);
}

TEST(any_flipped_bit_of_a_header_is_noticed) {
  SsdPage page;
  encode_ssd_header(sample(32), page.data());
  SsdHeader found;
  for (size_t bit = 0; bit < page.size() * 8; bit += 7) {
    page[bit / 8] = static_cast<uint8_t>(page[bit / 8] ^ (1U << (bit % 8)));
    EXPECT(decode_ssd_header(page.data(), found) != SsdStatus::OK);
    page[bit / 8] = static_cast<uint8_t>(page[bit / 8] ^ (1U << (bit % 8)));
  }
  EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::OK);
}

TEST(pages_of_noise_are_no_headers) {
  std::mt19937_64 random(5);
  SsdPage page{};
  SsdHeader found;
  EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::BAD_MAGIC);
  for (int round = 0; round < 200; ++round) {
    for (uint8_t& byte : page) {
      byte = static_cast<uint8_t>(random());
    }
    EXPECT(decode_ssd_header(page.data(), found) == SsdStatus::BAD_MAGIC);
    std::memcpy(page.data(), SSD_MAGIC, sizeof(SSD_MAGIC));
    const SsdStatus status = decode_ssd_header(page.data(), found);
    EXPECT(status == SsdStatus::BAD_HEADER || status == SsdStatus::NEWER_VERSION);
  }
}

TEST(each_difference_has_its_name) {
  const SsdHeader expected = sample(4);
  const auto changed = [&](auto change) {
    SsdHeader found = sample(4);
    change(found);
    return compare_ssd_headers(found, expected);
  };
  EXPECT(changed([](SsdHeader& h) { h.pool_epoch[15] = 1; }) == SsdStatus::OTHER_EPOCH);
  EXPECT(changed([](SsdHeader& h) { h.key[0] = 9; }) == SsdStatus::OTHER_KEY);
  EXPECT(changed([](SsdHeader& h) { h.name_space[31] = 9; }) == SsdStatus::OTHER_NAMESPACE);
  EXPECT(changed([](SsdHeader& h) { ++h.generation; }) == SsdStatus::OTHER_GENERATION);
  EXPECT(changed([](SsdHeader& h) { h.layer_crcs.push_back(0); }) == SsdStatus::OTHER_GEOMETRY);
  EXPECT(changed([](SsdHeader& h) { h.layer_bytes = 1; }) == SsdStatus::OTHER_GEOMETRY);
  EXPECT(changed([](SsdHeader& h) { h.parent[0] = 77; }) == SsdStatus::OK);
}
