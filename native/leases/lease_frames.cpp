#include "leases/lease_frames.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

namespace kvpool {
namespace {

constexpr size_t LENGTH_BYTES = sizeof(uint32_t);
// Forms of msgpack that a client of ours sends: short arrays, numbers from 0 on, bytes, text without a character.
constexpr uint8_t FIXED_ARRAY = 0x90;
constexpr uint8_t EMPTY_TEXT = 0xa0;
constexpr uint8_t BIN_8 = 0xc4, BIN_16 = 0xc5, BIN_32 = 0xc6;
constexpr uint8_t UINT_8 = 0xcc, UINT_64 = 0xcf;
constexpr uint8_t FIXED_INT_MAX = 0x7f;

// Reads values one after the other; nothing where the next one has another form, or is cut off.
class Fields {
 public:
  explicit Fields(std::span<const uint8_t> bytes) : bytes_(bytes) {}

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
class Writer {
 public:
  explicit Writer(std::vector<uint8_t>& out) : out_(out) {}

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
void write_column(Writer& writer, const std::vector<Word>& words) {
  uint8_t* const to = writer.bytes(words.size() * sizeof(Word));
  if (!words.empty()) {
    std::memcpy(to, words.data(), words.size() * sizeof(Word));
  }
}

// A frame's length goes before it.
size_t begin_frame(std::vector<uint8_t>& answers) {
  answers.resize(answers.size() + LENGTH_BYTES);
  return answers.size();
}

void end_frame(std::vector<uint8_t>& answers, size_t begin) {
  const auto length = static_cast<uint32_t>(answers.size() - begin);
  std::memcpy(answers.data() + begin - LENGTH_BYTES, &length, LENGTH_BYTES);
}

}  // namespace

LeaseFrames::Served LeaseFrames::serve(const Reader& reader, std::span<const uint8_t> arrived, uint64_t now_ns, uint64_t left_ns) {
  Served served;
  const uint64_t begun_ns = clock_();
  for (uint64_t before_ns = begun_ns; before_ns - begun_ns <= left_ns && arrived.size() - served.consumed > LENGTH_BYTES &&
                                      served.answers.size() < bounds_.answer_bytes_max;) {
    const auto left = arrived.subspan(served.consumed);
    uint32_t length = 0;
    std::memcpy(&length, left.data(), LENGTH_BYTES);
    if (length > bounds_.frame_bytes_max || length > left.size() - LENGTH_BYTES) {
      break;
    }
    const auto kind = serve_frame(reader, left.subspan(LENGTH_BYTES, length), now_ns, served);
    if (!kind) {
      break;
    }
    served.consumed += LENGTH_BYTES + length;
    const uint64_t after_ns = clock_();
    times_.add_time(*kind, after_ns - before_ns);
    before_ns = after_ns;
  }
  return served;
}

// The kind of a frame that was served; nothing where it is not for here.
std::optional<uint32_t> LeaseFrames::serve_frame(const Reader& reader, std::span<const uint8_t> body, uint64_t now_ns, Served& served) {
  Fields fields(body);
  const size_t values = fields.array_size();
  const auto kind = fields.number();
  const auto sequence = fields.number();
  if (!kind || *kind > UINT32_MAX || !sequence || *sequence > INT64_MAX) {
    return std::nullopt;
  }
  const auto number = static_cast<uint32_t>(*kind);
  bool is_served = false;
  if (number == kinds_.acquire && values == 5) {
    is_served = serve_acquire(reader, fields.rest(), *sequence, now_ns, served);
  } else if (number == kinds_.drop_leases && values == 3) {
    is_served = serve_drop(reader, fields.rest(), now_ns, served);
  } else if (number == kinds_.renew && values == 3) {
    is_served = serve_renew(reader, fields.rest(), *sequence, now_ns, served);
  }
  return is_served ? std::optional(number) : std::nullopt;
}

bool LeaseFrames::serve_acquire(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                                Served& served) {
  Fields fields(packed);
  const auto keys = fields.bytes();
  const auto chunks = fields.number();
  if (!keys || !chunks || !fields.is_empty_text() || !fields.is_end()) {
    return false;
  }
  const Lease* const lease = desk_.lease_hit(reader, *keys, *chunks, now_ns);
  if (lease == nullptr) {
    return false;
  }
  answer_lease(reader, *lease, sequence, served.answers);
  return true;
}

void LeaseFrames::answer_lease(const Reader& reader, const Lease& lease, uint64_t sequence, std::vector<uint8_t>& answers) {
  const size_t begin = begin_frame(answers);
  Writer writer(answers);
  writer.array(8);
  writer.number(kinds_.leased);
  writer.number(sequence);
  writer.number(lease.id);
  writer.number(lease.chunks);
  const Columns columns = desk_.columns_of(reader, lease);
  write_column(writer, columns.offsets);
  write_column(writer, columns.generations);
  write_column(writer, columns.levels);
  write_column(writer, columns.slots);
  end_frame(answers, begin);
}

// A column of lease numbers, and nothing behind it.
std::optional<std::vector<uint64_t>> LeaseFrames::numbers_in(std::span<const uint8_t> packed) const {
  Fields fields(packed);
  const auto column = fields.bytes();
  if (!column || !fields.is_end() || column->size() % sizeof(uint64_t) != 0 || column->size() / sizeof(uint64_t) > bounds_.numbers_max) {
    return std::nullopt;
  }
  std::vector<uint64_t> numbers(column->size() / sizeof(uint64_t));
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), column->data(), column->size());
  }
  return numbers;
}

bool LeaseFrames::serve_drop(const Reader& reader, std::span<const uint8_t> packed, uint64_t now_ns, Served& served) {
  const auto numbers = numbers_in(packed);
  if (!numbers) {
    return false;
  }
  served.has_backlog = desk_.release_leases(reader, *numbers, now_ns);
  return true;
}

bool LeaseFrames::serve_renew(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns, Served& served) {
  const auto numbers = numbers_in(packed);
  if (!numbers) {
    return false;
  }
  for (const uint64_t number : *numbers) {
    desk_.leases().renew(number, reader.connection, now_ns);
  }
  const size_t begin = begin_frame(served.answers);
  Writer writer(served.answers);
  writer.array(2);
  writer.number(kinds_.done);
  writer.number(sequence);
  end_frame(served.answers, begin);
  return true;
}

}  // namespace kvpool
