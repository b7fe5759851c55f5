// Fields of frames: values of msgpack in the forms that our clients send and every client reads, one after the other.
//
// What it is: short arrays, numbers from 0 on, bytes, text without a character, and the length before a frame. What it is not: a decoder of
// msgpack; where another form stands, nothing is read.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace kvpool {

inline constexpr size_t LENGTH_BYTES = sizeof(uint32_t);
// Forms of msgpack that a client of ours sends: short arrays, numbers from 0 on, bytes, text without a character.
inline constexpr uint8_t FIXED_ARRAY = 0x90;
inline constexpr uint8_t EMPTY_TEXT = 0xa0;
inline constexpr uint8_t BIN_8 = 0xc4, BIN_16 = 0xc5, BIN_32 = 0xc6;
inline constexpr uint8_t UINT_8 = 0xcc, UINT_64 = 0xcf;
inline constexpr uint8_t FIXED_INT_MAX = 0x7f;

// Reads values one after the other; nothing where the next one has another form, or is cut off.
class FieldReader {
 public:
  explicit FieldReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  [[nodiscard]] std::optional<uint64_t> number() {
    const auto form = take(1);
    if (!form) {
      return std::nullopt;
    }
    const uint8_t first = form->front();
    if (first <= FIXED_INT_MAX) {
      return first;
    }
    return first < UINT_8 || first > UINT_64 ? std::nullopt : big_endian(size_t{1} << (first - UINT_8));
  }

  [[nodiscard]] std::optional<std::span<const uint8_t>> bytes() {
    const auto form = take(1);
    if (!form || form->front() < BIN_8 || form->front() > BIN_32) {
      return std::nullopt;
    }
    const auto size = big_endian(size_t{1} << (form->front() - BIN_8));
    return size ? take(*size) : std::nullopt;
  }

  // Whether a short array of so many values begins here.
  [[nodiscard]] bool is_array(size_t values) { return is_byte(static_cast<uint8_t>(FIXED_ARRAY | values)); }
  [[nodiscard]] bool is_empty_text() { return is_byte(EMPTY_TEXT); }
  [[nodiscard]] bool is_end() const noexcept { return bytes_.empty(); }
  [[nodiscard]] std::span<const uint8_t> rest() const noexcept { return bytes_; }
  // How many values the array has that begins here; 0 for another thing.
  [[nodiscard]] size_t array_size() {
    const auto form = take(1);
    return form && (form->front() & 0xf0) == FIXED_ARRAY ? form->front() & 0x0fU : 0;
  }

 private:
  [[nodiscard]] bool is_byte(uint8_t wanted) {
    const auto form = take(1);
    return form && form->front() == wanted;
  }
  [[nodiscard]] std::optional<std::span<const uint8_t>> take(uint64_t size) {
    if (size > bytes_.size()) {
      return std::nullopt;
    }
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  [[nodiscard]] std::optional<uint64_t> big_endian(size_t size) {
    const auto taken = take(size);
    if (!taken) {
      return std::nullopt;
    }
    uint64_t value = 0;
    for (const uint8_t byte : *taken) {
      value = value << 8 | byte;
    }
    return value;
  }

  std::span<const uint8_t> bytes_;
};

// Writes values one after the other, each in its shortest form, as the decoder of every client reads them.
class FieldWriter {
 public:
  explicit FieldWriter(std::vector<uint8_t>& out) : out_(out) {}

  void array(size_t values) { out_.push_back(static_cast<uint8_t>(FIXED_ARRAY | values)); }
  void number(uint64_t value) {
    if (value <= FIXED_INT_MAX) {
      out_.push_back(static_cast<uint8_t>(value));
      return;
    }
    unsigned power = 0;
    while (power < 3 && value >> (8U << power) != 0) {
      ++power;
    }
    out_.push_back(static_cast<uint8_t>(UINT_8 + power));
    big_endian(value, size_t{1} << power);
  }
  // Room for so many bytes behind their header: where to write them.
  uint8_t* bytes(size_t size) {
    const unsigned power = size <= UINT8_MAX ? 0 : size <= UINT16_MAX ? 1 : 2;
    out_.push_back(static_cast<uint8_t>(BIN_8 + power));
    big_endian(size, size_t{1} << power);
    out_.resize(out_.size() + size);
    return out_.data() + (out_.size() - size);
  }

 private:
  void big_endian(uint64_t value, size_t size) {
    while (size-- > 0) {
      out_.push_back(static_cast<uint8_t>(value >> (8 * size)));
    }
  }

  std::vector<uint8_t>& out_;
};

template <typename Word>
void write_column(FieldWriter& writer, const std::vector<Word>& words) {
  uint8_t* const to = writer.bytes(words.size() * sizeof(Word));
  if (!words.empty()) {
    std::memcpy(to, words.data(), words.size() * sizeof(Word));
  }
}

// A frame's length goes before it.
inline size_t begin_frame(std::vector<uint8_t>& answers) {
  answers.resize(answers.size() + LENGTH_BYTES);
  return answers.size();
}

inline void end_frame(std::vector<uint8_t>& answers, size_t begin) {
  const auto length = static_cast<uint32_t>(answers.size() - begin);
  std::memcpy(answers.data() + begin - LENGTH_BYTES, &length, LENGTH_BYTES);
}

}  // namespace kvpool
