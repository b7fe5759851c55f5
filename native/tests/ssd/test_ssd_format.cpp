// The header of a slot: what is written is read, and anything else is refused with its reason.
#include <algorithm>
#include <random>

#include "tests/harness.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_format.h"

using namespace kvpool;

namespace {

SsdHeader sample(uint32_t extents) {
  SsdHeader made{{1, 2, 3}, {4, 5}, {6}, {7}, 42, 8192, std::vector<uint32_t>(extents), {}};
  for (uint32_t extent = 0; extent < extents; ++extent) {
    made.extent_crcs[extent] = extent * 2654435761U;
  }
  return made;
}

// Makes the checksum of a changed header fit again.
void seal(SsdPage& bytes) {
  SsdHeaderFields fields;
  std::memcpy(&fields, bytes.data(), sizeof(fields));
  fields.header_crc = 0;
  std::memcpy(bytes.data(), &fields, sizeof(fields));
  fields.header_crc = crc32c(0, bytes.data(), std::max(PAGE_BYTES, ssd_header_length(bytes.data())));
  std::memcpy(bytes.data(), &fields, sizeof(fields));
}

template <typename Change>
SsdStatus with_fields(SsdPage bytes, Change change, SsdHeader& found) {
  SsdHeaderFields fields;
  std::memcpy(&fields, bytes.data(), sizeof(fields));
  change(fields);
  std::memcpy(bytes.data(), &fields, sizeof(fields));
  seal(bytes);
  return decode_ssd_header(bytes.data(), bytes.size(), found);
}

}  // namespace

TEST(a_header_reads_as_it_was_written) {
  for (const uint32_t extents : {1U, 32U, 491U, 492U, 1008U, SSD_EXTENTS_MAX}) {
    SsdPage bytes{};
    bytes.fill(0xEE);
    encode_ssd_header(sample(extents), bytes.data());
    const uint64_t size = ssd_header_bytes(extents);
    EXPECT(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(size), bytes.end(), [](uint8_t byte) { return byte == 0xEE; }));
    EXPECT(ssd_header_length(bytes.data()) == size);
    SsdHeader found;
    EXPECT(decode_ssd_header(bytes.data(), size, found) == SsdStatus::OK);
    EXPECT(compare_ssd_headers(found, sample(extents)) == SsdStatus::OK);
    EXPECT(found.extent_crcs == sample(extents).extent_crcs);
    EXPECT(found.chunk_bytes() == extents * uint64_t{8192});
    EXPECT(size == PAGE_BYTES || decode_ssd_header(bytes.data(), size - PAGE_BYTES, found) == SsdStatus::BAD_HEADER);
  }
}

TEST(token_ids_are_kept_where_there_is_room) {
  for (const uint32_t extents : {32U, 490U, 500U}) {
    const size_t most = ssd_words_beside(extents);
    for (const size_t tokens : {size_t{0}, size_t{1}, std::min<size_t>(most, 256), most, most + 1}) {
      SsdHeader made = sample(extents);
      for (size_t token = 0; token < tokens; ++token) {
        made.tokens.push_back(static_cast<int32_t>(token * 77777) - 5);
      }
      SsdPage bytes;
      encode_ssd_header(made, bytes.data());
      SsdHeader found;
      EXPECT(decode_ssd_header(bytes.data(), bytes.size(), found) == SsdStatus::OK);
      EXPECT(found.extent_crcs == made.extent_crcs);
      EXPECT(found.tokens == (tokens <= most ? made.tokens : std::vector<int32_t>{}));
    }
  }
}

TEST(more_words_than_a_header_holds_are_a_bad_header) {
  SsdHeader found;
  SsdPage bytes{};
  encode_ssd_header(sample(400), bytes.data());
  const auto most = static_cast<uint32_t>(ssd_words_beside(400));
  EXPECT(with_fields(bytes, [&](SsdHeaderFields& fields) { fields.tokens = most; }, found) == SsdStatus::OK);
  EXPECT(with_fields(bytes, [&](SsdHeaderFields& fields) { fields.tokens = most + 1; }, found) == SsdStatus::BAD_HEADER);
  EXPECT(with_fields(bytes, [](SsdHeaderFields& fields) { fields.extents = 0; }, found) == SsdStatus::BAD_HEADER);
  EXPECT(with_fields(bytes, [](SsdHeaderFields& fields) { fields.extents = UINT32_MAX; }, found) == SsdStatus::BAD_HEADER);
  EXPECT(with_fields(bytes, [](SsdHeaderFields& fields) { fields.extent_bytes = 0; }, found) == SsdStatus::BAD_HEADER);
  EXPECT(with_fields(bytes, [](SsdHeaderFields& fields) { fields.version = 0; }, found) == SsdStatus::BAD_HEADER);
  EXPECT(with_fields(bytes, [](SsdHeaderFields& fields) { fields.version = 2; }, found) == SsdStatus::NEWER_VERSION);
}

TEST(a_table_with_another_length_is_a_bad_header) {
  SsdPage bytes{};
  encode_ssd_header(sample(4), bytes.data());
  constexpr size_t TABLE = sizeof(SsdHeaderFields);
  for (const size_t word : {TABLE, TABLE + 4, TABLE + 16 + 4, TABLE + 16 + 3 * 8 + 4}) {
    SsdPage changed = bytes;
    ++changed[word];
    SsdHeader found;
    EXPECT(with_fields(changed, [](SsdHeaderFields&) {}, found) == SsdStatus::BAD_HEADER);
  }
}

TEST(any_flipped_bit_of_a_header_is_noticed) {
  for (const uint32_t extents : {32U, 600U}) {
    SsdPage bytes;
    encode_ssd_header(sample(extents), bytes.data());
    const uint64_t size = ssd_header_bytes(extents);
    SsdHeader found;
    for (size_t bit = 0; bit < size * 8; bit += 7) {
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
      EXPECT(decode_ssd_header(bytes.data(), size, found) != SsdStatus::OK);
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    }
    EXPECT(decode_ssd_header(bytes.data(), size, found) == SsdStatus::OK);
  }
}

TEST(pages_of_noise_are_no_headers) {
  std::mt19937_64 random(5);
  SsdPage page{};
  SsdHeader found;
  EXPECT(decode_ssd_header(page.data(), page.size(), found) == SsdStatus::BAD_MAGIC);
  for (int round = 0; round < 200; ++round) {
    for (uint8_t& byte : page) {
      byte = static_cast<uint8_t>(random());
    }
    EXPECT(decode_ssd_header(page.data(), page.size(), found) == SsdStatus::BAD_MAGIC);
    std::memcpy(page.data(), SSD_MAGIC, sizeof(SSD_MAGIC));
    const SsdStatus status = decode_ssd_header(page.data(), page.size(), found);
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
  EXPECT(changed([](SsdHeader& h) { h.extent_crcs.push_back(0); }) == SsdStatus::OTHER_GEOMETRY);
  EXPECT(changed([](SsdHeader& h) { h.extent_bytes = 1; }) == SsdStatus::OTHER_GEOMETRY);
  EXPECT(changed([](SsdHeader& h) { h.parent[0] = 77; }) == SsdStatus::OK);
}
