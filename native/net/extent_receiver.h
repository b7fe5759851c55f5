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
// Each chunk ends exactly once; nothing is written to its slot afterwards. One that FAILED before an extent of it had landed is not
// marked on the board: whoever takes its outcome has it received again, or marks it.
// Threads: one.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "net/byte_stream.h"
#include "net/stream_format.h"
#include "shared_index/landing_board.h"

namespace kvpool {

enum class PullStatus : uint8_t { DONE = 0, BAD_SOURCE = 1, FAILED = 2, CANCELLED = 3 };

enum class PullFault : uint8_t {
  NONE,
  UNREACHABLE,  // no connection came about
  REFUSED,      // the other side ended it before the first mark: it does not know the ticket
  CLOSED,       // the other side ended it in the middle
  BROKEN,
  STALLED,  // no byte for the time that the job allows
  LATE,     // the job's deadline
  FORMAT,   // a mark that is none, or not the one that must come
  CHECKSUM,
  GONE,       // the other side no longer has the chunk
  UNTRUSTED,  // the other side did not show that it knows the ticket: an encrypted stream did not come about
  CANCELLED,
};

// A word for statistics and messages.
[[nodiscard]] const char* pull_fault_word(PullFault fault) noexcept;

// Where a chunk goes.
struct PullRow {
  uint64_t arena_offset;
  SlotAddress slot;
};

struct PullPlan {
  std::string address;  // numeric
  uint16_t port = 0;
  StreamTicket ticket{};
  bool is_encrypted = false;
  uint32_t connections = 1;
  uint32_t extents = 0;
  uint64_t extent_bytes = 0;
  std::vector<PullRow> rows;
  std::vector<uint32_t> checks{};  // CRC-32C of each row's extents, as the owner promised them; empty: it did not
  std::chrono::milliseconds stall{0};  // the longest time without a byte
  StreamClock::time_point deadline;

  [[nodiscard]] std::string peer() const { return address + " " + std::to_string(port); }
};

// The end of one chunk of a job. Times count from the begin of its connection, but for `waited`: from the call to that begin.
struct PullOutcome {
  uint64_t job = 0;
  uint32_t chunk = 0;
  PullStatus status = PullStatus::DONE;
  PullFault fault = PullFault::NONE;
  uint64_t bytes = 0;  // received for it
  std::chrono::microseconds waited{0};
  std::chrono::microseconds first_extent{0};  // 0: none has landed
  std::chrono::microseconds elapsed{0};
  bool is_unmarked = false;  // it has FAILED, no extent has landed, and the board has no mark of that
};

class ExtentReceiver {
 public:
  using Report = std::function<void(const PullOutcome&)>;

  // Receives the chunks number `connection`, `connection` + `connections`, … of the plan. `report` is called once for each of them;
  // what it does not know of an outcome (job, waited) is left to it.
  // REQUIRES: every row inside arena and index, for as many extents; a check for each extent, or none.
  ExtentReceiver(const PullPlan& plan, uint32_t connection, const Mapping& arena, LandingBoard& board, Report report);

  // Receives until all chunks have ended.
  void run(ByteStream& stream);
  // Ends those that have not ended: there is no stream for them.
  void end_all(PullStatus status, PullFault fault);

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
    bool has_ended = false;
    bool is_gone = false;
    uint64_t bytes = 0;
    std::chrono::microseconds first_extent{0};
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
  [[nodiscard]] bool is_promised(const StreamMark& mark, uint32_t crc) const noexcept;
  void land_all();
  void land(const Verified& extents, const uint32_t* crcs);
  void end_chunk(uint32_t chunk, PullStatus status, PullFault fault);
  void end_by(StreamFault fault);
  [[nodiscard]] Chunk& of(uint32_t chunk) { return chunks_[chunk / plan_.connections]; }
  [[nodiscard]] const Chunk& of(uint32_t chunk) const { return chunks_[chunk / plan_.connections]; }
  [[nodiscard]] std::chrono::microseconds elapsed() const;

  const PullPlan& plan_;
  const uint32_t connection_;
  const Mapping& arena_;
  LandingBoard& board_;
  const Report report_;
  const StreamTimes times_;
  const StreamClock::time_point begun_;
  ByteStream* stream_ = nullptr;
  std::vector<Chunk> chunks_;  // of this connection
  size_t left_;                // chunks that have not ended
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
