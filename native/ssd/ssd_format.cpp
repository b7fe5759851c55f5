#include "ssd/ssd_format.h"

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

// More than any chunk: numbers above are damage.
constexpr uint64_t LAYER_BYTES_MAX = uint64_t{1} << 36;

uint32_t page_crc(const uint8_t* page) noexcept {
  constexpr size_t WORD = offsetof(SsdHeaderFields, header_crc);
  constexpr uint8_t ZERO[sizeof(uint32_t)] = {};
  uint32_t crc = crc32c(0, page, WORD);
  crc = crc32c(crc, ZERO, sizeof(ZERO));
  return crc32c(crc, page + WORD + sizeof(ZERO), SSD_HEADER_BYTES - WORD - sizeof(ZERO));
}

}  // namespace

void encode_ssd_header(const SsdHeader& header, uint8_t* page) noexcept {
  KVPOOL_CHECK(!header.layer_crcs.empty());
  KVPOOL_CHECK(header.layer_crcs.size() <= SSD_LAYERS_MAX);
  SsdHeaderFields fields{};
  std::memcpy(fields.magic, SSD_MAGIC, sizeof(fields.magic));
  fields.version = SSD_FORMAT_VERSION;
  std::memcpy(fields.pool_epoch, header.pool_epoch, sizeof(fields.pool_epoch));
  std::memcpy(fields.key, header.key, sizeof(fields.key));
  std::memcpy(fields.parent, header.parent, sizeof(fields.parent));
  std::memcpy(fields.name_space, header.name_space, sizeof(fields.name_space));
  fields.generation = header.generation;
  fields.layer_bytes = header.layer_bytes;
  fields.layers = static_cast<uint32_t>(header.layer_crcs.size());
  const bool has_room = header.layer_crcs.size() + header.tokens.size() <= SSD_LAYERS_MAX;
  fields.tokens = has_room ? static_cast<uint32_t>(header.tokens.size()) : 0;
  std::memset(page, 0, SSD_HEADER_BYTES);
  std::memcpy(page, &fields, sizeof(fields));
  uint8_t* words = page + sizeof(fields);
  std::memcpy(words, header.layer_crcs.data(), header.layer_crcs.size() * sizeof(uint32_t));
  if (fields.tokens > 0) {
    std::memcpy(words + header.layer_crcs.size() * sizeof(uint32_t), header.tokens.data(), fields.tokens * sizeof(int32_t));
  }
  fields.header_crc = page_crc(page);
  std::memcpy(page, &fields, sizeof(fields));
}

SsdStatus decode_ssd_header(const uint8_t* page, SsdHeader& header) {
  SsdHeaderFields fields;
  std::memcpy(&fields, page, sizeof(fields));
  if (std::memcmp(fields.magic, SSD_MAGIC, sizeof(fields.magic)) != 0) {
    return SsdStatus::BAD_MAGIC;
  }
  if (fields.version > SSD_FORMAT_VERSION) {
    return SsdStatus::NEWER_VERSION;
  }
  if (fields.header_crc != page_crc(page) || fields.version == 0 || fields.layers == 0 ||
      fields.layers > SSD_LAYERS_MAX || fields.tokens > SSD_LAYERS_MAX - fields.layers || fields.layer_bytes == 0 || fields.layer_bytes > LAYER_BYTES_MAX) {
    return SsdStatus::BAD_HEADER;
  }
  std::memcpy(header.pool_epoch, fields.pool_epoch, sizeof(fields.pool_epoch));
  std::memcpy(header.key, fields.key, sizeof(fields.key));
  std::memcpy(header.parent, fields.parent, sizeof(fields.parent));
  std::memcpy(header.name_space, fields.name_space, sizeof(fields.name_space));
  header.generation = fields.generation;
  header.layer_bytes = fields.layer_bytes;
  header.layer_crcs.resize(fields.layers);
  std::memcpy(header.layer_crcs.data(), page + sizeof(fields), fields.layers * sizeof(uint32_t));
  header.tokens.resize(fields.tokens);
  if (fields.tokens > 0) {
    std::memcpy(header.tokens.data(), page + sizeof(fields) + fields.layers * sizeof(uint32_t),
                fields.tokens * sizeof(int32_t));
  }
  return SsdStatus::OK;
}

SsdStatus compare_ssd_headers(const SsdHeader& found, const SsdHeader& expected) noexcept {
  if (std::memcmp(found.pool_epoch, expected.pool_epoch, sizeof(found.pool_epoch)) != 0) {
    return SsdStatus::OTHER_EPOCH;
  }
  if (std::memcmp(found.key, expected.key, sizeof(found.key)) != 0) {
    return SsdStatus::OTHER_KEY;
  }
  if (std::memcmp(found.name_space, expected.name_space, sizeof(found.name_space)) != 0) {
    return SsdStatus::OTHER_NAMESPACE;
  }
  if (found.generation != expected.generation) {
    return SsdStatus::OTHER_GENERATION;
  }
  const bool same = found.layer_bytes == expected.layer_bytes && found.layer_crcs.size() == expected.layer_crcs.size();
  return same ? SsdStatus::OK : SsdStatus::OTHER_GEOMETRY;
}

}  // namespace kvpool
