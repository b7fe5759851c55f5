// What the jobs of a copy pool have in common: pieces that are handed out once each, and who waits for them.
//
//   RUNNING ──every piece done──► AT REST ──more to hand out──► RUNNING
//      └──cancel, the last running piece done──► AT REST, for good
//
// A piece is claimed and settled with the lock held, and copied without it.
// Threads: any. All mutable state of a job is guarded by `lock_`, but for what belongs to a piece while it is copied.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "copy/copy_pool.h"

namespace kvpool {

class PieceJob : public CopyJob {
 public:
  uint64_t run_piece() final;
  [[nodiscard]] bool has_pieces() const final;
  // When it returns no byte is written any more.
  void cancel() final;

  // Whether everything that is to be done now is done, or the job cancelled, within the time.
  [[nodiscard]] bool wait(double timeout_s) const;
  [[nodiscard]] bool is_done() const;
  [[nodiscard]] bool is_cancelled() const;
  // Extents of chunks that are done.
  [[nodiscard]] uint64_t progress() const;

 protected:
  // Bytes handed out at a time: enough to make the lock cheap, little enough for several threads and quick cancelling.
  static constexpr uint64_t PIECE_BYTES = 256 << 10;

  // `count` chunks from `first` on, `extents` extents of each from `extent` on; one of the two numbers is 1.
  struct Piece {
    uint32_t extent;
    uint32_t extents;
    uint64_t first;
    uint64_t count;
  };

  // All of these but `copy` are called with the lock held.
  // Takes the next piece; false where none can be had now. Not called once the job is cancelled.
  virtual bool claim(Piece& piece) = 0;
  // Returns its bytes, which are more than 0.
  virtual uint64_t copy(const Piece& piece) = 0;
  // The piece has been copied. True where somebody may wait for that alone: a wake for each piece costs a small chunk a third of its
  // time.
  virtual bool settle(const Piece& piece) = 0;
  // Whether there are pieces to hand out, now or later.
  [[nodiscard]] virtual bool has_next() const = 0;

  // `wanted`: extents of chunks that are to be done, as far as is known.
  explicit PieceJob(uint64_t wanted) : wanted_(wanted) {}

  [[nodiscard]] bool is_whole() const { return settled_ == wanted_; }
  [[nodiscard]] bool is_at_rest() const { return running_ == 0 && (cancelled_ || is_whole()); }

  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  uint64_t running_ = 0;  // pieces
  uint64_t settled_ = 0;  // extents of chunks
  uint64_t wanted_;
  bool cancelled_ = false;

 private:
  // Whether this is a forked child's copy of the job: its pieces are not running here, whatever it says.
  [[nodiscard]] bool is_inherited() const noexcept { return process_life() != life_; }

  const uint32_t life_ = process_life();
};

}  // namespace kvpool
