// Frames as they are written, against bytes that are spelled out here. That they are msgpack's own is tested from Python.
#include "frames/frame_writer.h"

#include <string>

#include "../harness.h"

using namespace kvpool;

namespace {

std::string joined(std::span<const iovec> pieces) {
  std::string all;
  for (const iovec& piece : pieces) {
    all.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
  }
  return all;
}

std::span<const uint8_t> bytes_of(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

std::string operator""_s(const char* text, size_t size) { return {text, size}; }

}  // namespace

TEST(a_frame_has_its_length_kind_sequence_and_fields) {
  FrameWriter writer;
  writer.begin(10, 300, 3);
  writer.put_bytes(bytes_of("key"));
  writer.put_number(4);
  writer.put_text("node");
  EXPECT(joined(writer.finish()) == "\x10\0\0\0\x95\x0A\xCD\x01\x2C\xC4\x03key\x04\xA4node"_s);
}

TEST(the_next_frame_has_nothing_of_the_one_before) {
  FrameWriter writer;
  const std::string column(FrameWriter::LENT_BYTES_MIN, 'c');
  writer.begin(1, 1, 1);
  writer.put_bytes(bytes_of(column));
  static_cast<void>(writer.finish());
  writer.begin(2, 3, 0);
  EXPECT(writer.body_bytes() == 3);
  EXPECT(joined(writer.finish()) == "\x03\0\0\0\x92\x02\x03"_s);
}

TEST(long_columns_are_lent_and_all_else_is_copied) {
  FrameWriter writer;
  const std::string first(FrameWriter::LENT_BYTES_MIN, 'f');
  const std::string second(70'000, 's');
  const std::string small(FrameWriter::LENT_BYTES_MIN - 1, 'k');
  writer.begin(1, 1, 4);
  writer.put_bytes(bytes_of(first));
  writer.put_bytes(bytes_of(second));
  writer.put_bytes(bytes_of(small));
  writer.put_copied(bytes_of(first));
  const auto pieces = writer.finish();
  EXPECT(pieces.size() == 5);
  EXPECT(pieces[1].iov_base == first.data() && pieces[1].iov_len == first.size());
  EXPECT(pieces[3].iov_base == second.data() && pieces[3].iov_len == second.size());
  const std::string whole = joined(pieces);
  EXPECT(whole.size() == FRAME_LENGTH_BYTES + writer.body_bytes());
  EXPECT(whole.substr(FRAME_LENGTH_BYTES) == "\x96\x01\x01\xC5\x40\x00"_s + first + "\xC6\x00\x01\x11\x70"_s + second +
                                                 "\xC5\x3F\xFF"_s + small + "\xC5\x40\x00"_s + first);
}
