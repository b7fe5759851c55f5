// What the tests of streams between nodes share: nodes with an arena and an index, plans over their slots, and raw sockets for those
// who do not keep to the format.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checksum/crc32c.h"
#include "net/extent_server.h"
#include "net/pull_queue.h"
#include "tests/harness.h"

namespace kvpool::testing {

using std::chrono::milliseconds;
inline constexpr milliseconds LONG{20'000};  // nobody waits so long: the tests end by what they wait for
inline const char* const HOST = "127.0.0.1";

template <typename Condition>
void wait_until(Condition condition) {
  const auto deadline = StreamClock::now() + LONG;
  while (!condition() && StreamClock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT(condition());
}

// Slots of one geometry; the chunk in slot i is made of the number i. The page behind each slot must keep its bytes.
class Node {
 public:
  Node(uint32_t slot_count, uint32_t extent_count, uint64_t bytes_of_extent)
      : slots(slot_count),
        extents(extent_count),
        extent_bytes(bytes_of_extent),
        slot_bytes(round_up(extents * extent_bytes, PAGE_BYTES) + PAGE_BYTES),
        arena(Mapping::create("test-arena", slots * slot_bytes, false).mapping) {
    const IndexShape shape{256, {{slots * slot_bytes, slots, uint64_t{slots} * extents}}};
    const auto words = Mapping::create("test-index", shape.total_bytes(), false).mapping;
    const uint8_t epoch[16] = {1};
    table = std::make_unique<ChunkTable>(words, shape, epoch);
    index = IndexView::attach(words);
    board = std::make_shared<LandingBoard>(words);
    for (uint32_t slot = 0; slot < slots; ++slot) {
      table->open_slot(address(slot), slot * extents);
      table->set_landed(address(slot), 0);
      std::memset(arena->data() + arena_offset(slot), GUARD, slot_bytes);
    }
  }

  [[nodiscard]] std::vector<uint8_t> chunk(uint32_t slot) const {
    std::vector<uint8_t> bytes(extents * extent_bytes);
    std::mt19937_64 random(slot + 1);
    for (uint64_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), bytes.size() - at));
    }
    return bytes;
  }
  void put(uint32_t slot) const {
    const auto bytes = chunk(slot);
    std::memcpy(arena->data() + arena_offset(slot), bytes.data(), bytes.size());
  }
  // The chunk as a save has left it, or a promotion has begun it.
  void store(uint32_t slot) const {
    put(slot);
    std::vector<uint32_t> sums;
    for (uint32_t extent = 0; extent < extents; ++extent) {
      sums.push_back(crc(slot, extent));
    }
    table->set_checksums(address(slot), sums.data(), extents);
    table->set_landed(address(slot), extents);
    table->set_generation(address(slot), generation(slot));
  }
  void begin_promotion(uint32_t slot) const {
    put(slot);
    table->set_landed(address(slot), 0);
    table->set_generation(address(slot), generation(slot));
  }
  void land(uint32_t slot, uint32_t extent) const {
    const uint32_t sum = crc(slot, extent);
    board->land(address(slot), extent, &sum, 1);
  }

  [[nodiscard]] uint32_t crc(uint32_t slot, uint32_t extent) const {
    return crc32c(0, arena->data() + arena_offset(slot) + extent * extent_bytes, extent_bytes);
  }
  [[nodiscard]] static uint64_t generation(uint32_t slot) { return slot + 100; }
  [[nodiscard]] uint64_t arena_offset(uint32_t slot) const { return slot * slot_bytes; }
  [[nodiscard]] static SlotAddress address(uint32_t slot) { return {DRAM_REGION, slot}; }

  // Whether all extents landed with the bytes of that number's chunk.
  [[nodiscard]] bool has(uint32_t slot) const {
    const auto bytes = chunk(slot);
    return index->landed_at(address(slot)) == extents &&
           std::memcmp(arena->data() + arena_offset(slot), bytes.data(), bytes.size()) == 0;
  }
  [[nodiscard]] bool is_failed(uint32_t slot) const { return index->landed_at(address(slot)) == LANDING_FAILED; }
  // Whether a pulled chunk has failed, and is marked so unless its outcome has that it is not.
  [[nodiscard]] bool has_failed(const PullOutcome& outcome) const {
    const uint32_t landed = index->landed_at(address(outcome.chunk));
    return outcome.status != PullStatus::DONE && landed == (outcome.is_unmarked ? 0 : LANDING_FAILED);
  }
  // Whether nobody has written from that byte of a slot on; `extent_bytes * extents`: behind its chunk.
  [[nodiscard]] bool is_untouched(uint32_t slot, uint64_t from) const {
    const uint8_t* const bytes = arena->data() + arena_offset(slot);
    return std::all_of(bytes + from, bytes + slot_bytes, [](uint8_t byte) { return byte == GUARD; });
  }
  [[nodiscard]] bool keeps_bounds() const {
    for (uint32_t slot = 0; slot < slots; ++slot) {
      if (!is_untouched(slot, extents * extent_bytes)) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] OfferPlan offer_plan(uint32_t count, uint32_t connections, milliseconds time = LONG) const {
    OfferPlan plan;
    for (uint32_t slot = 0; slot < count; ++slot) {
      plan.chunks.push_back({arena_offset(slot), address(slot), generation(slot)});
    }
    plan.extents = extents;
    plan.extent_bytes = extent_bytes;
    plan.connections = connections;
    plan.deadline = StreamClock::now() + time;
    return plan;
  }
  [[nodiscard]] PullPlan pull_plan(uint16_t port, const StreamTicket& ticket, uint32_t count, uint32_t connections) const {
    PullPlan plan;
    plan.address = HOST;
    plan.port = port;
    plan.ticket = ticket;
    plan.parts = connections;
    plan.extents = extents;
    plan.extent_bytes = extent_bytes;
    for (uint32_t slot = 0; slot < count; ++slot) {
      plan.rows.push_back({arena_offset(slot), address(slot)});
    }
    plan.stall = LONG;
    plan.deadline = StreamClock::now() + LONG;
    return plan;
  }

  const uint32_t slots;
  const uint32_t extents;
  const uint64_t extent_bytes;
  const uint64_t slot_bytes;
  const std::shared_ptr<const Mapping> arena;
  std::unique_ptr<ChunkTable> table;
  std::shared_ptr<const IndexView> index;
  std::shared_ptr<LandingBoard> board;

 private:
  static constexpr uint8_t GUARD = 0xA5;
};

inline StreamTicket ticket_of(uint8_t number) {
  StreamTicket ticket{};
  ticket.fill(number);
  return ticket;
}

inline ExtentServerOptions local_options() {
  ExtentServerOptions options;
  options.address = HOST;
  options.hello_timeout = LONG;
  options.stall = LONG;
  return options;
}

// The next `count` outcomes, by way of the descriptor.
template <typename Source, typename Outcome>
void collect(int fd, size_t count, std::vector<Outcome>& all, Source take) {
  pollfd waiting{fd, POLLIN, 0};
  while (all.size() < count && poll(&waiting, 1, static_cast<int>(LONG.count())) > 0) {
    const auto more = take();
    all.insert(all.end(), more.begin(), more.end());
  }
  EXPECT(all.size() == count);
}
inline std::map<uint32_t, PullOutcome> wait_for_pulled(PullQueue& queue, size_t count) {
  std::vector<PullOutcome> all;
  collect(queue.event_fd(), count, all, [&] { return queue.take_outcomes(); });
  std::map<uint32_t, PullOutcome> by_chunk;
  for (const PullOutcome& outcome : all) {
    EXPECT(by_chunk.emplace(outcome.chunk, outcome).second);
  }
  return by_chunk;
}
inline std::vector<OfferOutcome> wait_for_offers(ExtentServer& server, size_t count) {
  std::vector<OfferOutcome> all;
  collect(server.event_fd(), count, all, [&] { return server.take_outcomes(); });
  return all;
}

// A socket without any format.
class RawSocket {
 public:
  explicit RawSocket(int fd) : fd_(fd) {}
  explicit RawSocket(uint16_t port, uint32_t source = INADDR_LOOPBACK) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(source);
    EXPECT(bind(fd_, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) == 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    inet_pton(AF_INET, HOST, &address.sin_addr);
    EXPECT(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  }
  ~RawSocket() { end(); }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;

  bool send(const void* data, size_t size) const {
    const auto* bytes = static_cast<const uint8_t*>(data);
    while (size > 0) {
      const ssize_t sent = ::send(fd_, bytes, size, MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      bytes += sent;
      size -= static_cast<size_t>(sent);
    }
    return true;
  }
  template <typename Record>
  bool send(const Record& record) const {
    return send(&record, sizeof(record));
  }
  // Exactly so many bytes, or false.
  bool receive(void* data, size_t size) const { return size == 0 || recv(fd_, data, size, MSG_WAITALL) == static_cast<ssize_t>(size); }
  // All bytes until the other side ends the connection.
  [[nodiscard]] std::vector<uint8_t> receive_rest() const {
    std::vector<uint8_t> all;
    uint8_t piece[4096];
    ssize_t count = 0;
    while ((count = recv(fd_, piece, sizeof(piece), 0)) > 0) {
      all.insert(all.end(), piece, piece + count);
    }
    return all;
  }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  void end() {
    if (fd_ >= 0) {
      close(fd_);
    }
    fd_ = -1;
  }

 private:
  int fd_;
};

// Who listens, and does with one connection what the test says.
class RawListener {
 public:
  explicit RawListener(std::function<void(RawSocket&)> serve) : listener_(HOST, 0) {
    thread_ = std::thread([this, serve] {
      pollfd waiting{listener_.fd(), POLLIN, 0};
      int fd = -1;
      while (fd < 0 && poll(&waiting, 1, static_cast<int>(LONG.count())) > 0) {
        fd = listener_.accept();
      }
      if (fd >= 0) {
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
        RawSocket peer(fd);
        serve(peer);
      }
    });
  }
  ~RawListener() { join(); }
  [[nodiscard]] uint16_t port() const { return listener_.port(); }
  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  TcpListener listener_;
  std::thread thread_;
};

// An owner that does with each connection what the test says.
class RawOwner {
 public:
  using Serve = std::function<void(RawSocket&, const StreamHello&)>;

  RawOwner(size_t connections, Serve serve) : listener_(HOST, 0) {
    for (size_t number = 0; number < connections; ++number) {
      threads_.emplace_back([this, serve] {
        pollfd waiting{listener_.fd(), POLLIN, 0};
        int fd = -1;
        while (fd < 0 && poll(&waiting, 1, static_cast<int>(LONG.count())) > 0) {
          fd = listener_.accept();
        }
        if (fd >= 0) {
          TcpStreamFlags::block(fd);
          RawSocket peer(fd);
          StreamHello hello{};
          if (peer.receive(&hello, sizeof(hello))) {
            serve(peer, hello);
          }
        }
      });
    }
  }
  ~RawOwner() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }
  [[nodiscard]] uint16_t port() const { return listener_.port(); }

 private:
  struct TcpStreamFlags {
    static void block(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK); }
  };
  TcpListener listener_;
  std::vector<std::thread> threads_;
};

// A mark for these runs, whose extents have these checksums.
inline std::vector<uint8_t> mark_of(std::span<const StreamRun> runs, std::span<const uint32_t> crcs, uint64_t extent_bytes) {
  std::vector<uint8_t> bytes(MARK_BYTES_MAX);
  bytes.resize(write_extents_mark(bytes.data(), runs, crcs, extent_bytes));
  return bytes;
}
inline std::vector<uint8_t> mark_of(const StreamRun& run, uint64_t extent_bytes) {
  return mark_of({&run, 1}, std::vector<uint32_t>(run.count), extent_bytes);
}
// Of one extent.
inline constexpr size_t ONE_MARK_BYTES = sizeof(StreamMark) + sizeof(StreamRun) + sizeof(uint32_t);

// A mark as it comes: its runs, and their extents' checksums.
struct ReceivedMark {
  StreamMark mark{};
  std::vector<StreamRun> runs;
  std::vector<uint32_t> crcs;
};
inline std::optional<ReceivedMark> receive_mark(const RawSocket& socket) {
  uint8_t bytes[MARK_BYTES_MAX];
  const auto mark = socket.receive(bytes, sizeof(StreamMark)) ? read_mark(bytes) : std::nullopt;
  ReceivedMark received;
  if (!mark || !socket.receive(bytes, table_bytes(*mark)) ||
      (mark->kind == MarkKind::EXTENTS && !read_table(*mark, bytes, received.runs, received.crcs))) {
    return std::nullopt;
  }
  received.mark = *mark;
  return received;
}

// What an ExtentServer sends of a node's first chunks on one connection, where all of it fits one mark: first extents, then groups.
inline std::vector<uint8_t> stream_of_one_mark(const Node& node, uint32_t count) {
  std::vector<StreamRun> runs;
  for (uint32_t slot = 0; slot < count; ++slot) {
    runs.push_back({slot, 0, 1});
  }
  for (uint32_t slot = 0; slot < count; ++slot) {
    runs.push_back({slot, 1, node.extents - 1});
  }
  std::vector<uint32_t> crcs;
  std::vector<uint8_t> data;
  for (const StreamRun& run : runs) {
    const uint8_t* const from = node.arena->data() + node.arena_offset(run.chunk) + run.first * node.extent_bytes;
    data.insert(data.end(), from, from + run.count * node.extent_bytes);
    for (uint32_t extent = run.first; extent < run.first + run.count; ++extent) {
      crcs.push_back(node.crc(run.chunk, extent));
    }
  }
  std::vector<uint8_t> bytes = mark_of(runs, crcs, node.extent_bytes);
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

// What an honest owner may send of a node's first `count` chunks on one connection, a mark for each extent.
inline std::vector<uint8_t> honest_stream(const Node& node, uint32_t count) {
  std::vector<uint8_t> bytes;
  for (uint32_t extent = 0; extent < node.extents; ++extent) {
    for (uint32_t slot = 0; slot < count; ++slot) {
      const StreamRun run{slot, extent, 1};
      const uint32_t crc = node.crc(slot, extent);
      const auto mark = mark_of({&run, 1}, {&crc, 1}, node.extent_bytes);
      bytes.insert(bytes.end(), mark.begin(), mark.end());
      const uint8_t* const data = node.arena->data() + node.arena_offset(slot) + extent * node.extent_bytes;
      bytes.insert(bytes.end(), data, data + node.extent_bytes);
    }
  }
  return bytes;
}

}  // namespace kvpool::testing
