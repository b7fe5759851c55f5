// The threads of the SSD tier and the queue before them.
//
// Guarantees, beside those of a JobLine:
// 1. Demand reads go before promotions, both before write-back, all before checks; among equals the oldest goes first, a
//    piece at a time.
// 2. Write-back and checks never take more than half of the threads: a demand read waits for at most one piece.
// 3. A sample of what was written is read back before it is reported; a difference has all of it read back from then on
//    (ssd_read_backs.h).
// 4. `stop` lets running pieces finish: no I/O is under way when it returns true.
//
// Each thread has bounce memory and an SsdIo of its own: a ring where one is wanted and can be made, for as long as its bytes
// are right. Between two pieces of a chunk, a writing thread first does any job that is more urgent.
//
// The depth is shallow on purpose: disks of this class saturate at one or two reads of a MiB in flight, and each further one
// only makes urgent reads wait longer.
// Threads: any. Lock order: the line's lock, then a job's; neither is held during I/O.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ssd/ssd_job.h"
#include "ssd/ssd_read_backs.h"
#include "ssd/ssd_stamped_io.h"
#include "ssd/ssd_verify_job.h"
#include "threads/job_line.h"

namespace kvpool {

enum class SsdUrgency : uint8_t { DEMAND = 0, PROMOTION = 1, WRITE_BACK = 2, CHECK = 3 };
inline constexpr size_t SSD_URGENCIES = 4;

struct SsdQueueStats {
  std::array<uint64_t, SSD_URGENCIES> waiting{};  // jobs
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t failed_chunks = 0;
  uint64_t read_back_chunks = 0;
  uint64_t second_reads = 0;  // pieces of chunks that were found bad in the arena
};

// How I/O is done, counted in threads.
struct SsdQueueIo {
  unsigned threads = 0;
  unsigned rings = 0;          // threads that have one
  int ring_error = 0;          // why one has none although it was wanted: an errno
  bool is_distrusted = false;  // what was moved differed once: plain calls alone, and all that is written is read back
  SsdFault fault;              // the latest; none: error 0
};

class SsdQueue final : public JobLine<SsdJob, SsdOutcome> {
 public:
  // Returns when every thread has its SsdIo. REQUIRES: threads > 0. Throws std::system_error where there are no
  // threads or descriptors to be had.
  SsdQueue(std::shared_ptr<SsdFiles> files, std::shared_ptr<const Mapping> arena, std::shared_ptr<LandingBoard> board,
           unsigned threads, size_t jobs_max, bool wants_rings);
  ~SsdQueue() { stop(ThreadGroup::FOR_GOOD); }

  // A job's number; 0 where its queue is full or stopped. REQUIRES: what the jobs require.
  [[nodiscard]] uint64_t read(std::vector<SsdRead> chunks, SsdUrgency urgency);
  [[nodiscard]] uint64_t write(std::vector<SsdWrite> chunks);
  [[nodiscard]] uint64_t verify(std::vector<SsdVerify> chunks);

  // Age of the oldest transfer under way; 0: none is. An unresponsive disk is recognised by this alone.
  [[nodiscard]] std::chrono::nanoseconds longest_transfer() const;
  [[nodiscard]] SsdQueueStats stats() const;
  [[nodiscard]] SsdQueueIo io() const;
  [[nodiscard]] const SsdFiles& files() const noexcept { return *files_; }
  [[nodiscard]] const Mapping& arena() const noexcept { return *arena_; }

 private:
  static constexpr Clock::time_point NEVER = Clock::time_point::max();

  [[nodiscard]] uint64_t add(std::shared_ptr<SsdJob> job, SsdUrgency urgency, size_t chunks);
  void drop(const Rest& rest) override;
  [[nodiscard]] std::optional<Task> next(const std::optional<Task>& unfinished);
  [[nodiscard]] std::unique_ptr<SsdIo> make_io(bool wants_ring);
  void run(size_t thread, bool wants_ring);
  [[nodiscard]] bool run_piece(size_t thread, SsdWorker& worker, const Task& task);
  void stamp(size_t thread);
  [[nodiscard]] bool is_distrusted() const;
  void report_all(const std::shared_ptr<SsdJob>& job, std::vector<SsdOutcome>& ended);
  void end_chunk(SsdJob& job, SsdOutcome outcome);
  [[nodiscard]] SsdStatus verdict(SsdStatus read);
  [[nodiscard]] bool read_back(const std::shared_ptr<SsdJob>& job, SsdOutcome& outcome);

  const std::shared_ptr<SsdFiles> files_;
  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<LandingBoard> board_;
  const unsigned writers_max_;

  std::vector<Clock::time_point> begun_;  // guarded by the line's lock; of transfers by thread, NEVER: at no piece
  unsigned writers_ = 0;                  // guarded by the line's lock; those at checks count
  SsdReadBacks read_backs_;               // guarded by the line's lock
  SsdQueueIo io_;                         // guarded by the line's lock
  SsdQueueStats stats_;                   // guarded by the line's lock
  std::vector<std::unique_ptr<SsdBounce>> bounces_;  // by thread
};

}  // namespace kvpool
