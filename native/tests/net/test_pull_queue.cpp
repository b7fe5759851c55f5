// Hostile and broken owners: the chunks concerned fail, nothing is written outside their slots, and other pulls go on.
#include <algorithm>
#include <cstddef>

#include "tests/net/net_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

using Bytes = std::vector<uint8_t>;

// What becomes of the pull of a node's chunks when one connection brings these bytes and ends.
std::map<uint32_t, PullOutcome> pull_of(const Node& target, const Bytes& bytes) {
  PullQueue queue(target.arena, target.board, 1, 1);
  const RawOwner owner(1, [&](RawSocket& peer, const StreamHello&) { static_cast<void>(peer.send(bytes.data(), bytes.size())); });
  EXPECT(queue.pull(target.pull_plan(owner.port(), ticket_of(1), target.slots, 1)) != 0);
  auto outcomes = wait_for_pulled(queue, target.slots);
  EXPECT(target.keeps_bounds());
  return outcomes;
}

// Ends all chunks by the format, after these bytes and the whole of an honest stream.
void expect_refused(const Node& source, const Bytes& prefix) {
  const Node target(source.slots, source.extents, source.extent_bytes);
  Bytes bytes = prefix;
  const Bytes honest = honest_stream(source, source.slots);
  bytes.insert(bytes.end(), honest.begin(), honest.end());
  for (const auto& [chunk, outcome] : pull_of(target, bytes)) {
    EXPECT(outcome.status == PullStatus::BAD_SOURCE && outcome.fault == PullFault::FORMAT);
    EXPECT(target.is_failed(chunk));
  }
}

}  // namespace

TEST(a_stream_cut_at_every_byte_leaves_whole_chunks_and_failed_ones) {
  for (const uint64_t extent_bytes : {50ULL, 65536ULL}) {
    const Node source(2, 2, extent_bytes);
    source.put(0);
    source.put(1);
    const Bytes whole = honest_stream(source, 2);
    // All places of a small exchange; of a large one those near the ends of marks and extents.
    for (size_t size = 0; size <= whole.size(); ++size) {
      const uint64_t unit = extent_bytes + ONE_MARK_BYTES;
      if (extent_bytes > 50 && size % unit > ONE_MARK_BYTES + 1 && size % unit < unit - 1 && size % 30'011 != 0) {
        continue;
      }
      const Node target(2, 2, extent_bytes);
      for (const auto& [chunk, outcome] : pull_of(target, {whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)})) {
        const bool is_whole = size >= unit * (3 + chunk);
        EXPECT(outcome.status == (is_whole ? PullStatus::DONE : PullStatus::FAILED));
        EXPECT(outcome.fault == (is_whole                     ? PullFault::NONE
                                 : size < ONE_MARK_BYTES    ? PullFault::REFUSED
                                                             : PullFault::CLOSED));
        EXPECT(is_whole ? target.has(chunk) : target.has_failed(outcome));
      }
    }
  }
}

TEST(a_stream_that_comes_in_odd_pieces_is_the_same) {
  std::mt19937 random(static_cast<unsigned>(seed()));
  for (const uint64_t extent_bytes : {50ULL, 16384ULL, 131072ULL, 300'000ULL}) {
    const Node source(3, 2, extent_bytes);
    for (uint32_t slot = 0; slot < 3; ++slot) {
      source.put(slot);
    }
    const Bytes whole = honest_stream(source, 3);
    const Node target(3, 2, extent_bytes);
    PullQueue queue(target.arena, target.board, 1, 1);
    const RawOwner owner(1, [&](RawSocket& peer, const StreamHello&) {
      for (size_t at = 0; at < whole.size();) {
        // Small pieces around each mark, so that some end in its middle.
        const size_t in_unit = at % (extent_bytes + ONE_MARK_BYTES);
        const size_t most = in_unit < 64 || extent_bytes < 64 ? 1 + random() % 40 : extent_bytes - 31;
        const size_t size = std::min(most, whole.size() - at);
        EXPECT(peer.send(whole.data() + at, size));
        at += size;
        for (size_t turn = 0; turn < 20; ++turn) {
          std::this_thread::yield();
        }
      }
    });
    EXPECT(queue.pull(target.pull_plan(owner.port(), ticket_of(1), 3, 1)) != 0);
    for (const auto& [chunk, outcome] : wait_for_pulled(queue, 3)) {
      EXPECT(outcome.status == PullStatus::DONE && target.has(chunk));
    }
  }
}

TEST(marks_that_must_not_come_now_end_the_connection) {
  const Node source(2, 2, 1000);
  source.put(0);
  source.put(1);
  Bytes noise(64);
  std::mt19937 random(static_cast<unsigned>(seed()));
  std::generate(noise.begin(), noise.end(), [&] { return static_cast<uint8_t>(random()); });
  expect_refused(source, noise);
  constexpr uint32_t MOST = UINT32_MAX;
  for (const auto& [run, extent_bytes] : std::vector<std::pair<StreamRun, uint64_t>>{
           {{2, 0, 1}, 1000}, {{MOST, 0, 1}, 1000}, {{0, 1, 1}, 1000}, {{0, MOST, 1}, 1000}, {{0, 0, 3}, 1000}, {{0, 0, 1}, 999},
           {{0, 0, 1}, 1001}, {{0, 0, 1}, UINT64_MAX}, {{2, 0, 0}, 1000}, {{0, 0, MARK_EXTENTS_MAX}, 1000}}) {
    expect_refused(source, mark_of(run, extent_bytes));
  }
  // Runs of one mark, each possible by itself.
  for (const auto& runs : std::vector<std::vector<StreamRun>>{{{0, 0, 2}, {0, 0, 1}}, {{0, 0, 1}, {0, 0, 1}}, {{0, 0, 1}, {0, 2, 1}},
                                                              {{0, 0, 0}, {0, 0, 1}}, {{0, 0, 1}, {0, 0, 0}, {0, 0, 0}}}) {
    uint32_t extents = 0;
    for (const StreamRun& run : runs) {
      extents += run.count;
    }
    expect_refused(source, mark_of(runs, std::vector<uint32_t>(extents), 1000));
  }
  // A mark, and a run, with another checksum of its own.
  for (const size_t at : {offsetof(StreamMark, runs), sizeof(StreamMark) + offsetof(StreamRun, first)}) {
    Bytes forged = mark_of(StreamRun{0, 0, 1}, 1000);
    forged[at] ^= 1U;
    expect_refused(source, forged);
  }
}

TEST(an_extent_that_comes_twice_ends_the_connection) {
  const Node source(2, 2, 1000);
  source.put(0);
  source.put(1);
  Bytes bytes = honest_stream(source, 2);
  const auto first = bytes.begin() + 1000 + ONE_MARK_BYTES;
  bytes.insert(bytes.begin(), bytes.begin(), first);
  const Node target(2, 2, 1000);
  for (const auto& [chunk, outcome] : pull_of(target, bytes)) {
    EXPECT(outcome.fault == PullFault::FORMAT && target.is_failed(chunk));
  }
}

TEST(a_chunk_of_another_connection_ends_the_connection) {
  const Node source(2, 2, 1000);
  source.put(0);
  source.put(1);
  const Node target(2, 2, 1000);
  PullQueue queue(target.arena, target.board, 4, 1);
  const Bytes bytes = honest_stream(source, 2);  // both chunks on each connection
  const RawOwner owner(2, [&](RawSocket& peer, const StreamHello&) { static_cast<void>(peer.send(bytes.data(), bytes.size())); });
  EXPECT(queue.pull(target.pull_plan(owner.port(), ticket_of(1), 2, 2)) != 0);
  for (const auto& [chunk, outcome] : wait_for_pulled(queue, 2)) {
    EXPECT(outcome.status == PullStatus::BAD_SOURCE && outcome.fault == PullFault::FORMAT);
  }
}

TEST(bytes_flipped_in_an_extent_fail_that_chunk_alone) {
  const Node source(2, 3, 1000);
  source.put(0);
  source.put(1);
  Bytes bytes = honest_stream(source, 2);
  bytes[ONE_MARK_BYTES + 500] ^= 0x10U;  // extent 0 of chunk 0
  const Node target(2, 3, 1000);
  const auto outcomes = pull_of(target, bytes);
  EXPECT(outcomes.at(0).status == PullStatus::BAD_SOURCE && outcomes.at(0).fault == PullFault::CHECKSUM);
  EXPECT(outcomes.at(1).status == PullStatus::DONE && target.has(1));
}

TEST(what_comes_of_a_bad_chunk_in_a_later_piece_goes_elsewhere) {
  const Node source(2, 3, 200'000);
  source.put(0);
  source.put(1);
  Bytes bytes = honest_stream(source, 2);
  bytes[ONE_MARK_BYTES + 500] ^= 0x10U;
  const Node target(2, 3, 200'000);
  EXPECT(pull_of(target, bytes).at(0).fault == PullFault::CHECKSUM);
  EXPECT(target.has(1) && target.is_untouched(0, 200'000));
}

TEST(many_extents_behind_one_mark_land_and_fail_by_chunks) {
  // More than a piece, so that extents are cut by its ends: chunk 0 is right, chunk 1 goes away, chunk 2 has a bad extent.
  const Node source(3, 9, 30'000);
  Bytes data;
  std::vector<uint32_t> crcs;
  const std::vector<StreamRun> runs{{0, 0, 4}, {1, 0, 2}, {1, 0, 0}, {2, 0, 9}, {0, 4, 5}};
  for (uint32_t slot = 0; slot < 3; ++slot) {
    source.put(slot);
  }
  for (const StreamRun& run : runs) {
    const uint8_t* const from = source.arena->data() + source.arena_offset(run.chunk) + run.first * 30'000;
    data.insert(data.end(), from, from + run.count * 30'000);
    for (uint32_t extent = run.first; extent < run.first + run.count; ++extent) {
      crcs.push_back(source.crc(run.chunk, extent));
    }
  }
  crcs[6 + 5] ^= 1U;  // extent 5 of chunk 2
  Bytes bytes = mark_of(runs, crcs, 30'000);
  bytes.insert(bytes.end(), data.begin(), data.end());
  const Node target(3, 9, 30'000);
  const auto outcomes = pull_of(target, bytes);
  EXPECT(outcomes.at(0).status == PullStatus::DONE && target.has(0));
  EXPECT(outcomes.at(1).fault == PullFault::GONE && outcomes.at(1).bytes == 2 * 30'000 && target.is_failed(1));
  EXPECT(outcomes.at(2).fault == PullFault::CHECKSUM && outcomes.at(2).bytes == 5 * 30'000 && target.is_failed(2));
}

TEST(bytes_other_than_the_owner_promised_fail_whatever_their_marks_say) {
  const Node source(2, 3, 1000);
  source.store(0);
  source.store(1);
  const auto checks = offered_checks(*source.index, source.offer_plan(2, 1).chunks, 3);
  EXPECT(checks.size() == 6);
  const Node target(2, 3, 1000);
  const auto pulled = [&](uint32_t extent) {
    // As who changes bytes on the way does it: the mark is of the new ones.
    source.arena->data()[source.arena_offset(1) + extent * 1000 + 7] ^= 1;
    const Bytes forged = honest_stream(source, 2);
    source.arena->data()[source.arena_offset(1) + extent * 1000 + 7] ^= 1;
    PullQueue queue(target.arena, target.board, 1, 1);
    const RawOwner owner(1, [&](RawSocket& peer, const StreamHello&) { static_cast<void>(peer.send(forged.data(), forged.size())); });
    auto plan = target.pull_plan(owner.port(), ticket_of(1), 2, 1);
    plan.checks = checks;
    target.table->set_landed(Node::address(0), 0);
    target.table->set_landed(Node::address(1), 0);
    EXPECT(queue.pull(plan) != 0);
    return wait_for_pulled(queue, 2);
  };
  for (uint32_t extent = 0; extent < 3; ++extent) {
    const auto outcomes = pulled(extent);
    EXPECT(outcomes.at(0).status == PullStatus::DONE && target.has(0));
    EXPECT(outcomes.at(1).status == PullStatus::BAD_SOURCE && outcomes.at(1).fault == PullFault::CHECKSUM);
    EXPECT(target.is_failed(1));
  }
}

TEST(checks_are_promised_only_of_chunks_that_have_landed) {
  const Node source(2, 3, 1000);
  source.store(0);
  source.begin_promotion(1);
  const auto chunks = source.offer_plan(2, 1).chunks;
  EXPECT(offered_checks(*source.index, chunks, 3).empty());
  for (uint32_t extent = 0; extent < 3; ++extent) {
    source.land(1, extent);
  }
  EXPECT(offered_checks(*source.index, chunks, 3).size() == 6);
  source.table->set_generation(Node::address(1), 7);
  EXPECT(offered_checks(*source.index, chunks, 3).empty());
}

TEST(nothing_of_a_chunk_may_follow_its_end) {
  const Node source(2, 2, 1000);
  source.put(0);
  source.put(1);
  Bytes bytes = mark_of(StreamRun{0, 0, 0}, 1000);
  const Bytes honest = honest_stream(source, 2);
  bytes.insert(bytes.end(), honest.begin(), honest.end());
  const Node target(2, 2, 1000);
  const auto outcomes = pull_of(target, bytes);
  EXPECT(outcomes.at(0).fault == PullFault::GONE);
  EXPECT(outcomes.at(1).fault == PullFault::FORMAT);
}

TEST(endless_data_ends_with_the_last_chunk) {
  const Node source(1, 1, 1000);
  source.put(0);
  const Node target(1, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 1);
  const Bytes bytes = honest_stream(source, 1);
  const RawOwner owner(1, [&](RawSocket& peer, const StreamHello&) {
    while (peer.send(bytes.data(), bytes.size())) {
    }
  });
  EXPECT(queue.pull(target.pull_plan(owner.port(), ticket_of(1), 1, 1)) != 0);
  EXPECT(wait_for_pulled(queue, 1).at(0).status == PullStatus::DONE);
}

TEST(endless_waiting_ends_by_the_deadline) {
  const Node target(1, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 1);
  const RawOwner owner(1, [&](RawSocket& peer, const StreamHello&) {
    while (peer.send(make_waiting_mark())) {
    }
  });
  auto plan = target.pull_plan(owner.port(), ticket_of(1), 1, 1);
  plan.deadline = StreamClock::now() + milliseconds(100);
  EXPECT(queue.pull(plan) != 0);
  const auto outcomes = wait_for_pulled(queue, 1);
  EXPECT(outcomes.at(0).status == PullStatus::FAILED && outcomes.at(0).fault == PullFault::LATE);
}

TEST(a_peer_that_stalls_fails_its_own_pull_and_slows_no_other) {
  const Node source(2, 2, 1000);
  source.store(0);
  source.store(1);
  const Node stalled(2, 2, 1000);
  const Node target(2, 2, 1000);
  // Both nodes' slots in one queue: the second one's rows are the first one's, which fail before.
  PullQueue queue(target.arena, target.board, 2, 8);
  const Bytes bytes = honest_stream(source, 2);
  std::atomic<bool> is_over = false;
  const RawOwner silent(1, [&](RawSocket& peer, const StreamHello&) {
    static_cast<void>(peer.send(bytes.data(), 100));
    wait_until([&] { return is_over.load(); });
  });
  auto plan = target.pull_plan(silent.port(), ticket_of(1), 1, 1);
  EXPECT(queue.pull(plan) != 0);
  EXPECT(queue.pull(plan) != 0);  // waits: the peer has its half of the threads
  wait_until([&] { return queue.stats().running == 1 && queue.stats().waiting == 1; });
  ExtentServer server(source.arena, source.index, local_options());
  auto offered = source.offer_plan(2, 1);
  offered.chunks.erase(offered.chunks.begin());
  EXPECT(server.offer(ticket_of(2), offered).offer != 0);
  auto good = target.pull_plan(server.port(), ticket_of(2), 2, 1);
  good.rows.erase(good.rows.begin());
  const uint64_t job = queue.pull(good);
  const auto outcomes = wait_for_pulled(queue, 1);
  EXPECT(outcomes.begin()->second.job == job && outcomes.begin()->second.status == PullStatus::DONE);
  EXPECT(target.has(1));
  is_over = true;
  static_cast<void>(queue.stop(LONG));
}

TEST(silence_ends_a_pull_by_its_stall_time) {
  const Node target(2, 2, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  std::atomic<bool> is_over = false;
  const RawOwner silent(1, [&](RawSocket&, const StreamHello&) { wait_until([&] { return is_over.load(); }); });
  auto plan = target.pull_plan(silent.port(), ticket_of(1), 2, 1);
  plan.stall = milliseconds(50);
  EXPECT(queue.pull(plan) != 0);
  for (const auto& [chunk, outcome] : wait_for_pulled(queue, 2)) {
    EXPECT(outcome.status == PullStatus::FAILED && outcome.fault == PullFault::STALLED);
    EXPECT(outcome.is_unmarked && target.has_failed(outcome));
  }
  is_over = true;
}

TEST(a_job_that_waits_for_a_thread_ends_by_its_deadline) {
  const Node target(2, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  std::atomic<bool> is_over = false;
  const RawOwner silent(1, [&](RawSocket&, const StreamHello&) { wait_until([&] { return is_over.load(); }); });
  auto first = target.pull_plan(silent.port(), ticket_of(1), 1, 1);
  const uint64_t running = queue.pull(first);
  auto second = target.pull_plan(silent.port(), ticket_of(1), 2, 1);
  second.rows.erase(second.rows.begin());
  second.deadline = StreamClock::now() + milliseconds(50);
  const uint64_t waiting = queue.pull(second);
  const auto outcomes = wait_for_pulled(queue, 1);
  EXPECT(outcomes.at(0).job == waiting && outcomes.at(0).fault == PullFault::LATE);
  EXPECT(queue.cancel(running));
  EXPECT(wait_for_pulled(queue, 1).at(0).status == PullStatus::CANCELLED);
  is_over = true;
}

TEST(nobody_there_is_an_outcome_too) {
  const Node target(2, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  uint16_t port = 0;
  {
    const TcpListener gone(HOST, 0);
    port = gone.port();
  }
  EXPECT(queue.pull(target.pull_plan(port, ticket_of(1), 2, 1)) != 0);
  for (const auto& [chunk, outcome] : wait_for_pulled(queue, 2)) {
    EXPECT(outcome.status == PullStatus::FAILED && outcome.fault == PullFault::UNREACHABLE);
    EXPECT(outcome.is_unmarked && target.has_failed(outcome));
  }
}

// A socket that blocks.
int accept_one(const TcpListener& listener) {
  int fd = -1;
  wait_until([&] { return fd >= 0 || (fd = listener.accept()) >= 0; });
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  return fd;
}

TEST(a_pull_takes_the_connection_that_was_made_ahead) {
  const Node target(2, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  const TcpListener listener(HOST, 0);
  queue.connect_ahead(HOST, listener.port(), 1);
  queue.connect_ahead(HOST, listener.port(), 1);  // it is there
  int fd = accept_one(listener);
  RawSocket peer(fd);
  EXPECT(queue.pull(target.pull_plan(listener.port(), ticket_of(1), 2, 1)) != 0);
  StreamHello hello{};
  EXPECT(peer.receive(&hello, sizeof(hello)));
  const StreamHello expected = make_hello(ticket_of(1), 0, 1);
  EXPECT(std::memcmp(&hello, &expected, sizeof(hello)) == 0);
  EXPECT(listener.accept() == -EAGAIN);
  peer.end();
  for (const auto& [chunk, outcome] : wait_for_pulled(queue, 2)) {
    EXPECT(outcome.fault == PullFault::REFUSED && outcome.is_unmarked);
  }
}

TEST(a_connection_made_ahead_that_has_ended_is_not_taken) {
  const Node target(2, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  const TcpListener listener(HOST, 0);
  queue.connect_ahead(HOST, listener.port(), 1);
  int fd = accept_one(listener);
  close(fd);
  EXPECT(queue.pull(target.pull_plan(listener.port(), ticket_of(1), 2, 1)) != 0);
  fd = accept_one(listener);
  RawSocket peer(fd);
  StreamHello hello{};
  EXPECT(peer.receive(&hello, sizeof(hello)));
  peer.end();
  EXPECT(wait_for_pulled(queue, 2).size() == 2);
}

TEST(a_connection_made_ahead_ends_when_nobody_takes_it) {
  const Node target(2, 1, 1000);
  PullQueue queue(target.arena, target.board, 1, 8);
  const TcpListener listener(HOST, 0);
  queue.connect_ahead(HOST, listener.port(), 1);
  int fd = accept_one(listener);
  const RawSocket peer(fd);
  EXPECT(peer.receive_rest().empty());
}
