// Comparing chunks on disk with their own checksums: the reading of a check that no engine waits for.
//
// What it is: a job of the SSD queue that reads header and extents into its thread's bounce memory, and reports the
// outcome of each chunk once. What it is not: a path into the arena; the bytes are forgotten when the piece ends.
//
// Pieces are read in steps of at most SSD_PIECE_BYTES, so that an urgent read waits for little.
// They need no order: each notes the checksums of its extents, and the one that ends last compares them with the header's. What
// differs is read once more, by plain calls, before it counts as bad.
//
// Invariant: no byte of a chunk is counted as good before its header and every extent of it have been read and compared.
// Threads: any. All mutable state is guarded by `lock_`, which is not held during I/O.
#pragma once

#include <optional>
#include <vector>

#include "ssd/ssd_job.h"

namespace kvpool {

class SsdVerifyJob final : public SsdPieceJob {
 public:
  // REQUIRES: at least one chunk, all of one geometry, extents inside the files, offsets whole pages.
  // `reads_back`: the written chunk that the only one is.
  explicit SsdVerifyJob(std::vector<SsdVerify> chunks, std::optional<SsdWritten> reads_back = std::nullopt);

  bool run_piece(SsdWorker& worker, uint32_t part, std::vector<SsdOutcome>& ended) override;
  [[nodiscard]] const SsdWritten* reads_back() const noexcept override { return reads_back_ ? &*reads_back_ : nullptr; }

 private:
  struct Sums {
    std::vector<uint32_t> wanted;  // the header's checksums; none before it has been read
    std::vector<uint32_t> found;   // by extent
  };
  // The outcome of reading a piece.
  struct Piece {
    SsdStatus status = SsdStatus::OK;
    uint64_t bytes = 0;
    std::vector<uint32_t> wanted{};  // of piece 0
    std::vector<uint32_t> crcs{};    // of the piece's extents
  };

  [[nodiscard]] Piece read(SsdIo& io, SsdBounce& bounce, size_t chunk, uint32_t piece) const;
  [[nodiscard]] SsdStatus read_header(SsdIo& io, const SsdVerify& plan, uint8_t* pages,
                                      std::vector<uint32_t>& wanted) const;
  [[nodiscard]] SsdStatus read_extents(SsdIo& io, const SsdVerify& plan, uint32_t first, uint8_t* pages, Piece& found) const;
  [[nodiscard]] bool is_right(size_t chunk, uint32_t piece) const noexcept;
  void take(size_t chunk, uint32_t piece, Piece& found);
  void settle(SsdWorker& worker, size_t chunk, uint32_t piece, Piece found, std::vector<SsdOutcome>& ended);

  const std::vector<SsdVerify> plan_;
  const std::optional<SsdWritten> reads_back_;
  std::vector<Sums> sums_;  // by chunk; guarded by lock_
};

}  // namespace kvpool
