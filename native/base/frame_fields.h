// Fields of frames: values of msgpack in the forms that our clients send and every client reads, one after the other.
//
// What it is: a reader of short arrays, numbers from 0 on, bytes, text without a character. What it is not: a decoder of msgpack; where
// another form stands, nothing is read. Frames are written by FrameWriter.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace kvpool {

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

}  // namespace kvpool
