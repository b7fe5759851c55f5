// What passes on a stream between nodes: a puller's hello, then the owner's marks and extents.
//
//   puller → owner   StreamHello, once; then nothing
//   owner → puller   StreamMark, behind each of kind EXTENT its bytes; extent 0 of all chunks of this connection,
//                    then extent 1, …, of small extents several of each chunk in turn. Chunk i travels on connection i mod
//                    `connections`: the extents of a chunk come in order, which is all that a puller relies on.
//
// Fixed layouts, little endian. Both sides take what they receive as untrusted: `read_hello` and `read_mark` accept exactly what
// the functions here make. The checksum of a mark detects damage; it is no proof of who sent it.
// Pure functions; any thread.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

inline constexpr size_t TICKET_BYTES = 32;
inline constexpr uint32_t STREAM_CONNECTIONS_MAX = 16;
using StreamTicket = std::array<uint8_t, TICKET_BYTES>;

struct StreamHello {
  uint8_t magic[8];
  uint32_t connection;   // its number
  uint32_t connections;  // of the pull
  uint8_t ticket[TICKET_BYTES];
  uint8_t reserved[16];  // zeros
};
static_assert(sizeof(StreamHello) == 64);
inline constexpr uint8_t STREAM_MAGIC[8] = {'K', 'V', 'P', 'S', 'T', 'R', 'M', '1'};

enum class MarkKind : uint32_t {
  EXTENT = 1,   // the extent's bytes follow
  GONE = 2,     // no more extents of this chunk come: it left its slot, or could not be read
  WAITING = 3,  // the next extent has not landed at the owner
};

struct StreamMark {
  uint32_t magic;
  MarkKind kind;
  uint32_t chunk;  // of the pull; 0 where WAITING
  uint32_t extent;  // 0 but for an EXTENT
  uint64_t bytes;  // that follow
  uint32_t crc;    // CRC-32C of them
  uint32_t mark_crc;
};
static_assert(sizeof(StreamMark) == 32);
inline constexpr uint32_t MARK_MAGIC = 0x4D50564BU;  // "KVPM"

[[nodiscard]] StreamHello make_hello(const StreamTicket& ticket, uint32_t connection, uint32_t connections) noexcept;
// Whether the first bytes of a hello can be one's.
[[nodiscard]] bool begins_hello(const uint8_t* bytes, size_t size) noexcept;
// Nothing where it is none, or its numbers are impossible.
[[nodiscard]] std::optional<StreamHello> read_hello(const uint8_t* bytes) noexcept;

[[nodiscard]] StreamMark make_extent_mark(uint32_t chunk, uint32_t extent, uint64_t bytes, uint32_t crc) noexcept;
[[nodiscard]] StreamMark make_gone_mark(uint32_t chunk) noexcept;
[[nodiscard]] StreamMark make_waiting_mark() noexcept;
[[nodiscard]] std::optional<StreamMark> read_mark(const uint8_t* bytes) noexcept;

// Takes as long whatever differs, so that nobody finds a ticket by timing.
[[nodiscard]] bool is_same_ticket(const uint8_t* one, const uint8_t* other) noexcept;

}  // namespace kvpool
