// Hostile and broken pullers: each costs the owner a bounded time, is counted by its reason, and delays nobody else.
#include <list>

#include "tests/net/net_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// An owner of two chunks.
struct Owner {
  explicit Owner(const ExtentServerOptions& options, uint64_t extent_bytes = 1000)
      : node(2, 2, extent_bytes), server(node.arena, node.index, options) {
    node.store(0);
    node.store(1);
  }
  [[nodiscard]] bool offer(uint8_t ticket, uint64_t peer = 0) {
    auto plan = node.offer_plan(2, 1);
    plan.peer = peer;
    return server.offer(ticket_of(ticket), plan).offer != 0;
  }
  // Whether somebody with a ticket gets everything now.
  void expect_service(uint8_t ticket, uint64_t peer = 0) {
    EXPECT(offer(ticket, peer));
    const RawSocket reader(server.port());
    EXPECT(reader.send(make_hello(ticket_of(ticket), 0, 1)));
    const bool is_large = node.extent_bytes > (512 << 10);  // each has a mark of its own
    EXPECT(reader.receive_rest() == (is_large ? honest_stream(node, 2) : stream_of_one_mark(node, 2)));
  }

  const Node node;
  ExtentServer server;
};

}  // namespace

TEST(other_bytes_than_a_hello_end_a_connection_at_once) {
  Owner owner(local_options());
  const std::string request = "GET / HTTP/1.1\r\n";
  const RawSocket stranger(owner.server.port());
  EXPECT(stranger.send(request.data(), request.size()));
  EXPECT(stranger.receive_rest().empty());
  auto hello = make_hello(ticket_of(1), 0, 1);
  hello.reserved[3] = 1;
  const RawSocket near(owner.server.port());
  EXPECT(near.send(hello));
  EXPECT(near.receive_rest().empty());
  wait_until([&] { return owner.server.stats().strangers.bad_hello == 2; });
  owner.expect_service(1);
}

TEST(a_hello_cut_at_any_byte_is_none) {
  Owner owner(local_options());
  EXPECT(owner.offer(1));
  const auto hello = make_hello(ticket_of(1), 0, 1);
  for (size_t size = 0; size < sizeof(hello); ++size) {
    const RawSocket stranger(owner.server.port());
    EXPECT(stranger.send(&hello, size));
  }
  wait_until([&] { return owner.server.stats().strangers.closed == sizeof(hello); });
  EXPECT(owner.server.stats().connections == 0);
  owner.expect_service(2);
}

TEST(a_hello_in_single_bytes_is_one) {
  Owner owner(local_options());
  EXPECT(owner.offer(1));
  const auto hello = make_hello(ticket_of(1), 0, 1);
  const RawSocket reader(owner.server.port());
  for (size_t at = 0; at < sizeof(hello); ++at) {
    EXPECT(reader.send(reinterpret_cast<const uint8_t*>(&hello) + at, 1));
  }
  EXPECT(reader.receive_rest() == stream_of_one_mark(owner.node, 2));
}

TEST(silence_ends_a_connection_in_bounded_time) {
  auto options = local_options();
  options.hello_timeout = milliseconds(30);
  Owner owner(options);
  const RawSocket stranger(owner.server.port());
  EXPECT(stranger.receive_rest().empty());
  wait_until([&] { return owner.server.stats().strangers.silent == 1; });
}

TEST(a_crowd_of_silent_strangers_delays_nobody) {
  auto options = local_options();
  options.strangers_max = 8;
  options.threads = 1;
  Owner owner(options);
  std::list<RawSocket> crowd;
  for (size_t number = 0; number < 40; ++number) {
    crowd.emplace_back(owner.server.port());
  }
  owner.expect_service(1);
  wait_until([&] { return owner.server.stats().strangers.crowded >= 40 - 8; });
}

TEST(a_crowd_from_one_source_ends_no_stranger_from_another) {
  auto options = local_options();
  options.strangers_max = 8;
  options.hello_timeout = milliseconds(20000);
  Owner owner(options);
  EXPECT(owner.offer(1));
  const RawSocket slow(owner.server.port());
  const auto hello = make_hello(ticket_of(1), 0, 1);
  std::list<RawSocket> crowd;
  for (size_t number = 0; number < 40; ++number) {
    crowd.emplace_back(owner.server.port(), INADDR_LOOPBACK + 1 + static_cast<uint32_t>(number % 2));
  }
  wait_until([&] { return owner.server.stats().strangers.crowded >= 40 - 8; });
  EXPECT(slow.send(hello));
  EXPECT(slow.receive_rest() == stream_of_one_mark(owner.node, 2));
}

TEST(a_hello_for_other_connections_than_offered_is_refused) {
  Owner owner(local_options());
  EXPECT(owner.offer(1));
  const RawSocket stranger(owner.server.port());
  EXPECT(stranger.send(make_hello(ticket_of(1), 1, 2)));
  EXPECT(stranger.receive_rest().empty());
  EXPECT(owner.server.stats().strangers.repeated == 1);
}

TEST(endless_data_behind_a_hello_is_never_read) {
  Owner owner(local_options(), 16 << 10);  // little enough for the socket's own buffers: the reader takes nothing
  EXPECT(owner.offer(1));
  const RawSocket reader(owner.server.port());
  EXPECT(reader.send(make_hello(ticket_of(1), 0, 1)));
  std::thread flood([&] {
    const std::vector<uint8_t> noise(1 << 16, 7);
    while (reader.send(noise.data(), noise.size())) {
    }
  });
  const OfferOutcome outcome = wait_for_offers(owner.server, 1).at(0);
  EXPECT(outcome.end == OfferEnd::SENT && outcome.bytes == 4 * (16 << 10));
  flood.join();
  owner.expect_service(2);
}

TEST(a_slow_reader_is_ended_and_slows_nobody) {
  auto options = local_options();
  options.stall = milliseconds(500);
  options.threads = 2;
  Owner owner(options, 4 << 20);
  // More offers to the stalled peer than there are threads.
  std::list<RawSocket> stalled;
  for (uint8_t ticket = 1; ticket <= 3; ++ticket) {
    EXPECT(owner.offer(ticket, 1));
    stalled.emplace_back(owner.server.port());
    EXPECT(stalled.back().send(make_hello(ticket_of(ticket), 0, 1)));
  }
  wait_until([&] { return owner.server.stats().running == 1 && owner.server.stats().waiting == 2; });
  owner.expect_service(9, 2);
  for (const OfferOutcome& outcome : wait_for_offers(owner.server, 4)) {
    EXPECT(outcome.end == (outcome.offer == 4 ? OfferEnd::SENT : OfferEnd::FAILED));
  }
  EXPECT(owner.server.stats().stalled == 3);
}

TEST(a_half_open_connection_ends_with_its_offer) {
  auto options = local_options();
  Owner owner(options, 4 << 20);
  EXPECT(owner.server.offer(ticket_of(1), owner.node.offer_plan(2, 1, milliseconds(200))).offer != 0);
  const RawSocket reader(owner.server.port());
  EXPECT(reader.send(make_hello(ticket_of(1), 0, 1)));
  EXPECT(wait_for_offers(owner.server, 1).at(0).end == OfferEnd::EXPIRED);
}

TEST(an_address_that_cannot_be_listened_on_is_named) {
  auto options = local_options();
  options.address = "localhost";
  const Node node(1, 1, 1000);
  try {
    const ExtentServer server(node.arena, node.index, options);
    EXPECT(false);
  } catch (const std::system_error& error) {
    EXPECT(std::string(error.what()).find("localhost") != std::string::npos);
  }
}

TEST(it_listens_on_ipv6_too) {
  auto options = local_options();
  options.address = "::1";
  const Node node(1, 1, 1000);
  node.store(0);
  try {
    ExtentServer server(node.arena, node.index, options);
    const Node target(1, 1, 1000);
    PullQueue queue(target.arena, target.board, 1, 1);
    EXPECT(server.offer(ticket_of(1), node.offer_plan(1, 1)).offer != 0);
    auto plan = target.pull_plan(server.port(), ticket_of(1), 1, 1);
    plan.address = "::1";
    EXPECT(queue.pull(plan) != 0);
    EXPECT(wait_for_pulled(queue, 1).at(0).status == PullStatus::DONE);
  } catch (const std::system_error&) {
    std::printf("  skipped: no IPv6 here\n");
  }
}
