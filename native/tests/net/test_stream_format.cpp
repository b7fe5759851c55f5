// Hellos and marks: what is made is read, and nothing else.
#include <cstring>
#include <random>

#include "net/stream_format.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

template <typename Record>
const uint8_t* bytes_of(const Record& record) {
  return reinterpret_cast<const uint8_t*>(&record);
}

StreamTicket some_ticket() {
  StreamTicket ticket{};
  for (size_t index = 0; index < ticket.size(); ++index) {
    ticket[index] = static_cast<uint8_t>(index * 7);
  }
  return ticket;
}

}  // namespace

TEST(what_is_made_is_read) {
  const StreamHello hello = make_hello(some_ticket(), 2, 3);
  const auto found = read_hello(bytes_of(hello));
  EXPECT(found && found->connection == 2 && found->connections == 3);
  EXPECT(found && is_same_ticket(found->ticket, some_ticket().data()));
  const StreamMark extent = make_extent_mark(5, 6, uint64_t{1} << 33, 0xABCDEF01U);
  const auto mark = read_mark(bytes_of(extent));
  EXPECT(mark && mark->kind == MarkKind::EXTENT && mark->chunk == 5 && mark->extent == 6);
  EXPECT(mark && mark->bytes == uint64_t{1} << 33 && mark->crc == 0xABCDEF01U);
  const StreamMark gone = make_gone_mark(9);
  EXPECT(read_mark(bytes_of(gone)) && read_mark(bytes_of(gone))->chunk == 9);
  const StreamMark waiting = make_waiting_mark();
  EXPECT(read_mark(bytes_of(waiting)) && read_mark(bytes_of(waiting))->kind == MarkKind::WAITING);
}

TEST(a_mark_with_any_bit_flipped_is_none) {
  for (const StreamMark& made : {make_extent_mark(1, 2, 3, 4), make_gone_mark(5), make_waiting_mark()}) {
    for (size_t bit = 0; bit < 8 * sizeof(StreamMark); ++bit) {
      uint8_t bytes[sizeof(StreamMark)];
      std::memcpy(bytes, &made, sizeof(bytes));
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
      EXPECT(!read_mark(bytes));
    }
  }
}

TEST(a_sealed_mark_with_impossible_numbers_is_none) {
  EXPECT(!read_mark(bytes_of(make_extent_mark(1, 2, 0, 4))));
}

TEST(impossible_hellos_are_none) {
  EXPECT(!read_hello(bytes_of(make_hello(some_ticket(), 0, 0))));
  EXPECT(!read_hello(bytes_of(make_hello(some_ticket(), 2, 2))));
  EXPECT(!read_hello(bytes_of(make_hello(some_ticket(), 0, STREAM_CONNECTIONS_MAX + 1))));
  EXPECT(read_hello(bytes_of(make_hello(some_ticket(), 0, STREAM_CONNECTIONS_MAX))));
  StreamHello hello = make_hello(some_ticket(), 0, 1);
  hello.reserved[15] = 1;
  EXPECT(!read_hello(bytes_of(hello)));
  hello = make_hello(some_ticket(), 0, 1);
  hello.magic[7] = '2';
  EXPECT(!read_hello(bytes_of(hello)));
  EXPECT(begins_hello(bytes_of(hello), 7));
  EXPECT(!begins_hello(bytes_of(hello), 8));
}

TEST(tickets_that_differ_in_any_bit_are_different) {
  for (size_t bit = 0; bit < 8 * TICKET_BYTES; ++bit) {
    StreamTicket other = some_ticket();
    other[bit / 8] = static_cast<uint8_t>(other[bit / 8] ^ (1U << (bit % 8)));
    EXPECT(!is_same_ticket(some_ticket().data(), other.data()));
  }
}
