// Streams that are encrypted: right bytes for who has the ticket, nothing for anybody else, and bounded time for all of them.
#include <list>

#include "tests/net/net_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

using Bytes = std::vector<uint8_t>;

ExtentServerOptions encrypted_options() {
  auto options = local_options();
  options.is_encrypted = true;
  return options;
}

// Both halves differ from one number to the next.
StreamTicket halves(uint8_t name, uint8_t secret) {
  StreamTicket ticket{};
  std::fill(ticket.begin(), ticket.begin() + TLS_IDENTITY_BYTES, name);
  std::fill(ticket.begin() + TLS_IDENTITY_BYTES, ticket.end(), secret);
  return ticket;
}

// An encrypting owner whose chunks are stored, and a puller whose slots are empty.
struct Pair {
  explicit Pair(uint32_t chunks = 3, uint32_t extents = 2, uint64_t extent_bytes = 5000,
                const ExtentServerOptions& options = encrypted_options())
      : owner(chunks, extents, extent_bytes), puller(chunks, extents, extent_bytes), server(owner.arena, owner.index, options) {
    for (uint32_t slot = 0; slot < chunks; ++slot) {
      owner.store(slot);
    }
  }
  void offer(const StreamTicket& ticket, uint32_t connections = 1) {
    EXPECT(server.offer(ticket, owner.offer_plan(owner.slots, connections)).offer != 0);
  }
  [[nodiscard]] PullPlan plan(const StreamTicket& ticket, uint16_t port, uint32_t connections = 1) const {
    auto made = puller.pull_plan(port, ticket, puller.slots, connections);
    made.is_encrypted = true;
    return made;
  }
  // The one fault by which all chunks of a pull end; NONE: they have come. A chunk that has come has its bytes, whatever happened.
  PullFault pull(PullPlan asked) {
    for (uint32_t slot = 0; slot < puller.slots; ++slot) {
      puller.table->set_landed(Node::address(slot), 0);
    }
    PullQueue queue(puller.arena, puller.board, 2, 1);
    EXPECT(queue.pull(std::move(asked)) != 0);
    const auto outcomes = wait_for_pulled(queue, puller.slots);
    for (const auto& [chunk, outcome] : outcomes) {
      EXPECT(outcome.status == PullStatus::DONE ? puller.has(chunk) : puller.has_failed(outcome));
    }
    EXPECT(puller.keeps_bounds());
    return outcomes.at(puller.slots - 1).fault;
  }
  PullFault pull(const StreamTicket& ticket) { return pull(plan(ticket, server.port())); }

  const Node owner;
  const Node puller;
  ExtentServer server;
};

// Between both sides of one connection: hears all bytes, changes those from the owner, and ends both when one ends.
class Relay {
 public:
  using Change = std::function<bool(Bytes&, size_t passed)>;  // whether to go on

  Relay(uint16_t port, Change change)
      : owner_([this, port, change](RawSocket& puller) { run(puller, port, change); }) {}
  [[nodiscard]] uint16_t port() const { return owner_.port(); }
  // REQUIRES: both sides have ended.
  [[nodiscard]] const Bytes& heard() {
    owner_.join();
    return heard_;
  }

 private:
  void run(RawSocket& puller, uint16_t port, const Change& change) {
    const RawSocket owner(port);
    pollfd polls[] = {{puller.fd(), POLLIN, 0}, {owner.fd(), POLLIN, 0}};
    size_t passed = 0;
    while (poll(polls, 2, static_cast<int>(LONG.count())) > 0) {
      for (const bool is_owner : {false, true}) {
        if (polls[is_owner ? 1 : 0].revents == 0) {
          continue;
        }
        Bytes piece(4096);
        const ssize_t count = recv(is_owner ? owner.fd() : puller.fd(), piece.data(), piece.size(), 0);
        if (count <= 0) {
          return;
        }
        piece.resize(static_cast<size_t>(count));
        heard_.insert(heard_.end(), piece.begin(), piece.end());
        const bool goes_on = !is_owner || change(piece, passed);
        passed += is_owner ? static_cast<size_t>(count) : 0;
        if (!(is_owner ? puller : owner).send(piece.data(), piece.size()) || !goes_on) {
          return;
        }
      }
    }
  }

  Bytes heard_;
  RawListener owner_;
};

bool pass(Bytes&, size_t) { return true; }

bool has_part(const Bytes& bytes, const uint8_t* part, size_t size) {
  return std::search(bytes.begin(), bytes.end(), part, part + size) != bytes.end();
}

// A puller's fault at an owner that does this with the connection.
PullFault fault_at(const std::function<void(RawSocket&)>& serve, milliseconds stall = LONG) {
  Pair pair;
  const RawListener owner(serve);
  auto plan = pair.plan(ticket_of(1), owner.port());
  plan.stall = stall;
  return pair.pull(plan);
}

}  // namespace

TEST(encrypted_chunks_have_their_bytes) {
  const std::pair<uint32_t, uint64_t> geometries[] = {{3, 1000}, {32, 2048}, {4, 65536}, {2, 700'001}};
  for (const auto& [extents, extent_bytes] : geometries) {
    for (uint32_t connections = 1; connections <= 2; ++connections) {
      Pair pair(5, extents, extent_bytes);
      pair.offer(halves(1, 2), connections);
      EXPECT(pair.pull(pair.plan(halves(1, 2), pair.server.port(), connections)) == PullFault::NONE);
      EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::SENT);
    }
  }
}

TEST(an_extent_that_has_not_landed_is_followed_over_an_encrypted_stream) {
  Pair pair(1, 2, 5000);
  pair.owner.begin_promotion(0);
  pair.offer(ticket_of(1));
  PullQueue queue(pair.puller.arena, pair.puller.board, 1, 1);
  EXPECT(queue.pull(pair.plan(ticket_of(1), pair.server.port())) != 0);
  pair.owner.land(0, 0);
  wait_until([&] { return pair.puller.index->landed_at(Node::address(0)) == 1; });
  pair.owner.land(0, 1);
  EXPECT(wait_for_pulled(queue, 1).at(0).status == PullStatus::DONE && pair.puller.has(0));
}

TEST(who_listens_learns_neither_the_ticket_nor_a_chunk) {
  Pair pair;
  const auto ticket = halves(1, 2);
  pair.offer(ticket);
  Relay relay(pair.server.port(), pass);
  EXPECT(pair.pull(pair.plan(ticket, relay.port())) == PullFault::NONE);
  const Bytes& heard = relay.heard();
  EXPECT(heard.size() > pair.owner.slots * pair.owner.extents * pair.owner.extent_bytes);
  EXPECT(has_part(heard, ticket.data(), TLS_IDENTITY_BYTES));
  EXPECT(!has_part(heard, ticket.data() + TLS_IDENTITY_BYTES, 8));
  EXPECT(!has_part(heard, STREAM_MAGIC, sizeof(STREAM_MAGIC)));
  EXPECT(!has_part(heard, pair.owner.chunk(0).data(), 16));
}

TEST(another_secret_is_refused_and_uses_nothing_up) {
  Pair pair;
  pair.offer(halves(1, 2));
  EXPECT(pair.pull(halves(1, 3)) == PullFault::REFUSED);
  EXPECT(pair.pull(halves(4, 2)) == PullFault::REFUSED);
  wait_until([&] { return pair.server.stats().strangers.untrusted == 2; });
  EXPECT(pair.server.stats().connections == 0);
  EXPECT(pair.pull(halves(1, 2)) == PullFault::NONE);
}

TEST(an_owner_without_the_secret_sends_nothing) {
  Pair pair;
  const RawListener impostor([](RawSocket& peer) {
    auto acceptor = make_tls_acceptor([](const uint8_t*) { return std::nullopt; });
    auto session = acceptor->accept(peer.fd());
    TlsState state = TlsState::WAITS_TO_READ;
    pollfd waiting{peer.fd(), POLLIN, 0};
    while (state == TlsState::WAITS_TO_READ && poll(&waiting, 1, static_cast<int>(LONG.count())) > 0) {
      state = session->handshake();
    }
    EXPECT(state == TlsState::BROKEN);
  });
  EXPECT(pair.pull(pair.plan(halves(1, 2), impostor.port())) == PullFault::REFUSED);
}

TEST(a_plain_pull_is_refused_by_an_encrypting_owner) {
  Pair pair;
  pair.offer(ticket_of(1));
  auto plan = pair.plan(ticket_of(1), pair.server.port());
  plan.is_encrypted = false;
  EXPECT(pair.pull(plan) == PullFault::REFUSED);
  wait_until([&] { return pair.server.stats().strangers.unencrypted == 1; });
  EXPECT(pair.pull(ticket_of(1)) == PullFault::NONE);
}

TEST(an_encrypted_pull_of_a_plain_owner_is_refused) {
  Pair pair(3, 2, 5000, local_options());
  pair.offer(ticket_of(1));
  const PullFault fault = pair.pull(ticket_of(1));
  EXPECT(fault == PullFault::REFUSED || fault == PullFault::UNTRUSTED);  // by whether its bytes were read before the end
  wait_until([&] { return pair.server.stats().strangers.bad_hello == 1; });
}

TEST(an_older_version_is_refused) {
  Pair pair;
  Bytes hello = {0x16, 0x03, 0x01, 0x00, 0x2D, 0x01, 0x00, 0x00, 0x29, 0x03, 0x03};  // TLS 1.2
  hello.insert(hello.end(), 32, 0x55);
  hello.insert(hello.end(), {0x00, 0x00, 0x02, 0x00, 0xA8, 0x01, 0x00});  // PSK with AES-128-GCM
  const RawSocket stranger(pair.server.port());
  EXPECT(stranger.send(hello.data(), hello.size()));
  const Bytes answer = stranger.receive_rest();
  EXPECT(answer.size() == 7 && answer[0] == 0x15 && answer[6] == 70);  // an alert: protocol_version
  wait_until([&] { return pair.server.stats().strangers.untrusted == 1; });
}

TEST(a_stream_that_is_cut_or_changed_anywhere_brings_no_wrong_byte) {
  std::mt19937 random(static_cast<unsigned>(seed()));
  size_t size = 0;
  for (size_t turn = 0; turn < 60; ++turn) {
    Pair pair(2, 2, 20'000);
    pair.offer(ticket_of(1));
    // All of a handshake, then places anywhere; the last bytes of the stream too.
    const size_t place = turn < 30 ? turn * 9 : turn == 59 ? size - 1 : random() % std::max<size_t>(size, 1);
    const bool cuts = turn % 2 == 0;
    Relay relay(pair.server.port(), [&](Bytes& piece, size_t passed) {
      size = std::max(size, passed + piece.size());
      if (place < passed || place >= passed + piece.size()) {
        return true;
      }
      cuts ? piece.resize(place - passed) : static_cast<void>(piece[place - passed] ^= 0x04U);
      return !cuts;
    });
    EXPECT(pair.pull(pair.plan(ticket_of(1), relay.port())) != PullFault::NONE);
    static_cast<void>(pair.server.withdraw(ticket_of(1)));
  }
}

TEST(what_is_no_handshake_ends_a_pull) {
  const PullFault gone = fault_at([](RawSocket&) {});
  EXPECT(gone == PullFault::REFUSED || gone == PullFault::UNTRUSTED);  // closed, or reset
  EXPECT(fault_at([](RawSocket& peer) {
           const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
           static_cast<void>(peer.send(answer.data(), answer.size()));
           static_cast<void>(peer.receive_rest());
         }) == PullFault::UNTRUSTED);
  std::mt19937 random(static_cast<unsigned>(seed()));
  Bytes noise(40'000);  // more than the longest record that its first bytes can announce
  std::generate(noise.begin(), noise.end(), [&] { return static_cast<uint8_t>(random()); });
  EXPECT(fault_at([&](RawSocket& peer) {
           static_cast<void>(peer.send(noise.data(), noise.size()));
           static_cast<void>(peer.receive_rest());
         }) == PullFault::UNTRUSTED);
}

TEST(an_endless_handshake_ends_by_the_stall_time) {
  std::atomic<bool> is_over = false;
  EXPECT(fault_at([](RawSocket& peer) { static_cast<void>(peer.receive_rest()); }, milliseconds(50)) == PullFault::STALLED);
  // Whole records without a meaning, and one record in single bytes.
  const uint8_t change_cipher[] = {0x14, 0x03, 0x03, 0x00, 0x01, 0x01};
  EXPECT(fault_at([&](RawSocket& peer) {
           while (peer.send(change_cipher, sizeof(change_cipher))) {
           }
         }) == PullFault::UNTRUSTED);
  EXPECT(fault_at(
             [&](RawSocket& peer) {
               const uint8_t record[] = {0x16, 0x03, 0x03, 0x40, 0x00};
               static_cast<void>(peer.send(record, sizeof(record)));
               while (!is_over && peer.send(record, 1)) {
                 std::this_thread::yield();
               }
             },
             milliseconds(50)) != PullFault::NONE);
  is_over = true;
}

TEST(strangers_in_the_handshake_cost_a_bounded_time) {
  auto options = encrypted_options();
  options.hello_timeout = milliseconds(300);
  options.strangers_max = 4;
  Pair pair(3, 2, 5000, options);
  Bytes noise(300, 0x16);
  const RawSocket garbage(pair.server.port());
  EXPECT(garbage.send(noise.data(), noise.size()));
  static_cast<void>(garbage.receive_rest());
  wait_until([&] { return pair.server.stats().strangers.untrusted == 1; });
  std::list<RawSocket> crowd;
  const uint8_t begin[] = {0x16, 0x03, 0x01, 0x01, 0x00, 0x01};
  for (size_t number = 0; number < 20; ++number) {
    crowd.emplace_back(pair.server.port());
    static_cast<void>(crowd.back().send(begin, sizeof(begin)));
  }
  wait_until([&] { return pair.server.stats().strangers.crowded >= 16; });
  wait_until([&] { return pair.server.stats().strangers.silent + pair.server.stats().strangers.crowded == 20; });
  pair.offer(ticket_of(1));
  EXPECT(pair.pull(ticket_of(1)) == PullFault::NONE);
}

TEST(a_reader_that_stalls_behind_its_handshake_is_ended) {
  auto options = encrypted_options();
  options.stall = milliseconds(200);
  Pair pair(1, 2, 8 << 20, options);
  pair.offer(ticket_of(1));
  const StreamTimes times{StreamClock::now() + LONG, LONG};
  int error = 0;
  const auto tcp = TcpStream::open(HOST, error);
  EXPECT(tcp->connect(HOST, pair.server.port(), times) == StreamFault::NONE);
  TlsStream tls(tcp, make_tls_client(tcp->fd(), ticket_of(1)));
  EXPECT(tls.handshake(times) == StreamFault::NONE);
  StreamHello hello = make_hello(ticket_of(1), 0, 1);
  iovec part{&hello, sizeof(hello)};
  EXPECT(tls.send_all({&part, 1}, times) == StreamFault::NONE);
  EXPECT(wait_for_offers(pair.server, 1).at(0).end == OfferEnd::FAILED);
  EXPECT(pair.server.stats().stalled == 1);
}

TEST(a_pull_that_is_cancelled_in_the_handshake_ends) {
  Pair pair(1, 1, 1000);
  std::atomic<bool> has_come = false;
  const RawListener silent([&](RawSocket& peer) {
    has_come = true;
    static_cast<void>(peer.receive_rest());
  });
  PullQueue queue(pair.puller.arena, pair.puller.board, 1, 1);
  const uint64_t job = queue.pull(pair.plan(ticket_of(1), silent.port()));
  wait_until([&] { return has_come.load(); });
  EXPECT(queue.cancel(job));
  EXPECT(wait_for_pulled(queue, 1).at(0).status == PullStatus::CANCELLED);
}
