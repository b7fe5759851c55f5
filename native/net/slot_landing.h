// The slots that one part of a pull fills: where each extent goes, what its bytes must be, and how each chunk ends.
//
// What it is: the only writer of those slots' landing words, whatever brings the bytes: a stream, or memory of this host. What it is
// not: the bringer, which copies an extent and its checksum in one pass, and fences before it lands.
//
//   a chunk:  extents land in their order ──the last──► DONE
//             └─ other bytes than promised, the end of the job, of the source ──► BAD_SOURCE, FAILED, CANCELLED
//
// Each chunk ends exactly once; nothing is written to its slot afterwards. Where the target says so, one that FAILED before an extent of
// it had landed is not marked on the board: whoever takes its outcome has it received again, or marks it.
// Threads: one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/memory.h"
#include "net/byte_stream.h"
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

// What a pull is to fill, in so many parts that go on by themselves: part p brings the chunks number p, p + parts, …
struct PullTarget {
  std::vector<PullRow> rows;
  std::vector<uint32_t> checks;  // CRC-32C of each row's extents, as the owner promised them; empty: it did not
  uint32_t parts = 1;
  uint32_t extents = 0;
  uint64_t extent_bytes = 0;
  StreamClock::time_point deadline;
  bool may_come_again = false;  // what FAILED before an extent of it had landed: it is left unmarked
};

// The end of one chunk of a job. Times count from the begin of its part, but for `waited`: from the call to that begin.
struct PullOutcome {
  uint64_t job = 0;
  uint32_t chunk = 0;
  PullStatus status = PullStatus::DONE;
  PullFault fault = PullFault::NONE;
  uint64_t bytes = 0;  // that have landed
  std::chrono::microseconds waited{0};
  std::chrono::microseconds first_extent{0};  // 0: none has landed
  std::chrono::microseconds elapsed{0};
  bool is_unmarked = false;  // it has FAILED, no extent has landed, and the board has no mark of that
};

class SlotLanding {
 public:
  using Report = std::function<void(std::span<PullOutcome>)>;

  // `report` gets each chunk of the part once; what is not known here of an outcome (job, waited) is left to it.
  // REQUIRES: every row inside arena and index, for as many extents; a check for each extent, or none.
  SlotLanding(const PullTarget& target, uint32_t part, const Mapping& arena, LandingBoard& board, Report report);

  // Chunks of this part, whatever has become of them; how many have not ended.
  template <typename Visit>
  void each(Visit visit) const {
    for (uint32_t chunk = part_; chunk < target_.rows.size(); chunk += target_.parts) {
      visit(chunk);
    }
  }
  [[nodiscard]] bool has(uint32_t chunk) const noexcept { return chunk < target_.rows.size() && chunk % target_.parts == part_; }
  [[nodiscard]] size_t left() const noexcept { return left_; }
  // All of these REQUIRE: has(chunk).
  [[nodiscard]] bool has_ended(uint32_t chunk) const noexcept { return of(chunk).has_ended; }
  [[nodiscard]] uint8_t* bytes_of(uint32_t chunk, uint32_t extent) const noexcept {
    return arena_.data() + target_.rows[chunk].arena_offset + extent * target_.extent_bytes;
  }
  [[nodiscard]] bool is_promised(uint32_t chunk, uint32_t extent, uint32_t crc) const noexcept {
    return target_.checks.empty() || target_.checks[uint64_t{chunk} * target_.extents + extent] == crc;
  }
  // Extents from `first` on are in place; ends the chunk with its last one.
  void land(uint32_t chunk, uint32_t first, const uint32_t* crcs, uint32_t count);
  // Ends a chunk, unless it has ended. Nothing may be written to its slot from then on.
  void end(uint32_t chunk, PullStatus status, PullFault fault);
  // Reports what has ended since the last call: one wake-up for all of it, before its user waits for something else.
  void report();
  // Ends all that have not ended, and reports.
  void end_all(PullStatus status, PullFault fault);

 private:
  struct Chunk {
    uint32_t landed = 0;  // extents
    bool has_ended = false;
    std::chrono::microseconds first_extent{0};
  };

  [[nodiscard]] Chunk& of(uint32_t chunk) noexcept { return chunks_[chunk / target_.parts]; }
  [[nodiscard]] const Chunk& of(uint32_t chunk) const noexcept { return chunks_[chunk / target_.parts]; }
  [[nodiscard]] std::chrono::microseconds elapsed() const;

  const PullTarget& target_;
  const uint32_t part_;
  const Mapping& arena_;
  LandingBoard& board_;
  const Report report_;
  const StreamClock::time_point begun_ = StreamClock::now();
  std::vector<Chunk> chunks_;  // of this part
  size_t left_;
  std::vector<PullOutcome> ended_;  // not reported
};

}  // namespace kvpool
