// What passes on a stream between nodes: a puller's hello, then the owner's marks and extents.
//
//   puller → owner   StreamHello, once; then nothing
//   owner → puller   StreamMark; behind one of kind EXTENTS its runs (StreamRun, `runs` of them), the CRC-32C of each of their
//                    extents (u32, `extents` of them), and then the bytes of these extents, run by run. A run is one chunk's
//                    consecutive extents; a run of none ends its chunk: it left its slot, or could not be read.
//
// Extent 0 of all chunks of this connection comes first, then extent 1, …, of small extents several of each chunk in turn. Chunk i
// travels on connection i mod `connections`: the extents of a chunk come in order, which is all that a puller relies on.
// One mark is for many extents, since a small one's bytes cost less than a mark of its own: sent, received, checked.
//
// Fixed layouts, little endian. Both sides take what they receive as untrusted: `read_hello`, `read_mark` and
// `read_table` accept exactly what the functions here make. The checksums of a mark detect damage; they are no proof of who sent it.
// Pure functions; any thread.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

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
// The last byte is the version of this format, which goes with that of the nodes' requests (kvpool/peers/control/records.py).
inline constexpr uint8_t STREAM_MAGIC[8] = {'K', 'V', 'P', 'S', 'T', 'R', 'M', '2'};

enum class MarkKind : uint32_t {
  EXTENTS = 1,
  WAITING = 2,  // the next extent has not landed at the owner; all numbers are 0
};

struct StreamMark {
  uint32_t magic;
  MarkKind kind;
  uint32_t runs;
  uint32_t extents;    // of all runs together
  uint64_t bytes;      // of all extents together
  uint32_t table_crc;  // CRC-32C of the runs and checksums
  uint32_t mark_crc;
};
static_assert(sizeof(StreamMark) == 32);
inline constexpr uint32_t MARK_MAGIC = 0x4D50564BU;  // "KVPM"

struct StreamRun {
  uint32_t chunk;  // of the pull
  uint32_t first;  // extent; 0 where there are none
  uint32_t count;  // 0: no more extents of this chunk come
};
static_assert(sizeof(StreamRun) == 12);

inline constexpr uint32_t MARK_RUNS_MAX = 256;
inline constexpr uint32_t MARK_EXTENTS_MAX = 512;
// A mark with its runs and checksums.
inline constexpr size_t MARK_BYTES_MAX =
    sizeof(StreamMark) + MARK_RUNS_MAX * sizeof(StreamRun) + MARK_EXTENTS_MAX * sizeof(uint32_t);

[[nodiscard]] StreamHello make_hello(const StreamTicket& ticket, uint32_t connection, uint32_t connections) noexcept;
// Whether the first bytes of a hello can be one's.
[[nodiscard]] bool begins_hello(const uint8_t* bytes, size_t size) noexcept;
// Nothing where it is none, or its numbers are impossible.
[[nodiscard]] std::optional<StreamHello> read_hello(const uint8_t* bytes) noexcept;

// Stores a mark with its runs and checksums, of extents of one size; its own size. REQUIRES: room for MARK_BYTES_MAX; one to
// MARK_RUNS_MAX runs, and a checksum for each of their extents, MARK_EXTENTS_MAX at most.
[[nodiscard]] size_t write_extents_mark(uint8_t* target, std::span<const StreamRun> runs, std::span<const uint32_t> crcs,
                                        uint64_t extent_bytes) noexcept;
[[nodiscard]] StreamMark make_waiting_mark() noexcept;
// Nothing where it is none, or its numbers are impossible: `table_bytes` of what is read is bounded.
[[nodiscard]] std::optional<StreamMark> read_mark(const uint8_t* bytes) noexcept;
// Of the runs and checksums behind a mark.
[[nodiscard]] inline size_t table_bytes(const StreamMark& mark) noexcept {
  return mark.runs * sizeof(StreamRun) + mark.extents * sizeof(uint32_t);
}
// Runs and checksums in the place of what the columns had. False where they are not the mark's, or do not add up.
[[nodiscard]] bool read_table(const StreamMark& mark, const uint8_t* bytes, std::vector<StreamRun>& runs,
                              std::vector<uint32_t>& crcs);

// Takes as long whatever differs, so that nobody finds a ticket by timing.
[[nodiscard]] bool is_same_ticket(const uint8_t* one, const uint8_t* other) noexcept;

}  // namespace kvpool
