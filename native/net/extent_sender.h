// One connection of an offer: extents on their way from slots of the arena into a stream.
//
// What it is: extent 0 of all chunks of the connection, then extent 1, …, each straight from the arena, many behind one mark with
// their checksums; behind extent 0, several small extents of each chunk in turn, so that its puller publishes them at once. What it is
// not: a right: the offer's owner holds a lease on the chunks until the offer has ended.
// A slot whose extents are still landing is followed. A chunk that has left its slot, or failed to land, is marked as gone, and the
// others go on. The generation is read again after an extent's checksum: a chunk that leaves its slot while it is sent has other bytes
// than its checksum, which the puller finds.
// Threads: one, but for OfferStop.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "net/byte_stream.h"
#include "net/stream_format.h"
#include "shared_index/chunk_table.h"

namespace kvpool {

struct OfferedChunk {
  uint64_t arena_offset;
  SlotAddress slot;
  uint64_t generation;
};

// What a peer may pull with one ticket, over so many connections, once each.
struct OfferPlan {
  std::vector<OfferedChunk> chunks;
  uint32_t extents = 0;
  uint64_t extent_bytes = 0;
  uint32_t connections = 1;
  uint64_t peer = 0;  // at whose pace it is sent
  StreamClock::time_point deadline;
};

// CRC-32C of all extents of all chunks, chunk by chunk, for who is offered them; empty where one of them has not landed, or has gone.
[[nodiscard]] std::vector<uint32_t> offered_checks(const IndexView& index, const std::vector<OfferedChunk>& chunks,
                                                   uint32_t extents);

// Wakes the connections of an offer that wait for a landing or for their peer's rate. Any thread.
class OfferStop {
 public:
  void stop();
  [[nodiscard]] bool is_stopped();
  // Whether it is stopped before that time.
  [[nodiscard]] bool wait_until(StreamClock::time_point time);

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool is_stopped_ = false;
};

// The rate at which a peer may take bytes, over all its connections. Any thread.
class SendPace {
 public:
  // 0: no bound.
  explicit SendPace(uint64_t bytes_per_s) noexcept : bytes_per_s_(bytes_per_s) {}
  // How many bytes go at once, so that the other side never waits long for the next ones.
  [[nodiscard]] uint64_t batch_bytes() const noexcept;
  // When so many bytes may be sent; they count as sent from now on.
  [[nodiscard]] StreamClock::time_point take(uint64_t bytes);

 private:
  const uint64_t bytes_per_s_;
  std::mutex lock_;
  StreamClock::time_point free_from_;  // guarded by lock_
};

class ExtentSender {
 public:
  // REQUIRES: every chunk inside arena and index, for as many extents.
  ExtentSender(std::shared_ptr<const OfferPlan> plan, uint32_t connection, std::shared_ptr<const Mapping> arena,
               std::shared_ptr<const IndexView> index, SendPace& pace, OfferStop& stop, std::chrono::milliseconds stall);

  // Sends until all chunks of the connection have been sent or marked as gone.
  [[nodiscard]] StreamFault run(ByteStream& stream);
  [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }  // sent, without marks
  [[nodiscard]] uint32_t gone_chunks() const noexcept { return gone_chunks_; }

 private:
  static constexpr std::chrono::milliseconds WAITING_PERIOD{100};

  enum class State { READY, LANDING, GONE };
  [[nodiscard]] uint32_t group_extents() const noexcept;
  [[nodiscard]] State look(uint32_t chunk, uint32_t first, uint32_t end, uint32_t& landed);
  [[nodiscard]] StreamFault gather_landed(uint32_t chunk, uint32_t first, uint32_t end);
  [[nodiscard]] StreamFault wait_for_landing(uint32_t chunk, uint32_t landed);
  [[nodiscard]] StreamFault add(const StreamRun& run, const uint32_t* crcs);
  [[nodiscard]] StreamFault flush();
  [[nodiscard]] StreamFault send_parts(uint64_t bytes);

  const std::shared_ptr<const OfferPlan> plan_;
  const uint32_t connection_;
  const std::shared_ptr<const Mapping> arena_;
  const std::shared_ptr<const IndexView> index_;
  SendPace& pace_;
  OfferStop& stop_;
  const StreamTimes times_;
  const uint64_t batch_bytes_max_;
  ByteStream* stream_ = nullptr;
  std::vector<bool> is_gone_;  // by chunk of the plan
  std::vector<uint32_t> looked_;  // checksums of what `look` has found
  // What the next mark is for, and its extents' checksums.
  std::vector<StreamRun> runs_;
  std::vector<uint32_t> crcs_;
  std::vector<uint8_t> mark_;
  std::vector<iovec> parts_;  // of one system call
  uint64_t bytes_ = 0;
  uint32_t gone_chunks_ = 0;
};

}  // namespace kvpool
