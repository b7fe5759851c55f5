// Writes a frame of the local protocol: its length in 4 bytes, and the msgpack of an array [kind, sequence, field, …].
//
// What it is: the shortest msgpack of plain values, byte for byte what msgpack's own libraries write. What it is not: a reader, and it
// knows no records. Long columns are lent, not copied: their bytes are sent from where they lie.
//
// Threads: one.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvpool {

inline constexpr size_t FRAME_LENGTH_BYTES = 4;
inline constexpr size_t FRAME_BODY_BYTES_MIN = 2;
inline constexpr size_t FRAME_BODY_BYTES_MAX = size_t{1} << 20;

class FrameWriter {
 public:
  // From this size on, bytes are lent; below, copying them is faster than sending another piece (guess).
  static constexpr size_t LENT_BYTES_MIN = size_t{16} << 10;

  // Begins a frame of so many fields, which are put next; what was written before is gone.
  void begin(uint64_t kind, uint64_t sequence, size_t fields);

  void put_nothing() { put(0xC0); }
  void put_truth(bool value) { put(value ? 0xC3 : 0xC2); }
  void put_number(uint64_t value);
  void put_negative(int64_t value);  // REQUIRES: below 0
  void put_fraction(double value);
  void put_text(std::string_view text);
  void put_bytes(std::span<const uint8_t> bytes);  // REQUIRES: they stay where they are until the frame was sent
  void put_copied(std::span<const uint8_t> bytes);
  // The words as they lie. As `put_bytes`.
  template <typename Word>
  void put_column(const std::vector<Word>& words) {
    put_bytes({reinterpret_cast<const uint8_t*>(words.data()), words.size() * sizeof(Word)});
  }
  void begin_list(size_t items);
  void begin_map(size_t entries);  // each a key and a value

  // Bytes of the body so far.
  [[nodiscard]] size_t body_bytes() const noexcept { return written_.size() - FRAME_LENGTH_BYTES + lent_bytes_; }

  // The whole frame, in pieces, until the next one begins. REQUIRES: every field was put; FRAME_BODY_BYTES_MAX at most.
  [[nodiscard]] std::span<iovec> finish();
  // The same, put behind others.
  void finish_into(std::vector<uint8_t>& frames);

 private:
  // Bytes that stand in the frame behind so many that are written here.
  struct Lent {
    size_t behind;
    std::span<const uint8_t> bytes;
  };

  void put(uint8_t byte) { written_.push_back(byte); }
  void put_raw(const void* data, size_t size);
  // A marker and a number in as many bytes, the most significant first.
  template <typename Word>
  void put_word(uint8_t marker, Word value);
  void put_size(uint8_t marker_16, size_t size);
  void put_bytes_size(size_t size);

  std::vector<uint8_t> written_ = std::vector<uint8_t>(FRAME_LENGTH_BYTES);
  std::vector<Lent> lent_;
  std::vector<iovec> pieces_;
  size_t lent_bytes_ = 0;
};

}  // namespace kvpool
