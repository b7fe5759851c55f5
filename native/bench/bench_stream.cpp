// Chunks over the stream between nodes, against plain sockets with as many connections, on the loopback.
//
//     make setup && .venv/bin/cmake --build build/native --target bench_stream
//     build/native/bench_stream [total_mib] [rounds] [chunk_kib] [connections]
//
// Both sides are threads of this process, so that its CPU time is that of both. The plain socket sends the same bytes from the same
// memory into the same memory, without marks or checksums. The two alternate in rounds over the same bytes, and the median
// ratio is compared: absolutes of two runs are not comparable.
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "checksum/crc32c.h"
#include "net/extent_server.h"
#include "net/pull_queue.h"

using namespace kvpool;

namespace {

constexpr uint32_t EXTENTS = 32;
constexpr size_t PLAIN_BYTES = 1 << 20;  // of one system call
constexpr std::chrono::seconds LONG{60};
constexpr std::chrono::seconds STALL{2};  // as a daemon has it by default
const char* const HOST = "127.0.0.1";

double cpu_seconds() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "bench_stream: %s\n", what);
    std::exit(1);
  }
}

struct Node {
  Node(uint64_t chunks, uint64_t extent_bytes) : arena(Mapping::create("bench-arena", chunks * EXTENTS * extent_bytes, false).mapping) {
    const IndexShape shape{64, {{arena->size(), chunks, chunks * EXTENTS}}};
    const auto words = Mapping::create("bench-index", shape.total_bytes(), false).mapping;
    const uint8_t epoch[16] = {1};
    table = std::make_unique<ChunkTable>(words, shape, epoch);
    index = IndexView::attach(words);
    board = std::make_shared<LandingBoard>(words);
    for (uint64_t at = 0; at < arena->size(); at += sizeof(at)) {
      const uint64_t word = at * 0x9E3779B97F4A7C15U;
      std::memcpy(arena->data() + at, &word, sizeof(word));
    }
    for (uint32_t slot = 0; slot < chunks; ++slot) {
      table->open_slot({DRAM_REGION, slot}, slot * EXTENTS);
    }
  }

  std::shared_ptr<const Mapping> arena;
  std::unique_ptr<ChunkTable> table;
  std::shared_ptr<const IndexView> index;
  std::shared_ptr<LandingBoard> board;
};

struct Figures {
  double rate;            // GB/s
  double cpu;             // s/GB, both sides
  double first_extent_us;  // of the first chunk
};

struct Setting {
  Setting(uint32_t chunk_count, uint64_t bytes_of_extent)
      : chunks(chunk_count), extent_bytes(bytes_of_extent), owner(chunks, extent_bytes), puller(chunks, extent_bytes) {
    for (uint32_t slot = 0; slot < chunks; ++slot) {
      std::vector<uint32_t> sums;
      for (uint32_t extent = 0; extent < EXTENTS; ++extent) {
        sums.push_back(crc32c(0, owner.arena->data() + (uint64_t{slot} * EXTENTS + extent) * extent_bytes, extent_bytes));
      }
      owner.table->set_checksums({DRAM_REGION, slot}, sums.data(), EXTENTS);
      owner.table->set_landed({DRAM_REGION, slot}, EXTENTS);
      owner.table->set_generation({DRAM_REGION, slot}, slot + 1);
    }
    ExtentServerOptions options;
    options.address = HOST;
    options.stall = STALL;
    server = std::make_unique<ExtentServer>(owner.arena, owner.index, options);
    queue = std::make_unique<PullQueue>(puller.arena, puller.board, 4, 4);
  }
  [[nodiscard]] double gigabytes() const { return static_cast<double>(owner.arena->size()) * 1e-9; }

  const uint32_t chunks;
  const uint64_t extent_bytes;
  const Node owner;
  const Node puller;
  std::unique_ptr<ExtentServer> server;
  std::unique_ptr<PullQueue> queue;
};

template <typename Body>
Figures measured(const Setting& setting, Body body) {
  const double cpu = cpu_seconds();
  const auto begun = StreamClock::now();
  const double first_extent_us = body();
  const double seconds = std::chrono::duration<double>(StreamClock::now() - begun).count();
  return {setting.gigabytes() / seconds, (cpu_seconds() - cpu) / setting.gigabytes(), first_extent_us};
}

Figures by_stream(const Setting& setting, uint32_t connections) {
  for (uint32_t slot = 0; slot < setting.chunks; ++slot) {
    setting.puller.table->set_landed({DRAM_REGION, slot}, 0);
  }
  OfferPlan offer;
  PullPlan pull;
  for (uint32_t slot = 0; slot < setting.chunks; ++slot) {
    const uint64_t offset = uint64_t{slot} * EXTENTS * setting.extent_bytes;
    offer.chunks.push_back({offset, {DRAM_REGION, slot}, slot + 1});
    pull.rows.push_back({offset, {DRAM_REGION, slot}});
  }
  offer.extents = pull.extents = EXTENTS;
  offer.extent_bytes = pull.extent_bytes = setting.extent_bytes;
  offer.connections = pull.parts = connections;
  offer.deadline = pull.deadline = StreamClock::now() + LONG;
  pull.address = HOST;
  pull.port = setting.server->port();
  pull.stall = STALL;
  return measured(setting, [&] {
    require(setting.server->offer(pull.ticket, offer).offer != 0, "an offer was refused");
    require(setting.queue->pull(pull) != 0, "a pull was refused");
    double first_extent_us = 0;
    size_t ended = 0;
    while (ended < setting.chunks) {
      pollfd waiting{setting.queue->event_fd(), POLLIN, 0};
      require(poll(&waiting, 1, 60'000) > 0, "a pull did not end");
      for (const PullOutcome& outcome : setting.queue->take_outcomes()) {
        require(outcome.status == PullStatus::DONE, pull_fault_word(outcome.fault));
        first_extent_us = outcome.chunk == 0 ? static_cast<double>(outcome.first_extent.count()) : first_extent_us;
        ++ended;
      }
    }
    while (setting.server->stats().offers > 0) {
      std::this_thread::yield();
    }
    static_cast<void>(setting.server->take_outcomes());
    return first_extent_us;
  });
}

void move_plain(int fd, uint8_t* data, uint64_t size, bool sends) {
  for (uint64_t at = 0; at < size;) {
    const size_t piece = std::min<uint64_t>(PLAIN_BYTES, size - at);
    const ssize_t moved = sends ? send(fd, data + at, piece, MSG_NOSIGNAL) : recv(fd, data + at, piece, MSG_WAITALL);
    require(moved > 0, "a plain socket broke");
    at += static_cast<uint64_t>(moved);
  }
}

// Each connection is made within the time, as those of the stream are.
Figures by_socket(const Setting& setting, uint32_t connections) {
  const TcpListener listener(HOST, 0);
  return measured(setting, [&] {
    std::vector<std::thread> threads;
    const uint64_t share = setting.owner.arena->size() / connections;
    for (uint32_t number = 0; number < connections; ++number) {
      const int receiver = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_storage address{};
      socklen_t size = sizeof(address);
      require(getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
                  connect(receiver, reinterpret_cast<sockaddr*>(&address), size) == 0,
              "cannot connect");
      pollfd waiting{listener.fd(), POLLIN, 0};
      require(poll(&waiting, 1, 10'000) > 0, "nobody connected");
      const int sender = accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC);
      require(sender >= 0, "cannot accept");
      const uint64_t from = number * share;
      threads.emplace_back([&setting, sender, from, share] {
        move_plain(sender, setting.owner.arena->data() + from, share, true);
        close(sender);
      });
      threads.emplace_back([&setting, receiver, from, share] {
        move_plain(receiver, setting.puller.arena->data() + from, share, false);
        close(receiver);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return 0.0;
  });
}

struct Spread {
  double low;
  double middle;
  double high;
};

template <typename Of>
Spread spread(const std::vector<Figures>& rounds, Of of) {
  std::vector<double> values;
  for (const Figures& round : rounds) {
    values.push_back(of(round));
  }
  std::sort(values.begin(), values.end());
  return {values.front(), values[values.size() / 2], values.back()};
}

void compare(uint64_t chunk_bytes, uint64_t total_bytes, uint32_t connections, size_t rounds) {
  const auto chunks = static_cast<uint32_t>(std::clamp<uint64_t>(total_bytes / chunk_bytes, connections, 4096));
  const Setting setting(chunks, chunk_bytes / EXTENTS);
  static_cast<void>(by_stream(setting, connections));  // connections of a new process find cold caches
  static_cast<void>(by_socket(setting, connections));
  std::vector<Figures> streams;
  std::vector<Figures> sockets;
  std::vector<double> ratios;
  for (size_t round = 0; round < rounds; ++round) {
    sockets.push_back(by_socket(setting, connections));
    streams.push_back(by_stream(setting, connections));
    ratios.push_back(streams.back().rate / sockets.back().rate);
  }
  std::sort(ratios.begin(), ratios.end());
  const auto rate = [](const Figures& one) { return one.rate; };
  const auto cpu = [](const Figures& one) { return one.cpu; };
  const Spread stream = spread(streams, rate);
  const Spread plain = spread(sockets, rate);
  const Spread stream_cpu = spread(streams, cpu);
  const Spread first = spread(streams, [](const Figures& one) { return one.first_extent_us; });
  std::printf("%6lu KiB x %4u  %u  | %5.2f (%.2f-%.2f) | %5.2f (%.2f-%.2f) | %.2f (%.2f-%.2f) | %.2f (%.2f-%.2f)  %.2f | %6.0f\n",
              static_cast<unsigned long>(chunk_bytes >> 10), chunks, connections, stream.middle, stream.low, stream.high,
              plain.middle, plain.low, plain.high, ratios[ratios.size() / 2], ratios.front(), ratios.back(),
              stream_cpu.middle, stream_cpu.low, stream_cpu.high, spread(sockets, cpu).middle, first.middle);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t total_bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 256) << 20;
  const size_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 5;
  const uint64_t only = (argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0) << 10;
  const auto streams = static_cast<uint32_t>(argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 0);
  std::printf("medians (least-most) of %zu rounds, %u extents a chunk\n", rounds, EXTENTS);
  std::printf("chunks      connections | stream GB/s | plain GB/s | ratio | stream CPU s/GB, plain's | first extent us\n");
  for (const uint32_t connections : {1U, 2U}) {
    for (const uint64_t chunk_bytes : {64ULL << 10, 512ULL << 10, 2ULL << 20, 8ULL << 20, 32ULL << 20}) {
      if ((only != 0 && only != chunk_bytes) || (streams != 0 && streams != connections)) {
        continue;
      }
      compare(chunk_bytes, total_bytes, connections, rounds);
    }
  }
  return 0;
}
