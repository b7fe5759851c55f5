// One connection of a pull: extents on their way from a stream into slots of the arena.
//
// What it is: the judge of what the other side sends. The numbers of a mark and its runs are compared with what must come next before
// a byte behind them is received. Extents are received straight into their slots, many with one system call, and their checksums
// compared while they are in the cache: with the mark's, and with the one that the owner promised by a way of its own. Then they land.
// What it is not: a socket, or a thread.
//
//   a chunk:  receiving ──last extent──► DONE
//             ├─ other bytes than their checksum, or a run of none ──► BAD_SOURCE   (this chunk alone; what comes of it after that
//             │                                                                      piece is thrown away)
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
  // So much is received before its checksums are computed: it is still in the core's own cache.
  static constexpr size_t PIECE_BYTES = 128 << 10;
  static constexpr size_t WASTE_BYTES = 16 << 10;

  struct Chunk {
    uint32_t next_extent = 0;
    bool is_gone = false;
  };

  // A part of a run's bytes. Of none: the chunk is gone.
  struct Piece {
    size_t run;
    uint64_t at;
    size_t size;
  };

  [[nodiscard]] StreamFault receive(size_t size, bool is_last);
  [[nodiscard]] StreamFault receive_bytes(uint8_t* target, size_t size);
  [[nodiscard]] StreamFault receive_extents();
  [[nodiscard]] bool take_runs();
  void judge(const Piece& piece);
  [[nodiscard]] Chunk& of(uint32_t chunk) { return chunks_[chunk / plan_.parts]; }

  const PullPlan& plan_;
  const uint32_t connection_;
  SlotLanding& landing_;
  const StreamTimes times_;
  ByteStream* stream_ = nullptr;
  std::vector<Chunk> chunks_;  // of this connection
  bool has_heard_ = false;     // a whole mark
  // What was received beyond what was asked for: the next mark, most of the time, and the first bytes behind it.
  std::vector<uint8_t> ahead_;
  size_t ahead_from_ = 0;
  size_t ahead_to_ = 0;
  // The mark under way, and the checksums of its extents.
  std::vector<StreamRun> runs_;
  std::vector<uint32_t> crcs_;
  std::vector<Piece> pieces_;  // received together
  std::vector<size_t> first_crc_;  // in `crcs_`, by run
  std::vector<iovec> parts_;
  uint32_t crc_ = 0;  // of the extent that a piece has begun
  std::array<uint8_t, WASTE_BYTES> waste_;
};

}  // namespace kvpool
