// Comparing chunks on disk with their own checksums: the reading of a check that no engine waits for.
//
// What it is: a job of the SSD queue that reads header and extents into its thread's bounce memory, and reports the
// outcome of each chunk once. What it is not: a path into the arena; the bytes are forgotten when the piece ends.
//
// Pieces are about SSD_PIECE_BYTES, whole extents, and read in steps of at most that, so that an urgent read waits for little.
// They need no order: each notes the checksums of its extents, and the one that ends last compares them with the header's. What
// differs is read once more, by plain calls, before it counts as bad.
//
// Invariant: no byte of a chunk is counted as good before its header and every extent of it have been read and compared.
// Threads: any. All mutable state is guarded by `lock_`, which is not held during I/O.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "ssd/ssd_job.h"

namespace kvpool {

class SsdVerifyJob final : public SsdJob {
 public:
  // REQUIRES: at least one chunk, all of one geometry, extents inside the files, offsets whole pages.
  SsdVerifyJob(uint64_t id, std::vector<SsdVerify> chunks);

  bool run_piece(SsdWorker& worker, std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] bool has_pieces() const override;
  void cancel(std::vector<SsdOutcome>& ended) override;

 private:
  struct Chunk {
    std::vector<uint32_t> wanted;  // the header's checksums; none before it has been read
    std::vector<uint32_t> found;   // by extent
    uint32_t read = 0;             // pieces
    uint32_t running = 0;          // pieces
    bool has_ended = false;
    SsdStatus status = SsdStatus::OK;
    uint64_t bytes = 0;
  };
  // The outcome of reading a piece.
  struct Piece {
    SsdStatus status = SsdStatus::OK;
    uint64_t bytes = 0;
    std::vector<uint32_t> wanted{};  // of piece 0
    std::vector<uint32_t> crcs{};    // of the piece's extents
  };

  [[nodiscard]] bool claim(size_t& chunk, uint32_t& piece);
  [[nodiscard]] Piece read(SsdIo& io, SsdBounce& bounce, size_t chunk, uint32_t piece) const;
  [[nodiscard]] SsdStatus read_header(SsdIo& io, const SsdVerify& plan, uint8_t* pages,
                                      std::vector<uint32_t>& wanted) const;
  [[nodiscard]] SsdStatus read_extents(SsdIo& io, const SsdVerify& plan, uint32_t first, uint8_t* pages, Piece& found) const;
  [[nodiscard]] bool is_right(const Chunk& chunk, uint32_t piece) const noexcept;
  void take(Chunk& chunk, uint32_t piece, Piece& found);
  void settle(SsdWorker& worker, size_t chunk, uint32_t piece, Piece found, std::vector<SsdOutcome>& ended);
  void end_if_over(size_t chunk, std::vector<SsdOutcome>& ended);

  const std::vector<SsdVerify> plan_;
  const uint32_t extents_;
  const uint64_t extent_bytes_;
  const uint64_t header_bytes_;
  const uint32_t piece_extents_;
  const uint32_t pieces_;  // of a chunk

  mutable std::mutex lock_;
  size_t next_chunk_ = 0;
  uint32_t next_piece_ = 0;
  std::vector<Chunk> chunks_;
};

}  // namespace kvpool
