#include "frames/frame_writer.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little);

template <typename Word>
constexpr bool fits(uint64_t value) noexcept {
  return value <= std::numeric_limits<Word>::max();
}

}  // namespace

void FrameWriter::begin(uint64_t kind, uint64_t sequence, size_t fields) {
  written_.resize(FRAME_LENGTH_BYTES);
  lent_.clear();
  lent_bytes_ = 0;
  begin_list(fields + 2);
  put_number(kind);
  put_number(sequence);
}

void FrameWriter::put_number(uint64_t value) {
  if (value < 0x80) {
    put(static_cast<uint8_t>(value));
  } else if (fits<uint8_t>(value)) {
    put_word(0xCC, static_cast<uint8_t>(value));
  } else if (fits<uint16_t>(value)) {
    put_word(0xCD, static_cast<uint16_t>(value));
  } else if (fits<uint32_t>(value)) {
    put_word(0xCE, static_cast<uint32_t>(value));
  } else {
    put_word(0xCF, value);
  }
}

void FrameWriter::put_negative(int64_t value) {
  if (value >= -0x20) {
    put(static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int8_t>::min()) {
    put_word(0xD0, static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int16_t>::min()) {
    put_word(0xD1, static_cast<uint16_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min()) {
    put_word(0xD2, static_cast<uint32_t>(value));
  } else {
    put_word(0xD3, static_cast<uint64_t>(value));
  }
}

void FrameWriter::put_fraction(double value) { put_word(0xCB, std::bit_cast<uint64_t>(value)); }

void FrameWriter::put_text(std::string_view text) {
  if (text.size() < 0x20) {
    put(static_cast<uint8_t>(0xA0 | text.size()));
  } else if (fits<uint8_t>(text.size())) {
    put_word(0xD9, static_cast<uint8_t>(text.size()));
  } else {
    put_size(0xDA, text.size());
  }
  put_raw(text.data(), text.size());
}

void FrameWriter::put_bytes(std::span<const uint8_t> bytes) {
  if (bytes.size() < LENT_BYTES_MIN) {
    put_copied(bytes);
    return;
  }
  put_bytes_size(bytes.size());
  lent_.push_back({written_.size(), bytes});
  lent_bytes_ += bytes.size();
}

void FrameWriter::put_copied(std::span<const uint8_t> bytes) {
  put_bytes_size(bytes.size());
  put_raw(bytes.data(), bytes.size());
}

void FrameWriter::begin_list(size_t items) {
  if (items < 0x10) {
    put(static_cast<uint8_t>(0x90 | items));
  } else {
    put_size(0xDC, items);
  }
}

void FrameWriter::begin_map(size_t entries) {
  if (entries < 0x10) {
    put(static_cast<uint8_t>(0x80 | entries));
  } else {
    put_size(0xDE, entries);
  }
}

std::span<iovec> FrameWriter::finish() {
  KVPOOL_CHECK(body_bytes() <= FRAME_BODY_BYTES_MAX);
  const auto length = static_cast<uint32_t>(body_bytes());
  std::memcpy(written_.data(), &length, sizeof(length));
  pieces_.clear();
  size_t taken = 0;
  const auto take_written = [&](size_t end) {
    if (end > taken) {
      pieces_.push_back({written_.data() + taken, end - taken});
      taken = end;
    }
  };
  for (const Lent& lent : lent_) {
    take_written(lent.behind);
    pieces_.push_back({const_cast<uint8_t*>(lent.bytes.data()), lent.bytes.size()});
  }
  take_written(written_.size());
  return pieces_;
}

void FrameWriter::finish_into(std::vector<uint8_t>& frames) {
  for (const iovec& piece : finish()) {
    const auto* const bytes = static_cast<const uint8_t*>(piece.iov_base);
    frames.insert(frames.end(), bytes, bytes + piece.iov_len);
  }
}

void FrameWriter::put_raw(const void* data, size_t size) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  written_.insert(written_.end(), bytes, bytes + size);
}

template <typename Word>
void FrameWriter::put_word(uint8_t marker, Word value) {
  uint8_t bytes[1 + sizeof(Word)];
  bytes[0] = marker;
  for (size_t place = 0; place < sizeof(Word); ++place) {
    bytes[1 + place] = static_cast<uint8_t>(value >> (8 * (sizeof(Word) - 1 - place)));
  }
  put_raw(bytes, sizeof(bytes));
}

void FrameWriter::put_bytes_size(size_t size) {
  if (fits<uint8_t>(size)) {
    put_word(0xC4, static_cast<uint8_t>(size));
  } else {
    put_size(0xC5, size);
  }
}

// A size in 16 bits, or with the next marker in 32. REQUIRES: it fits one of them.
void FrameWriter::put_size(uint8_t marker_16, size_t size) {
  if (fits<uint16_t>(size)) {
    put_word(marker_16, static_cast<uint16_t>(size));
  } else {
    KVPOOL_CHECK(fits<uint32_t>(size));
    put_word(static_cast<uint8_t>(marker_16 + 1), static_cast<uint32_t>(size));
  }
}

}  // namespace kvpool
