#include "ssd/ssd_format.h"

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

// More than any chunk: numbers above are damage.
constexpr uint64_t EXTENT_BYTES_MAX = uint64_t{1} << 36;

uint32_t crc_of(const uint8_t* bytes, uint64_t size) noexcept {
  constexpr size_t WORD = offsetof(SsdHeaderFields, header_crc);
  constexpr uint8_t ZERO[sizeof(uint32_t)] = {};
  uint32_t crc = crc32c(0, bytes, WORD);
  crc = crc32c(crc, ZERO, sizeof(ZERO));
  return crc32c(crc, bytes + WORD + sizeof(ZERO), size - WORD - sizeof(ZERO));
}

}  // namespace

void encode_ssd_header(const SsdHeader& header, uint8_t* bytes) noexcept {
  KVPOOL_CHECK(!header.extent_crcs.empty());
  KVPOOL_CHECK(header.extent_crcs.size() <= SSD_EXTENTS_MAX);
  SsdHeaderFields fields{};
  std::memcpy(fields.magic, SSD_MAGIC, sizeof(fields.magic));
  fields.version = SSD_FORMAT_VERSION;
  std::memcpy(fields.pool_epoch, header.pool_epoch, sizeof(fields.pool_epoch));
  std::memcpy(fields.key, header.key, sizeof(fields.key));
  std::memcpy(fields.parent, header.parent, sizeof(fields.parent));
  std::memcpy(fields.name_space, header.name_space, sizeof(fields.name_space));
  fields.generation = header.generation;
  fields.extent_bytes = header.extent_bytes;
  fields.extents = static_cast<uint32_t>(header.extent_crcs.size());
  const bool has_room = header.tokens.size() <= ssd_words_beside(fields.extents);
  fields.tokens = has_room ? static_cast<uint32_t>(header.tokens.size()) : 0;
  const SsdTableFields table{static_cast<uint32_t>(header.header_bytes()), sizeof(SsdEntry), {}};
  std::memset(bytes, 0, table.header_bytes);
  std::memcpy(bytes, &fields, sizeof(fields));
  std::memcpy(bytes + sizeof(fields), &table, sizeof(table));
  uint8_t* end = bytes + sizeof(fields) + sizeof(table);
  for (const uint32_t crc : header.extent_crcs) {
    const SsdEntry entry{crc, static_cast<uint32_t>(header.extent_bytes)};
    std::memcpy(end, &entry, sizeof(entry));
    end += sizeof(entry);
  }
  if (fields.tokens > 0) {
    std::memcpy(end, header.tokens.data(), fields.tokens * sizeof(int32_t));
  }
  fields.header_crc = crc_of(bytes, table.header_bytes);
  std::memcpy(bytes, &fields, sizeof(fields));
}

uint64_t ssd_header_length(const uint8_t* page) noexcept {
  SsdHeaderFields fields;
  std::memcpy(&fields, page, sizeof(fields));
  if (std::memcmp(fields.magic, SSD_MAGIC, sizeof(fields.magic)) != 0 || fields.version != SSD_FORMAT_VERSION ||
      fields.extents == 0 || fields.extents > SSD_EXTENTS_MAX) {
    return 0;
  }
  return ssd_header_bytes(fields.extents);
}

SsdStatus decode_ssd_header(const uint8_t* bytes, uint64_t size, SsdHeader& header) {
  KVPOOL_CHECK(size >= SSD_HEADER_BYTES);
  SsdHeaderFields fields;
  std::memcpy(&fields, bytes, sizeof(fields));
  if (std::memcmp(fields.magic, SSD_MAGIC, sizeof(fields.magic)) != 0) {
    return SsdStatus::BAD_MAGIC;
  }
  if (fields.version > SSD_FORMAT_VERSION) {
    return SsdStatus::NEWER_VERSION;
  }
  SsdTableFields table;
  std::memcpy(&table, bytes + sizeof(fields), sizeof(table));
  if (fields.version != SSD_FORMAT_VERSION || fields.extents == 0 || fields.extents > SSD_EXTENTS_MAX || fields.extent_bytes == 0 ||
      fields.extent_bytes > EXTENT_BYTES_MAX || table.header_bytes != ssd_header_bytes(fields.extents) ||
      table.header_bytes > size || table.entry_bytes != sizeof(SsdEntry) || fields.tokens > ssd_words_beside(fields.extents) ||
      fields.header_crc != crc_of(bytes, table.header_bytes)) {
    return SsdStatus::BAD_HEADER;
  }
  std::memcpy(header.pool_epoch, fields.pool_epoch, sizeof(fields.pool_epoch));
  std::memcpy(header.key, fields.key, sizeof(fields.key));
  std::memcpy(header.parent, fields.parent, sizeof(fields.parent));
  std::memcpy(header.name_space, fields.name_space, sizeof(fields.name_space));
  header.generation = fields.generation;
  header.extent_bytes = fields.extent_bytes;
  header.extent_crcs.resize(fields.extents);
  const uint8_t* end = bytes + sizeof(fields) + sizeof(table);
  for (uint32_t& crc : header.extent_crcs) {
    SsdEntry entry;
    std::memcpy(&entry, end, sizeof(entry));
    if (entry.bytes != static_cast<uint32_t>(fields.extent_bytes)) {
      return SsdStatus::BAD_HEADER;
    }
    crc = entry.crc;
    end += sizeof(entry);
  }
  header.tokens.resize(fields.tokens);
  if (fields.tokens > 0) {
    std::memcpy(header.tokens.data(), end, fields.tokens * sizeof(int32_t));
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
  const bool same = found.extent_bytes == expected.extent_bytes && found.extent_crcs.size() == expected.extent_crcs.size();
  return same ? SsdStatus::OK : SsdStatus::OTHER_GEOMETRY;
}

}  // namespace kvpool
