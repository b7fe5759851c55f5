// Tools of the fuzz targets: reading numbers and bytes out of an input, and a check that ends the process.
//
// An input that is read to its end gives zeroes from there on, so that every input is a complete test.
// One thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define FUZZ_EXPECT(...)                                                                       \
  do {                                                                                         \
    if (!(__VA_ARGS__)) {                                                                      \
      std::fflush(stdout);                                                                     \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #__VA_ARGS__);          \
      std::abort();                                                                            \
    }                                                                                          \
  } while (false)

namespace kvpool::fuzzing {

class Input {
 public:
  Input(const uint8_t* data, size_t size) noexcept : data_(data), left_(size) {}

  [[nodiscard]] bool is_empty() const noexcept { return left_ == 0; }

  template <typename Number>
  [[nodiscard]] Number number() noexcept {
    Number value{};
    const size_t count = std::min(sizeof(value), left_);
    if (count > 0) {
      std::memcpy(&value, data_, count);
    }
    skip(count);
    return value;
  }

  // At most `most`.
  [[nodiscard]] uint64_t up_to(uint64_t most) noexcept {
    return most < 256 ? number<uint8_t>() % (most + 1) : number<uint64_t>() % (most + 1);
  }

  // A number near a power of two, small, or any: where arithmetic goes wrong.
  [[nodiscard]] uint64_t awkward() noexcept {
    const auto choice = number<uint8_t>();
    if (choice < 96) {
      return choice;
    }
    if (choice < 192) {
      return (uint64_t{1} << (choice % 64)) + number<uint8_t>() - 128;
    }
    return number<uint64_t>();
  }

  [[nodiscard]] std::vector<uint8_t> bytes(size_t most) {
    const size_t count = std::min(most, left_);
    std::vector<uint8_t> taken(data_, data_ + count);
    skip(count);
    return taken;
  }

 private:
  void skip(size_t count) noexcept {
    data_ += count;
    left_ -= count;
  }

  const uint8_t* data_;
  size_t left_;
};

}  // namespace kvpool::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
