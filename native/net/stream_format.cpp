#include "net/stream_format.h"

#include <algorithm>
#include <cstring>

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
  const bool is_empty = mark.extent == 0 && mark.bytes == 0 && mark.crc == 0;
  switch (mark.kind) {
    case MarkKind::EXTENT:
      return mark.bytes > 0;
    case MarkKind::GONE:
      return is_empty;
    case MarkKind::WAITING:
      return is_empty && mark.chunk == 0;
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

StreamMark make_extent_mark(uint32_t chunk, uint32_t extent, uint64_t bytes, uint32_t crc) noexcept {
  return sealed({MARK_MAGIC, MarkKind::EXTENT, chunk, extent, bytes, crc, 0});
}

StreamMark make_gone_mark(uint32_t chunk) noexcept { return sealed({MARK_MAGIC, MarkKind::GONE, chunk, 0, 0, 0, 0}); }

StreamMark make_waiting_mark() noexcept { return sealed({MARK_MAGIC, MarkKind::WAITING, 0, 0, 0, 0, 0}); }

std::optional<StreamMark> read_mark(const uint8_t* bytes) noexcept {
  StreamMark mark;
  std::memcpy(&mark, bytes, sizeof(mark));
  if (mark.magic != MARK_MAGIC || mark.mark_crc != mark_crc(mark) || !is_possible(mark)) {
    return std::nullopt;
  }
  return mark;
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
