// Jobs of the SSD tier: chunks on their way from segment files into the arena, or the other way.
//
// What they are: units that hand out pieces, a few I/Os each, and report the outcome of each chunk once. What they are not:
// threads, or a policy about which chunks are worth moving.
//
// Writes pass through the calling thread's bounce memory: the bytes compared with a checksum there are the bytes that the disk
// writes, whatever clients do to the arena meanwhile. Reads go straight into the arena. A chunk found bad there is read once more
// into the bounce memory, by plain calls: only if it is bad there too is the chunk on disk dropped.
//
// A ReadJob goes extent by extent: the first ones of all chunks, then the next ones, so that every chunk's first extent can be
// loaded while the rest is still being read. Pieces are about SSD_PIECE_BYTES, whole extents, and never overlap: a page
// that has landed is not written again. Extents are checked and announced in order.
// A WriteJob writes a chunk in pieces of SSD_WRITE_BYTES, the header last where there are several. Its thread goes on with it
// after each piece unless something more urgent waits.
//
// Threads: any. All mutable state is guarded by `lock_`, which is not held during I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "shared_index/landing_board.h"
#include "base/memory.h"
#include "ssd/ssd_bounce.h"
#include "ssd/ssd_format.h"
#include "ssd/ssd_io.h"

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

// A thread's bounce memory and I/O, and the chunk that it has begun.
struct SsdWorker {
  SsdIo& io;
  SsdIo& calls;  // plain ones
  SsdBounce& bounce;
  std::optional<size_t> chunk{};  // of the job whose `run_piece` set it: begun, and this thread's to go on with
  bool has_found_bad_path = false;  // what was read into memory of the tier's own was bad once and good by plain calls
  uint64_t second_reads = 0;        // pieces
};

class SsdJob {
 public:
  explicit SsdJob(uint64_t id) : id_(id) {}
  virtual ~SsdJob() = default;

  // Does one piece by the calling thread's means; false when there is none to hand out. Chunks that ended by it are
  // appended to `ended`.
  virtual bool run_piece(SsdWorker& worker, std::vector<SsdOutcome>& ended) = 0;
  [[nodiscard]] virtual bool has_pieces() const = 0;
  // Ends the chunks that nothing has been done for yet; those under way end with their pieces.
  virtual void cancel(std::vector<SsdOutcome>& ended) = 0;
  // What reading a written chunk back must find on disk; nothing where the job writes none.
  [[nodiscard]] virtual std::optional<SsdVerify> written(uint32_t) const { return std::nullopt; }

  [[nodiscard]] uint64_t id() const noexcept { return id_; }

 private:
  const uint64_t id_;
};

// One chunk to read: where it lies, where it goes, in which slot that is announced, what its header must say (its `extent_crcs`
// count; their values do not).
struct SsdRead {
  uint64_t offset;
  uint64_t arena_offset;
  SlotAddress slot;
  SsdHeader expected;
};

class SsdReadJob final : public SsdJob {
 public:
  // REQUIRES: at least one chunk, all of one geometry, extents inside files and arena, offsets whole pages.
  SsdReadJob(uint64_t id, std::vector<SsdRead> chunks, std::shared_ptr<const Mapping> arena,
             std::shared_ptr<LandingBoard> board);

  bool run_piece(SsdWorker& worker, std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] bool has_pieces() const override;
  void cancel(std::vector<SsdOutcome>& ended) override;

 private:
  struct Chunk {
    SsdHeader found;
    std::vector<bool> is_read;  // by piece
    uint32_t checked = 0;       // pieces
    uint32_t running = 0;       // pieces
    bool is_checking = false;
    bool has_ended = false;
    SsdStatus status = SsdStatus::OK;
    uint64_t bytes = 0;
  };

  [[nodiscard]] uint32_t first_extent(uint32_t piece) const noexcept { return piece * piece_extents_; }
  [[nodiscard]] uint64_t piece_start(uint32_t piece) const noexcept;
  [[nodiscard]] bool claim(uint32_t& piece, size_t& chunk);
  [[nodiscard]] SsdStatus read(SsdIo& io, uint32_t piece, size_t chunk, SsdHeader& found, uint64_t& bytes) const;
  [[nodiscard]] SsdStatus read_again(SsdWorker& worker, uint32_t piece, size_t chunk, SsdHeader& found) const;
  void settle(SsdWorker& worker, uint32_t piece, size_t chunk, SsdStatus status, uint64_t bytes,
              std::vector<SsdOutcome>& ended);
  [[nodiscard]] SsdStatus check_piece(uint32_t piece, size_t chunk) const;
  void end_if_over(size_t chunk, std::vector<SsdOutcome>& ended);

  const std::vector<SsdRead> plan_;
  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  const uint32_t extents_;
  const uint64_t extent_bytes_;
  const uint64_t header_bytes_;
  const uint32_t piece_extents_;
  const uint32_t pieces_;  // of a chunk

  mutable std::mutex lock_;
  uint32_t next_piece_ = 0;
  size_t next_chunk_ = 0;
  std::vector<Chunk> chunks_;
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
  SsdWriteJob(uint64_t id, std::vector<SsdWrite> chunks, std::shared_ptr<const Mapping> arena);

  bool run_piece(SsdWorker& worker, std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] bool has_pieces() const override;
  void cancel(std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] std::optional<SsdVerify> written(uint32_t chunk) const override;

 private:
  // How far a chunk has been written. Its thread's alone once it is claimed.
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

  mutable std::mutex lock_;
  size_t next_ = 0;
};

}  // namespace kvpool
