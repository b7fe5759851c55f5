// Chunks on their way from one node to another: right bytes in the order of extents, and what each side does when the other ends.
#include <algorithm>

#include "tests/net/net_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// An owner whose chunks are stored, and a puller whose slots are empty.
struct Pair {
  Pair(uint32_t chunks, uint32_t extents, uint64_t extent_bytes, unsigned threads = 4, ExtentServerOptions options = local_options())
      : owner(chunks, extents, extent_bytes),
        puller(chunks, extents, extent_bytes),
        server(owner.arena, owner.index, options),
        queue(puller.arena, puller.board, threads, 16) {
    for (uint32_t slot = 0; slot < chunks; ++slot) {
      owner.store(slot);
    }
  }
  uint64_t pull(uint8_t ticket, uint32_t connections) {
    return queue.pull(puller.pull_plan(server.port(), ticket_of(ticket), puller.slots, connections));
  }
  uint64_t offer(uint8_t ticket, uint32_t connections) {
    return server.offer(ticket_of(ticket), owner.offer_plan(owner.slots, connections)).offer;
  }

  const Node owner;
  const Node puller;
  ExtentServer server;
  PullQueue queue;
};

bool ends_with(const std::map<uint32_t, PullOutcome>& outcomes, PullStatus status, PullFault fault) {
  return !outcomes.empty() && std::all_of(outcomes.begin(), outcomes.end(), [&](const auto& entry) {
           return entry.second.status == status && entry.second.fault == fault;
         });
}

}  // namespace

TEST(pulled_chunks_have_their_bytes_and_land_extent_by_extent) {
  const std::pair<uint32_t, uint64_t> geometries[] = {{3, 1000}, {32, 2048}, {4, 65536}, {2, 700'001}, {1, 3 << 20}};
  for (const auto& [extents, extent_bytes] : geometries) {
    for (uint32_t connections = 1; connections <= 3; ++connections) {
      Pair pair(7, extents, extent_bytes);
      const uint64_t offer = pair.offer(1, connections);
      const uint64_t job = pair.pull(1, connections);
      EXPECT(offer != 0 && job != 0);
      const auto outcomes = wait_for_pulled(pair.queue, 7);
      EXPECT(ends_with(outcomes, PullStatus::DONE, PullFault::NONE));
      for (const auto& [chunk, outcome] : outcomes) {
        EXPECT(outcome.job == job);
        EXPECT(outcome.bytes == extents * extent_bytes);
        EXPECT(outcome.first_extent.count() > 0 && outcome.first_extent <= outcome.elapsed);
        EXPECT(pair.puller.has(chunk));
        EXPECT(pair.puller.index->checksum_at(Node::address(chunk), extents - 1) == pair.owner.crc(chunk, extents - 1));
      }
      EXPECT(pair.puller.keeps_bounds());
      const auto ends = wait_for_offers(pair.server, 1);
      EXPECT(ends.at(0).offer == offer && ends.at(0).end == OfferEnd::SENT);
      EXPECT(ends.at(0).bytes == 7 * extents * extent_bytes);
      EXPECT(pair.server.stats().offers == 0);
    }
  }
}

namespace {

// The order of all extents on their way, of the chunks that a pair's owner offers, and how many marks they came behind; after the
// first mark something happens.
struct Sent {
  std::vector<std::pair<uint32_t, uint32_t>> order;  // chunk, extent
  size_t marks = 0;
};
Sent sent(Pair& pair, uint8_t ticket, const std::function<void()>& after_first = [] {}) {
  EXPECT(pair.offer(ticket, 1) != 0);
  const RawSocket puller(pair.server.port());
  EXPECT(puller.send(make_hello(ticket_of(ticket), 0, 1)));
  Sent all;
  while (all.order.size() < size_t{pair.owner.slots} * pair.owner.extents) {
    const auto mark = receive_mark(puller);
    EXPECT(mark.has_value());
    if (!mark) {
      break;
    }
    const uint32_t* crc = mark->crcs.data();
    std::vector<uint8_t> bytes(pair.owner.extent_bytes);
    for (const StreamRun& run : mark->runs) {
      for (uint32_t extent = run.first; extent < run.first + run.count; ++extent) {
        EXPECT(puller.receive(bytes.data(), bytes.size()));
        EXPECT(crc32c(0, bytes.data(), bytes.size()) == *crc && *crc == pair.owner.crc(run.chunk, extent));
        ++crc;
        all.order.emplace_back(run.chunk, extent);
      }
    }
    all.marks += mark->runs.empty() ? 0U : 1U;
    if (all.marks == 1) {
      after_first();
    }
  }
  return all;
}

}  // namespace

TEST(small_extents_go_in_groups_behind_the_first_once_all_have_landed) {
  Pair pair(2, 7, 20'000);
  using Order = std::vector<std::pair<uint32_t, uint32_t>>;
  const Order groups{{0, 0}, {1, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 1}, {1, 2}, {1, 3}, {0, 4}, {0, 5}, {0, 6}, {1, 4}, {1, 5}, {1, 6}};
  const Sent whole = sent(pair, 1);
  EXPECT(whole.order == groups && whole.marks == 1);
  EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::SENT);  // nobody reads the slots that are written next
  // Extents of a save under way are followed: who waits for them needs those of all chunks alike.
  pair.owner.begin_promotion(1);
  Order by_extent;
  for (uint32_t extent = 0; extent < 7; ++extent) {
    by_extent.insert(by_extent.end(), {{0, extent}, {1, extent}});
  }
  bool has_landed = false;
  const auto land_all = [&] {
    for (uint32_t extent = 0; extent < 7 && !has_landed; ++extent) {
      pair.owner.land(1, extent);
    }
    has_landed = true;
  };
  EXPECT(sent(pair, 2, land_all).order == by_extent);
}

TEST(a_mark_is_for_so_many_runs_extents_and_bytes) {
  Pair small(300, 3, 64);  // 300 first extents, then 300 runs of two
  const Sent all = sent(small, 1);
  EXPECT(all.order.size() == 900 && all.marks == 3);
  Pair large(3, 2, 700'001);  // more than half of what goes at once
  EXPECT(sent(large, 1).marks == 6);
}

TEST(a_wrong_ticket_gets_nothing_and_harms_no_other) {
  Pair pair(2, 2, 1000);
  EXPECT(pair.offer(1, 1) != 0);
  EXPECT(pair.pull(2, 1) != 0);
  const auto outcomes = wait_for_pulled(pair.queue, 2);
  EXPECT(ends_with(outcomes, PullStatus::FAILED, PullFault::REFUSED));
  EXPECT(outcomes.at(0).is_unmarked && pair.puller.has_failed(outcomes.at(0)) && pair.puller.is_untouched(0, 0));
  EXPECT(pair.server.stats().strangers.bad_ticket == 1);
  EXPECT(pair.server.take_outcomes().empty());
}

TEST(a_repeated_ticket_gets_nothing) {
  // One mark for two runs: the first extent, and a group of the second alone.
  constexpr size_t one_chunk = ONE_MARK_BYTES + sizeof(StreamRun) + sizeof(uint32_t);
  Pair pair(2, 2, 1000);
  EXPECT(pair.offer(1, 2) != 0);
  // Two connections with the same number: the second is refused while the offer stands.
  const RawSocket first(pair.server.port());
  EXPECT(first.send(make_hello(ticket_of(1), 0, 2)));
  EXPECT(first.receive_rest().size() == 2000 + one_chunk);
  const RawSocket second(pair.server.port());
  EXPECT(second.send(make_hello(ticket_of(1), 0, 2)));
  EXPECT(second.receive_rest().empty());
  EXPECT(pair.server.stats().strangers.repeated == 1);
  const RawSocket other(pair.server.port());
  EXPECT(other.send(make_hello(ticket_of(1), 1, 2)));
  EXPECT(other.receive_rest().size() == 2000 + one_chunk);
  EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::SENT);
  // The offer has ended: the ticket is nobody's.
  const RawSocket late(pair.server.port());
  EXPECT(late.send(make_hello(ticket_of(1), 1, 2)));
  EXPECT(late.receive_rest().empty());
  EXPECT(pair.server.stats().strangers.bad_ticket == 1);
}

TEST(an_expired_offer_ends_once_and_its_ticket_is_worthless) {
  Pair pair(2, 2, 1000);
  const auto answer = pair.server.offer(ticket_of(1), pair.owner.offer_plan(2, 1, milliseconds(20)));
  const auto ends = wait_for_offers(pair.server, 1);
  EXPECT(ends.at(0).offer == answer.offer && ends.at(0).end == OfferEnd::EXPIRED);
  EXPECT(pair.pull(1, 1) != 0);
  EXPECT(ends_with(wait_for_pulled(pair.queue, 2), PullStatus::FAILED, PullFault::REFUSED));
  EXPECT(pair.server.take_outcomes().empty());
}

TEST(a_withdrawn_offer_ends_its_connections) {
  Pair pair(2, 2, 1000);
  pair.owner.begin_promotion(1);
  EXPECT(pair.offer(1, 1) != 0);
  EXPECT(pair.pull(1, 1) != 0);
  wait_until([&] { return pair.puller.index->landed_at(Node::address(0)) == 1; });
  EXPECT(pair.server.withdraw(ticket_of(1)));
  EXPECT(!pair.server.withdraw(ticket_of(9)));
  EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::CANCELLED);
  EXPECT(ends_with(wait_for_pulled(pair.queue, 2), PullStatus::FAILED, PullFault::CLOSED));
}

TEST(a_promoting_slot_is_followed) {
  Pair pair(3, 4, 1000);
  pair.owner.begin_promotion(1);
  EXPECT(pair.offer(1, 1) != 0);
  EXPECT(pair.pull(1, 1) != 0);
  for (uint32_t extent = 0; extent < 4; ++extent) {
    // What lies before it in the order of extents has come; nothing behind it has.
    wait_until([&] { return pair.puller.index->landed_at(Node::address(0)) == extent + 1; });
    EXPECT(pair.puller.index->landed_at(Node::address(1)) == extent);
    EXPECT(pair.puller.index->landed_at(Node::address(2)) == extent);
    pair.owner.land(1, extent);
  }
  EXPECT(ends_with(wait_for_pulled(pair.queue, 3), PullStatus::DONE, PullFault::NONE));
  EXPECT(pair.puller.has(0) && pair.puller.has(1) && pair.puller.has(2));
}

TEST(a_promotion_that_lasts_longer_than_a_stall_stalls_nobody) {
  Pair pair(1, 2, 1000);
  pair.owner.begin_promotion(0);
  EXPECT(pair.offer(1, 1) != 0);
  auto plan = pair.puller.pull_plan(pair.server.port(), ticket_of(1), 1, 1);
  plan.stall = milliseconds(700);
  const auto begun = StreamClock::now();
  EXPECT(pair.queue.pull(plan) != 0);
  wait_until([&] { return StreamClock::now() - begun > 2 * plan.stall; });
  pair.owner.land(0, 0);
  pair.owner.land(0, 1);
  EXPECT(ends_with(wait_for_pulled(pair.queue, 1), PullStatus::DONE, PullFault::NONE));
}

TEST(a_chunk_whose_promotion_fails_or_whose_slot_has_another_one_ends_alone) {
  Pair pair(4, 4, 1000);
  pair.owner.begin_promotion(1);
  pair.owner.land(1, 0);
  pair.owner.table->set_generation(Node::address(2), 7);
  EXPECT(pair.offer(1, 1) != 0);
  EXPECT(pair.pull(1, 1) != 0);
  wait_until([&] { return pair.puller.index->landed_at(Node::address(1)) == 1; });
  pair.owner.board->fail(Node::address(1));
  const auto outcomes = wait_for_pulled(pair.queue, 4);
  for (const uint32_t chunk : {0U, 3U}) {
    EXPECT(outcomes.at(chunk).status == PullStatus::DONE && pair.puller.has(chunk));
  }
  for (const uint32_t chunk : {1U, 2U}) {
    EXPECT(outcomes.at(chunk).status == PullStatus::BAD_SOURCE && outcomes.at(chunk).fault == PullFault::GONE);
    EXPECT(pair.puller.is_failed(chunk));
  }
  const auto ends = wait_for_offers(pair.server, 1);
  EXPECT(ends.at(0).end == OfferEnd::SENT && ends.at(0).gone_chunks == 2);
}

TEST(bytes_that_changed_at_the_owner_fail_that_chunk_alone) {
  for (const uint64_t extent_bytes : {1000ULL, 200'000ULL}) {
    Pair pair(3, 3, extent_bytes);
    pair.owner.arena->data()[pair.owner.arena_offset(1) + extent_bytes + 17] ^= 1U;
    EXPECT(pair.offer(1, 1) != 0);
    EXPECT(pair.pull(1, 1) != 0);
    const auto outcomes = wait_for_pulled(pair.queue, 3);
    EXPECT(outcomes.at(0).status == PullStatus::DONE && outcomes.at(2).status == PullStatus::DONE);
    EXPECT(outcomes.at(1).status == PullStatus::BAD_SOURCE && outcomes.at(1).fault == PullFault::CHECKSUM);
    EXPECT(pair.puller.is_failed(1) && pair.puller.has(0) && pair.puller.has(2));
    // Its last extent was thrown away, where it did not come in one piece with the bad one.
    EXPECT(extent_bytes == 1000 || pair.puller.is_untouched(1, 2 * extent_bytes));
  }
}

TEST(an_owner_that_is_killed_in_mid_transfer_fails_what_has_not_come) {
  Pair pair(2, 2, 1000);
  pair.owner.begin_promotion(1);
  EXPECT(pair.offer(1, 1) != 0);
  EXPECT(pair.pull(1, 1) != 0);
  wait_until([&] { return pair.puller.index->landed_at(Node::address(0)) == 1; });
  EXPECT(pair.server.stop(LONG));
  EXPECT(ends_with(wait_for_pulled(pair.queue, 2), PullStatus::FAILED, PullFault::CLOSED));
  EXPECT(pair.server.take_outcomes().at(0).end == OfferEnd::CANCELLED);
  EXPECT(pair.server.offer(ticket_of(2), pair.owner.offer_plan(1, 1)).refusal == OfferRefusal::STOPPED);
}

TEST(a_puller_that_is_killed_in_mid_transfer_fails_the_offer) {
  Pair pair(2, 2, 8 << 20);
  EXPECT(pair.offer(1, 1) != 0);
  {
    const RawSocket reader(pair.server.port());
    EXPECT(reader.send(make_hello(ticket_of(1), 0, 1)));
    uint8_t first[4096];
    EXPECT(reader.receive(first, sizeof(first)));
  }
  EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::FAILED);
  EXPECT(pair.server.stats().broken == 1);
}

TEST(a_cancelled_pull_ends_each_chunk_and_writes_no_more) {
  Pair pair(3, 2, 1000);
  pair.owner.begin_promotion(1);
  EXPECT(pair.offer(1, 1) != 0);
  const uint64_t job = pair.pull(1, 1);
  wait_until([&] { return pair.puller.index->landed_at(Node::address(0)) == 1; });
  EXPECT(pair.queue.cancel(job));
  EXPECT(ends_with(wait_for_pulled(pair.queue, 3), PullStatus::CANCELLED, PullFault::CANCELLED));
  pair.owner.land(1, 0);
  pair.owner.land(1, 1);
  // Little enough is left that the owner's kernel may take it all before it learns of the end.
  EXPECT(wait_for_offers(pair.server, 1).at(0).end <= OfferEnd::FAILED);
  EXPECT(pair.puller.is_untouched(1, 0) && pair.puller.is_failed(1));
  EXPECT(!pair.queue.cancel(job));  // all of it has been reported
  EXPECT(pair.queue.take_outcomes().empty());
}

TEST(stopping_the_queue_ends_running_and_waiting_jobs) {
  Pair pair(2, 2, 1000, 1);
  pair.owner.begin_promotion(0);
  EXPECT(pair.offer(1, 1) != 0 && pair.offer(2, 1) != 0);
  EXPECT(pair.pull(1, 1) != 0);
  wait_until([&] { return pair.server.stats().running == 1; });
  EXPECT(pair.pull(2, 1) != 0);
  EXPECT(pair.queue.stop(LONG));
  const auto outcomes = pair.queue.take_outcomes();
  EXPECT(outcomes.size() == 4);
  for (const PullOutcome& outcome : outcomes) {
    EXPECT(outcome.status == PullStatus::CANCELLED);
  }
  EXPECT(pair.pull(3, 1) == 0);
}

TEST(a_peer_gets_no_more_than_its_rate) {
  auto options = local_options();
  options.peer_bytes_per_s = 1 << 20;
  Pair pair(2, 2, 64 << 10, 4, options);
  const auto begun = StreamClock::now();
  EXPECT(pair.offer(1, 2) != 0);
  EXPECT(pair.pull(1, 2) != 0);
  EXPECT(ends_with(wait_for_pulled(pair.queue, 2), PullStatus::DONE, PullFault::NONE));
  // 256 KiB at 1 MiB/s; the last piece of each connection may go ahead of its time.
  EXPECT(StreamClock::now() - begun >= milliseconds(100));
}

TEST(offers_are_bounded_in_number) {
  auto options = local_options();
  options.offers_max = 2;
  Pair pair(2, 2, 1000, 1, options);
  const auto plan = pair.owner.offer_plan(2, 1);
  EXPECT(pair.server.offer(ticket_of(1), plan).offer != 0);
  EXPECT(pair.server.offer(ticket_of(1), plan).refusal == OfferRefusal::REPEATED_TICKET);
  auto other = plan;
  other.peer = 1;
  EXPECT(pair.server.offer(ticket_of(2), other).offer != 0);
  EXPECT(pair.server.offer(ticket_of(3), other).refusal == OfferRefusal::FULL);
  EXPECT(pair.server.withdraw(ticket_of(1)));
  EXPECT(pair.server.offer(ticket_of(4), plan).offer != 0);
}
