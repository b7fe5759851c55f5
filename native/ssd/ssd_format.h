// The bytes of the SSD tier: segment files of slots, each a header page and a chunk. See docs/ssd-format.md.
//
//   segment file := slot*                     slots of one size after another, from the file's start
//   slot         := header chunk padding      header: whole pages, as many as its table needs; chunk: its extents, as in
//                                             the arena; padding to a page
//
// A slot certifies itself: what it holds is good only if magic, version, header checksum, pool epoch, key, namespace,
// generation and geometry are what the reader expects, and each extent's checksum fits its bytes. The order of writes
// therefore does not matter: anything stale, torn or misdirected reads as a miss.
//
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvpool {

inline constexpr char SSD_MAGIC[8] = {'K', 'V', 'P', 'S', 'L', 'O', 'T', '1'};
inline constexpr uint32_t SSD_FORMAT_VERSION = 1;
inline constexpr uint64_t SSD_HEADER_BYTES = PAGE_BYTES;  // of the smallest header

// Little endian, at the start of a slot. SsdTableFields and the table follow it, an SsdEntry for each extent, then the token ids.
// The rest is zero.
struct SsdHeaderFields {
  char magic[8];
  uint32_t version;
  uint32_t header_crc;  // CRC-32C of the header with this word zero
  uint8_t pool_epoch[16];
  uint8_t key[KEY_BYTES];
  uint8_t parent[KEY_BYTES];  // zeros: the chunk is the first of its prompt
  uint8_t name_space[32];     // fingerprint of model, salt domain and layout
  uint64_t generation;
  uint64_t extent_bytes;
  uint32_t extents;
  uint32_t tokens;  // words: the ids, and the scope behind them; 0: not known, or no room for them
};
static_assert(sizeof(SsdHeaderFields) == 152);
static_assert(offsetof(SsdHeaderFields, generation) == 128);

struct SsdTableFields {
  uint32_t header_bytes;  // whole pages
  uint32_t entry_bytes;
  uint32_t reserved[2];  // zero
};

struct SsdEntry {
  uint32_t crc;    // CRC-32C of the extent
  uint32_t bytes;  // the low 32 bits of its length
};
static_assert(sizeof(SsdTableFields) == 16 && sizeof(SsdEntry) == 8);

inline constexpr uint32_t SSD_EXTENTS_MAX = 4096;

// Bytes of the header of a chunk of so many extents.
[[nodiscard]] constexpr uint64_t ssd_header_bytes(uint64_t extents) noexcept {
  return round_up(sizeof(SsdHeaderFields) + sizeof(SsdTableFields) + extents * sizeof(SsdEntry), PAGE_BYTES);
}
// Words that a header has room for beside its table.
[[nodiscard]] constexpr uint64_t ssd_words_beside(uint64_t extents) noexcept {
  const uint64_t used = sizeof(SsdHeaderFields) + sizeof(SsdTableFields) + extents * sizeof(SsdEntry);
  return (ssd_header_bytes(extents) - used) / sizeof(uint32_t);
}

inline constexpr uint64_t SSD_HEADER_BYTES_MAX = ssd_header_bytes(SSD_EXTENTS_MAX);
static_assert(SSD_HEADER_BYTES_MAX == 9 * PAGE_BYTES);
static_assert(ssd_header_bytes(491) == PAGE_BYTES && ssd_header_bytes(492) == 2 * PAGE_BYTES);

// The outcome of an access to a slot. Everything but OK is a miss.
enum class SsdStatus : uint8_t {
  OK = 0,
  BAD_MAGIC = 1,
  NEWER_VERSION = 2,
  BAD_HEADER = 3,  // its checksum, or a number out of range
  OTHER_EPOCH = 4,
  OTHER_KEY = 5,
  OTHER_NAMESPACE = 6,
  OTHER_GENERATION = 7,
  OTHER_GEOMETRY = 8,
  BAD_CHECKSUM = 9,
  SHORT_READ = 10,
  IO_ERROR = 11,
  CANCELLED = 12,
  BAD_SOURCE = 13,  // the chunk in memory does not match its checksums: its slot is no good
  BAD_WRITE = 14,   // read back, it was not what had been written
};

using SsdPage = std::array<uint8_t, SSD_HEADER_BYTES_MAX>;

// A header as its writer and reader know it. `extent_crcs` has one word for each extent.
struct SsdHeader {
  uint8_t pool_epoch[16];
  uint8_t key[KEY_BYTES];
  uint8_t parent[KEY_BYTES];
  uint8_t name_space[32];
  uint64_t generation;
  uint64_t extent_bytes;
  std::vector<uint32_t> extent_crcs;
  std::vector<int32_t> tokens{};  // left out of the header where it has no room for all of them

  [[nodiscard]] uint64_t chunk_bytes() const noexcept { return extent_bytes * extent_crcs.size(); }
  [[nodiscard]] uint64_t header_bytes() const noexcept { return ssd_header_bytes(extent_crcs.size()); }
};

// REQUIRES: 1 to SSD_EXTENTS_MAX extents; there is room for header.header_bytes() bytes.
void encode_ssd_header(const SsdHeader& header, uint8_t* bytes) noexcept;

// The length of the header that begins with this page of unknown content; 0 where none does.
[[nodiscard]] uint64_t ssd_header_length(const uint8_t* page) noexcept;

// Decodes bytes with unknown content, `size` of them, at least a page. OK, BAD_MAGIC, NEWER_VERSION, or BAD_HEADER (also where
// the header is longer).
[[nodiscard]] SsdStatus decode_ssd_header(const uint8_t* bytes, uint64_t size, SsdHeader& header);

// Whether what was found is what was expected, all but checksums and token ids; the first difference otherwise.
[[nodiscard]] SsdStatus compare_ssd_headers(const SsdHeader& found, const SsdHeader& expected) noexcept;

}  // namespace kvpool
