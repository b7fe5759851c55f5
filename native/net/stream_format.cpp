#include "net/stream_format.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

uint32_t mark_crc(const StreamMark& mark) noexcept {
  return crc32c(0, reinterpret_cast<const uint8_t*>(&mark), offsetof(StreamMark, mark_crc));
}

StreamMark sealed(StreamMark mark) noexcept {
  mark.mark_crc = mark_crc(mark);
  return mark;
}

// Whether a kind has the numbers that it can have.
bool is_possible(const StreamMark& mark) noexcept {
  switch (mark.kind) {
    case MarkKind::EXTENTS:
      return mark.runs >= 1 && mark.runs <= MARK_RUNS_MAX && mark.extents <= MARK_EXTENTS_MAX &&
             (mark.extents == 0) == (mark.bytes == 0);
    case MarkKind::WAITING:
      return mark.runs == 0 && mark.extents == 0 && mark.bytes == 0 && mark.table_crc == 0;
  }
  return false;
}

}  // namespace

StreamHello make_hello(const StreamTicket& ticket, uint32_t connection, uint32_t connections) noexcept {
  StreamHello hello{};
  std::memcpy(hello.magic, STREAM_MAGIC, sizeof(hello.magic));
  hello.connection = connection;
  hello.connections = connections;
  std::memcpy(hello.ticket, ticket.data(), ticket.size());
  return hello;
}

bool begins_hello(const uint8_t* bytes, size_t size) noexcept {
  return std::memcmp(bytes, STREAM_MAGIC, std::min(size, sizeof(STREAM_MAGIC))) == 0;
}

std::optional<StreamHello> read_hello(const uint8_t* bytes) noexcept {
  StreamHello hello;
  std::memcpy(&hello, bytes, sizeof(hello));
  const bool has_zeros = std::all_of(std::begin(hello.reserved), std::end(hello.reserved), [](uint8_t byte) { return byte == 0; });
  if (!begins_hello(bytes, sizeof(hello)) || !has_zeros || hello.connections == 0 ||
      hello.connections > STREAM_CONNECTIONS_MAX || hello.connection >= hello.connections) {
    return std::nullopt;
  }
  return hello;
}

size_t write_extents_mark(uint8_t* target, std::span<const StreamRun> runs, std::span<const uint32_t> crcs,
                          uint64_t extent_bytes) noexcept {
  KVPOOL_CHECK(!runs.empty() && runs.size() <= MARK_RUNS_MAX && crcs.size() <= MARK_EXTENTS_MAX);
  uint8_t* const table = target + sizeof(StreamMark);
  std::memcpy(table, runs.data(), runs.size_bytes());
  if (!crcs.empty()) {
    std::memcpy(table + runs.size_bytes(), crcs.data(), crcs.size_bytes());
  }
  const size_t size = runs.size_bytes() + crcs.size_bytes();
  const StreamMark mark = sealed({MARK_MAGIC, MarkKind::EXTENTS, static_cast<uint32_t>(runs.size()),
                                  static_cast<uint32_t>(crcs.size()), crcs.size() * extent_bytes, crc32c(0, table, size), 0});
  std::memcpy(target, &mark, sizeof(mark));
  return sizeof(mark) + size;
}

StreamMark make_waiting_mark() noexcept { return sealed({MARK_MAGIC, MarkKind::WAITING, 0, 0, 0, 0, 0}); }

std::optional<StreamMark> read_mark(const uint8_t* bytes) noexcept {
  StreamMark mark;
  std::memcpy(&mark, bytes, sizeof(mark));
  if (mark.magic != MARK_MAGIC || mark.mark_crc != mark_crc(mark) || !is_possible(mark)) {
    return std::nullopt;
  }
  return mark;
}

bool read_table(const StreamMark& mark, const uint8_t* bytes, std::vector<StreamRun>& runs, std::vector<uint32_t>& crcs) {
  if (crc32c(0, bytes, table_bytes(mark)) != mark.table_crc) {
    return false;
  }
  runs.resize(mark.runs);
  crcs.resize(mark.extents);
  std::memcpy(runs.data(), bytes, mark.runs * sizeof(StreamRun));
  if (!crcs.empty()) {
    std::memcpy(crcs.data(), bytes + mark.runs * sizeof(StreamRun), mark.extents * sizeof(uint32_t));
  }
  uint64_t extents = 0;
  for (const StreamRun& run : runs) {
    extents += run.count;
    if (run.count == 0 && run.first != 0) {
      return false;
    }
  }
  return extents == mark.extents;
}

bool is_same_ticket(const uint8_t* one, const uint8_t* other) noexcept {
  uint8_t difference = 0;
  for (size_t index = 0; index < TICKET_BYTES; ++index) {
    difference = static_cast<uint8_t>(difference | (one[index] ^ other[index]));
  }
  // Kept from the optimizer, which could leave the loop early.
  const volatile uint8_t kept = difference;
  return kept == 0;
}

}  // namespace kvpool
