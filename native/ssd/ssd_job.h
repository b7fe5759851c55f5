// Jobs of the SSD tier: chunks on their way from segment files into the arena, or the other way.
//
// What they are: units in parts of a few I/Os each, which end each chunk once. What they are not: threads, or a policy about which
// chunks are worth moving.
//
// Writes pass through the calling thread's bounce memory: the bytes compared with a checksum there are the bytes that the disk
// writes, whatever clients do to the arena meanwhile. Reads go straight into the arena. A chunk found bad there is read once more
// into the bounce memory, by plain calls: only if it is bad there too is the chunk on disk dropped.
//
// A ReadJob goes extent by extent: the first ones of all chunks, then the next ones, so that every chunk's first extent can be
// loaded while the rest is still being read. Pieces are about SSD_PIECE_BYTES, whole extents, and never overlap: a page
// that has landed is not written again. Extents are checked and announced in order.
// A WriteJob writes a chunk in pieces of SSD_WRITE_BYTES, the header last where there are several. A chunk is a part, which its
// thread goes on with after each piece unless something more urgent waits.
//
// Threads: any. What changes of a job is guarded by its `lock_`, which is not held during I/O, or is one part's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "shared_index/landing_board.h"
#include "base/memory.h"
#include "ssd/ssd_bounce.h"
#include "ssd/ssd_format.h"
#include "ssd/ssd_io.h"
#include "threads/job_line.h"

namespace kvpool {

// Disks of this class saturate from here on; smaller pieces let urgent reads through sooner (see the page of figures).
inline constexpr uint64_t SSD_PIECE_BYTES = 1 << 20;
inline constexpr uint64_t SSD_WRITE_BYTES = 4 << 20;
// The most bytes that one I/O of a piece moves, beside a header.
inline constexpr uint64_t SSD_STEP_BYTES = SsdBounce::HALF_BYTES - SSD_HEADER_BYTES_MAX;

// The outcome of one chunk of a job.
struct SsdOutcome {
  uint64_t job;
  uint32_t chunk;
  SsdStatus status;
  uint64_t bytes;  // moved, whatever became of them
  std::vector<int32_t> tokens{};  // token ids of a chunk that was read, where its header has them
};

// One chunk to compare where it lies: what its header must say (its `extent_crcs` count; their values do not).
struct SsdVerify {
  uint64_t offset;
  SsdHeader expected;
};

// A thread's bounce memory and I/O.
struct SsdWorker {
  SsdIo& io;
  SsdIo& calls;  // plain ones
  SsdBounce& bounce;
  bool has_found_bad_path = false;  // what was read into memory of the tier's own was bad once and good by plain calls
  uint64_t second_reads = 0;        // pieces
};

struct SsdWritten;

class SsdJob : public LineJob {
 public:
  virtual ~SsdJob() = default;

  [[nodiscard]] virtual uint32_t parts() const noexcept = 0;
  // Does a piece of a part by the calling thread's means; true where the part has more of them, which the same thread does. Chunks
  // that ended by it are appended to `ended`.
  virtual bool run_piece(SsdWorker& worker, uint32_t part, std::vector<SsdOutcome>& ended) = 0;
  // Ends the chunks whose parts `first` .. `end` nobody will do; those under way end with their pieces.
  virtual void cancel(uint32_t first, uint32_t end, std::vector<SsdOutcome>& ended) = 0;
  // What reading a written chunk back must find on disk; nothing where the job writes none.
  [[nodiscard]] virtual std::optional<SsdVerify> written(uint32_t) const { return std::nullopt; }
  // The written chunk that the job reads back, or nullptr.
  [[nodiscard]] virtual const SsdWritten* reads_back() const noexcept { return nullptr; }
};

// A chunk that was written, and its outcome if it is read back as it was.
struct SsdWritten {
  std::shared_ptr<SsdJob> job;
  SsdOutcome outcome;
};

// A job whose chunks are read in pieces of whole extents. Each piece is a part; a chunk ends when no thread is at it any more.
class SsdPieceJob : public SsdJob {
 public:
  [[nodiscard]] uint32_t parts() const noexcept override { return pieces_ * static_cast<uint32_t>(chunks_.size()); }
  void cancel(uint32_t first, uint32_t end, std::vector<SsdOutcome>& ended) override;

 protected:
  struct Chunk {
    uint32_t done = 0;     // pieces that were read and compared
    uint32_t running = 0;  // pieces
    bool has_ended = false;
    SsdStatus status = SsdStatus::OK;
    uint64_t bytes = 0;
  };

  // REQUIRES: one chunk at least, all of one geometry.
  template <typename Plan>
  explicit SsdPieceJob(const std::vector<Plan>& plan) : SsdPieceJob(plan.at(0).expected, plan.size()) {
    for (const Plan& chunk : plan) {
      KVPOOL_CHECK(chunk.expected.extent_crcs.size() == extents_);
      KVPOOL_CHECK(chunk.expected.extent_bytes == extent_bytes_);
    }
  }

  [[nodiscard]] uint32_t first_extent(uint32_t piece) const noexcept { return std::min(piece * piece_extents_, extents_); }
  // Whether the chunk has not failed; then a piece of it runs until `end_piece`.
  [[nodiscard]] bool begin_piece(size_t chunk);
  // REQUIRES: `lock_` is held.
  void end_piece(size_t chunk, std::vector<SsdOutcome>& ended);
  // The first thing that goes wrong with a chunk stays. REQUIRES: `lock_` is held.
  virtual void fail(size_t chunk, SsdStatus status);
  // What is reported of a chunk beside its status. REQUIRES: `lock_` is held.
  [[nodiscard]] virtual std::vector<int32_t> take_tokens(size_t) { return {}; }

  const uint32_t extents_;
  const uint64_t extent_bytes_;
  const uint64_t header_bytes_;
  const uint32_t piece_extents_;
  const uint32_t pieces_;  // of a chunk

  mutable std::mutex lock_;
  std::vector<Chunk> chunks_;

 private:
  SsdPieceJob(const SsdHeader& header, size_t chunks);
  void end_if_over(size_t chunk, std::vector<SsdOutcome>& ended);
};

// One chunk to read: where it lies, where it goes, in which slot that is announced, what its header must say (its `extent_crcs`
// count; their values do not).
struct SsdRead {
  uint64_t offset;
  uint64_t arena_offset;
  SlotAddress slot;
  SsdHeader expected;
};

class SsdReadJob final : public SsdPieceJob {
 public:
  // REQUIRES: at least one chunk, all of one geometry, extents inside files and arena, offsets whole pages.
  SsdReadJob(std::vector<SsdRead> chunks, std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board);

  bool run_piece(SsdWorker& worker, uint32_t part, std::vector<SsdOutcome>& ended) override;

 private:
  struct Found {
    SsdHeader header;
    std::vector<bool> is_read;  // by piece
    bool is_checking = false;
  };

  [[nodiscard]] uint64_t piece_start(uint32_t piece) const noexcept;
  [[nodiscard]] SsdStatus read(SsdIo& io, uint32_t piece, size_t chunk, SsdHeader& found, uint64_t& bytes) const;
  [[nodiscard]] SsdStatus read_again(SsdWorker& worker, uint32_t piece, size_t chunk, SsdHeader& found) const;
  void settle(SsdWorker& worker, uint32_t piece, size_t chunk, SsdStatus status, uint64_t bytes,
              std::vector<SsdOutcome>& ended);
  [[nodiscard]] SsdStatus check_piece(uint32_t piece, size_t chunk) const;
  void fail(size_t chunk, SsdStatus status) override;
  [[nodiscard]] std::vector<int32_t> take_tokens(size_t chunk) override { return std::move(found_[chunk].header.tokens); }

  const std::vector<SsdRead> plan_;
  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  std::vector<Found> found_;  // by chunk; guarded by lock_
};

// One chunk to write: the header says what it is, its checksums what its bytes must be.
struct SsdWrite {
  uint64_t offset;
  uint64_t arena_offset;
  SsdHeader header;
};

class SsdWriteJob final : public SsdJob {
 public:
  // REQUIRES: as SsdReadJob.
  SsdWriteJob(std::vector<SsdWrite> chunks, std::shared_ptr<const Mapping> arena);

  [[nodiscard]] uint32_t parts() const noexcept override { return static_cast<uint32_t>(plan_.size()); }
  bool run_piece(SsdWorker& worker, uint32_t chunk, std::vector<SsdOutcome>& ended) override;
  void cancel(uint32_t first, uint32_t end, std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] std::optional<SsdVerify> written(uint32_t chunk) const override;

 private:
  // How far a chunk has been written. Its thread's alone.
  struct Progress {
    uint64_t at = 0;     // bytes of the chunk, without its header
    uint32_t crc = 0;    // of the extent that `at` is in the middle of
    bool is_good = true;
  };

  [[nodiscard]] int write_next(SsdWorker& worker, const SsdWrite& chunk, Progress& progress) const;
  [[nodiscard]] bool copy_source(uint8_t* target, const SsdWrite& chunk, uint64_t size, Progress& progress) const;

  const std::vector<SsdWrite> plan_;
  const std::shared_ptr<const Mapping> arena_;
  std::vector<Progress> progress_;
};

}  // namespace kvpool
