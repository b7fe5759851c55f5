// One connection of a pull: extents on their way from a stream into slots of the arena.
//
// What it is: the judge of what the other side sends. A mark's numbers are compared with what must come next before a byte behind
// it is received, and the bytes with their checksum while they are in the cache: the mark's, and the one that the owner promised by a
// way of its own. Then the extent lands. What it is not: a socket,
// or a thread.
//
//   a chunk:  receiving ──last extent──► DONE
//             ├─ other bytes than their checksum, or GONE ──► BAD_SOURCE   (this chunk alone; its further extents are thrown away)
//             └─ the stream ends, or breaks its format ──► FAILED, BAD_SOURCE, CANCELLED   (all chunks of the connection)
//
// Threads: one.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "net/byte_stream.h"
#include "net/slot_landing.h"
#include "net/stream_format.h"

namespace kvpool {

// Each part is a connection.
struct PullPlan : PullTarget {
  std::string address;  // numeric
  uint16_t port = 0;
  StreamTicket ticket{};
  bool is_encrypted = false;
  std::chrono::milliseconds stall{0};  // the longest time without a byte

  [[nodiscard]] std::string peer() const { return address + " " + std::to_string(port); }
};

class ExtentReceiver {
 public:
  // Receives the chunks of a part of the plan. REQUIRES: both outlive the receiver.
  ExtentReceiver(const PullPlan& plan, uint32_t connection, SlotLanding& landing);

  // Receives until all chunks have ended.
  void run(ByteStream& stream);

 private:
  // The largest piece whose checksum is computed at once: it is still in the core's own cache.
  static constexpr size_t PIECE_BYTES = 256 << 10;
  // Extents that are smaller are received through a buffer, several with one call, and copied out of it in the pass that computes
  // their checksum: system calls and wake-ups cost more than such a copy (measured: 0.5 against 0.65 CPU s/GB at 16 and 64 KiB).
  // They land together, before more is received: streaming stores are waited for once, not for each of them, and who waits for a
  // chunk is woken once for those of its extents that came one behind the other.
  static constexpr uint64_t BUFFERED_EXTENT_BYTES = 128 << 10;
  static constexpr size_t BUFFER_BYTES = 256 << 10;

  struct Chunk {
    uint32_t next_extent = 0;
    bool is_gone = false;
  };

  // Consecutive extents of a chunk.
  struct Verified {
    uint32_t chunk;
    uint32_t first;
    uint32_t count;
  };

  [[nodiscard]] bool is_direct() const noexcept { return plan_.extent_bytes >= BUFFERED_EXTENT_BYTES; }
  [[nodiscard]] StreamFault fill(size_t missing);
  [[nodiscard]] StreamFault receive_mark(uint8_t* bytes);
  [[nodiscard]] StreamFault receive_direct(uint8_t* extent, bool is_thrown_away, uint32_t& crc);
  [[nodiscard]] StreamFault receive_buffered(uint8_t* extent, bool is_thrown_away, uint32_t& crc);
  [[nodiscard]] bool is_next(const StreamMark& mark) const noexcept;
  [[nodiscard]] StreamFault receive_extent(const StreamMark& mark);
  void land_all();
  [[nodiscard]] Chunk& of(uint32_t chunk) { return chunks_[chunk / plan_.parts]; }
  [[nodiscard]] const Chunk& of(uint32_t chunk) const { return chunks_[chunk / plan_.parts]; }

  const PullPlan& plan_;
  const uint32_t connection_;
  SlotLanding& landing_;
  const StreamTimes times_;
  ByteStream* stream_ = nullptr;
  std::vector<Chunk> chunks_;  // of this connection
  bool has_heard_ = false;     // a whole mark
  // What was received beyond what was asked for: many small extents, or of large ones the next mark.
  std::vector<uint8_t> buffer_;
  // Verified extents that were copied out of the buffer and have not landed yet, and their checksums one behind the other. Empty
  // wherever the connection waits.
  std::vector<Verified> verified_;
  std::vector<uint32_t> verified_crcs_;
  size_t buffered_from_ = 0;  // bytes of the buffer that are received and not taken
  size_t buffered_to_ = 0;
};

}  // namespace kvpool
