// Hellos and marks: what is made is read, and nothing else.
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "checksum/crc32c.h"
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
  EXPECT(read_mark(bytes_of(make_waiting_mark())) && read_mark(bytes_of(make_waiting_mark()))->kind == MarkKind::WAITING);
}

TEST(a_mark_has_its_runs_and_checksums_behind_it) {
  const std::vector<StreamRun> runs{{5, 6, 2}, {7, 0, 0}, {UINT32_MAX, 0, 1}};
  const std::vector<uint32_t> crcs{0xABCDEF01U, 2, 3};
  std::vector<uint8_t> bytes(MARK_BYTES_MAX);
  const size_t size = write_extents_mark(bytes.data(), runs, crcs, uint64_t{1} << 33);
  EXPECT(size == sizeof(StreamMark) + 3 * sizeof(StreamRun) + 3 * sizeof(uint32_t));
  const auto mark = read_mark(bytes.data());
  EXPECT(mark && mark->kind == MarkKind::EXTENTS && mark->runs == 3 && mark->extents == 3);
  EXPECT(mark && mark->bytes == 3 * (uint64_t{1} << 33) && sizeof(StreamMark) + table_bytes(*mark) == size);
  std::vector<StreamRun> found_runs(9);
  std::vector<uint32_t> found_crcs(9);
  EXPECT(read_table(*mark, bytes.data() + sizeof(StreamMark), found_runs, found_crcs));
  EXPECT(found_crcs == crcs && found_runs.size() == runs.size());
  for (size_t run = 0; run < runs.size(); ++run) {
    EXPECT(std::memcmp(&found_runs[run], &runs[run], sizeof(StreamRun)) == 0);
  }
}

TEST(the_largest_mark_fills_its_room) {
  const std::vector<StreamRun> runs(MARK_RUNS_MAX, {1, 2, MARK_EXTENTS_MAX / MARK_RUNS_MAX});
  const std::vector<uint32_t> crcs(MARK_EXTENTS_MAX, 7);
  std::vector<uint8_t> bytes(MARK_BYTES_MAX);
  EXPECT(write_extents_mark(bytes.data(), runs, crcs, 1) == MARK_BYTES_MAX);
  EXPECT(read_mark(bytes.data()));
}

// A flipped bit of the runs or checksums is found by the mark's checksum of them.
TEST(a_mark_with_any_bit_flipped_is_none) {
  const std::vector<StreamRun> runs{{1, 2, 1}, {3, 0, 0}};
  const std::vector<uint32_t> crcs{4};
  std::vector<uint8_t> made(MARK_BYTES_MAX);
  made.resize(write_extents_mark(made.data(), runs, crcs, 3));
  const auto mark = read_mark(made.data());
  EXPECT(mark.has_value());
  for (size_t bit = 0; bit < 8 * made.size(); ++bit) {
    auto bytes = made;
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    std::vector<StreamRun> found_runs;
    std::vector<uint32_t> found_crcs;
    EXPECT(bit / 8 < sizeof(StreamMark) ? !read_mark(bytes.data())
                                        : !read_table(*mark, bytes.data() + sizeof(StreamMark), found_runs, found_crcs));
  }
  const StreamMark waiting = make_waiting_mark();
  for (size_t bit = 0; bit < 8 * sizeof(StreamMark); ++bit) {
    uint8_t bytes[sizeof(StreamMark)];
    std::memcpy(bytes, &waiting, sizeof(bytes));
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    EXPECT(!read_mark(bytes));
  }
}

// The mark that was made, changed, with its own checksum right again.
template <typename Change>
StreamMark resealed(const uint8_t* bytes, Change change) {
  StreamMark mark;
  std::memcpy(&mark, bytes, sizeof(mark));
  change(mark);
  mark.mark_crc = crc32c(0, reinterpret_cast<const uint8_t*>(&mark), offsetof(StreamMark, mark_crc));
  return mark;
}

TEST(a_sealed_mark_with_impossible_numbers_is_none) {
  const StreamRun run{1, 2, 1};
  const uint32_t crc = 4;
  std::vector<uint8_t> made(MARK_BYTES_MAX);
  static_cast<void>(write_extents_mark(made.data(), {&run, 1}, {&crc, 1}, 3));
  const auto is_read = [&](auto change) { return read_mark(bytes_of(resealed(made.data(), change))).has_value(); };
  EXPECT(is_read([](StreamMark&) {}));
  EXPECT(!is_read([](StreamMark& mark) { mark.bytes = 0; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.extents = 0; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.runs = 0; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.runs = MARK_RUNS_MAX + 1; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.extents = MARK_EXTENTS_MAX + 1; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.runs = mark.extents = UINT32_MAX; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.kind = MarkKind::WAITING; }));
  EXPECT(!is_read([](StreamMark& mark) { mark.kind = static_cast<MarkKind>(3); }));
}

TEST(runs_that_do_not_add_up_to_the_marks_extents_are_none) {
  const auto is_read = [](std::vector<StreamRun> runs, uint32_t extents) {
    const std::vector<uint32_t> crcs(extents, 1);
    std::vector<uint8_t> bytes(MARK_BYTES_MAX);
    static_cast<void>(write_extents_mark(bytes.data(), runs, crcs, 8));
    std::vector<uint32_t> found;
    return read_table(*read_mark(bytes.data()), bytes.data() + sizeof(StreamMark), runs, found);
  };
  EXPECT(is_read({{0, 0, 2}, {1, 0, 1}}, 3));
  EXPECT(!is_read({{0, 0, 2}, {1, 0, 1}}, 2));
  EXPECT(!is_read({{0, 0, 2}, {1, 0, 1}}, 4));
  EXPECT(!is_read({{0, 0, UINT32_MAX}, {1, 0, 3}}, 2));  // whose sum is 2 in 32 bits
  EXPECT(is_read({{0, 0, 0}}, 0));
  EXPECT(!is_read({{0, 1, 0}}, 0));
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
  hello.magic[7] = '1';  // the version before, which had a mark for each extent
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
