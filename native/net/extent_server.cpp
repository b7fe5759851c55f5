#include "net/extent_server.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "threads/event_descriptor.h"

namespace kvpool {

ExtentServer::ExtentServer(std::shared_ptr<const Mapping> arena, std::shared_ptr<const IndexView> index,
                           const ExtentServerOptions& options)
    : arena_(std::move(arena)),
      index_(std::move(index)),
      options_(options),
      listener_(options.address, options.port),
      tls_(make_acceptor()),
      event_fd_(new_event_fd()),
      watch_fd_(new_event_fd()),
      shares_(options.threads) {
  KVPOOL_CHECK(options_.threads > 0 && options_.offers_max > 0);
  KVPOOL_CHECK(options_.strangers_max > 0 && options_.connections_max > 0);
  try {
    threads_.add([this] { watch(); });
    for (unsigned number = 0; number < options_.threads; ++number) {
      threads_.add([this] { send_tasks(); });
    }
  } catch (...) {
    stop(ThreadGroup::FOR_GOOD);
    close(event_fd_);
    close(watch_fd_);
    throw;
  }
}

ExtentServer::~ExtentServer() {
  stop(ThreadGroup::FOR_GOOD);
  close(event_fd_);
  close(watch_fd_);
}

OfferAnswer ExtentServer::offer(const StreamTicket& ticket, OfferPlan plan) {
  KVPOOL_CHECK(plan.connections > 0 && plan.connections <= STREAM_CONNECTIONS_MAX);
  KVPOOL_CHECK(plan.connections <= plan.chunks.size());
  KVPOOL_CHECK(plan.extents > 0 && plan.extent_bytes > 0);
  uint64_t id = 0;
  bool is_first = false;
  {
    const std::lock_guard guard(lock_);
    if (is_stopped_ || offers_.size() >= options_.offers_max) {
      return {0, is_stopped_ ? OfferRefusal::STOPPED : OfferRefusal::FULL};
    }
    if (find(ticket.data()) != nullptr) {
      return {0, OfferRefusal::REPEATED_TICKET};
    }
    PeerUse& use = peers_[plan.peer];
    if (use.pace == nullptr) {
      use.pace = std::make_shared<SendPace>(options_.peer_bytes_per_s);
    }
    ++use.offers;
    id = ++last_offer_;
    is_first = plan.deadline < watched_until_;
    const uint32_t connections = plan.connections;
    auto made = std::make_shared<Offer>();
    made->id = id;
    made->ticket = ticket;
    made->plan = std::make_shared<const OfferPlan>(std::move(plan));
    made->pace = use.pace;
    made->is_claimed.resize(connections);
    made->connections_left = connections;
    offers_.emplace(id, std::move(made));
  }
  if (is_first) {  // woken for each offer, its thread would run before the caller's
    notify(watch_fd_);
  }
  return {id, OfferRefusal::NONE};
}

bool ExtentServer::withdraw(const StreamTicket& ticket) {
  const std::lock_guard guard(lock_);
  const auto found = find(ticket.data());
  if (found == nullptr || found->is_over) {
    return false;
  }
  end_offer(found, OfferEnd::CANCELLED);
  return true;
}

// Compares with every ticket, whichever it is: the time says nothing.
std::shared_ptr<ExtentServer::Offer> ExtentServer::find(const uint8_t* ticket) const {
  std::shared_ptr<Offer> found;
  for (const auto& [id, offer] : offers_) {
    if (is_same_ticket(offer->ticket.data(), ticket)) {
      found = offer;
    }
  }
  return found;
}

// Names are no secret: an offer is found by them, and the handshake shows who has its ticket.
std::optional<StreamTicket> ExtentServer::ticket_named(const uint8_t* identity) const {
  for (const auto& [id, offer] : offers_) {
    if (!offer->is_over && std::equal(identity, identity + TLS_IDENTITY_BYTES, offer->ticket.begin())) {
      return offer->ticket;
    }
  }
  return std::nullopt;
}

std::unique_ptr<TlsAcceptor> ExtentServer::make_acceptor() {
  if (!options_.is_encrypted) {
    return nullptr;
  }
  return make_tls_acceptor([this](const uint8_t* identity) {
    const std::lock_guard guard(lock_);
    return ticket_named(identity);
  });
}

void ExtentServer::admit(HelloDesk::Presented& presented) {
  const auto tcp = std::make_shared<TcpStream>(presented.fd);
  std::shared_ptr<ByteStream> stream = tcp;
  if (presented.session != nullptr) {
    stream = std::make_shared<TlsStream>(tcp, std::move(presented.session));
  }
  const StreamHello& hello = presented.hello;
  const auto offer = find(hello.ticket);
  if (offer == nullptr || offer->is_over) {
    ++stats_.strangers.bad_ticket;
  } else if (hello.connections != offer->plan->connections || offer->is_claimed[hello.connection]) {
    ++stats_.strangers.repeated;
  } else if (waiting_.size() + stats_.running >= options_.connections_max) {
    ++stats_.strangers.crowded;
  } else {
    offer->is_claimed[hello.connection] = true;
    ++stats_.connections;
    waiting_.push_back({offer, hello.connection, stream});
    wake_.notify_one();
  }
}

void ExtentServer::send_tasks() {
  std::unique_lock guard(lock_);
  while (!is_stopped_) {
    const auto next =
        std::find_if(waiting_.begin(), waiting_.end(), [this](const Task& one) { return shares_.begin(one.offer->plan->peer); });
    if (next == waiting_.end()) {
      wake_.wait(guard);
      continue;
    }
    const Task task = std::move(*next);
    waiting_.erase(next);
    ++stats_.running;
    ++task.offer->running;
    task.offer->streams.push_back(task.stream);
    guard.unlock();
    ExtentSender sender(task.offer->plan, task.connection, arena_, index_, *task.offer->pace, task.offer->stop, options_.stall);
    const StreamFault fault = sender.run(*task.stream);
    guard.lock();
    finish(task, sender, fault);
    --stats_.running;
    shares_.end(task.offer->plan->peer);
    wake_.notify_all();
  }
}

void ExtentServer::finish(const Task& task, const ExtentSender& sender, StreamFault fault) {
  const auto& offer = task.offer;
  std::erase(offer->streams, task.stream);
  --offer->running;
  --offer->connections_left;
  offer->bytes += sender.bytes();
  offer->gone_chunks += sender.gone_chunks();
  stats_.sent_bytes += sender.bytes();
  stats_.gone_chunks += sender.gone_chunks();
  stats_.stalled += fault == StreamFault::STALLED ? 1U : 0U;
  stats_.broken += fault == StreamFault::BROKEN || fault == StreamFault::CLOSED ? 1U : 0U;
  if (fault == StreamFault::LATE && !offer->is_over) {
    end_offer(offer, OfferEnd::EXPIRED);
    return;
  }
  if (fault != StreamFault::NONE && !offer->is_over) {
    offer->end = OfferEnd::FAILED;
  }
  settle(offer);
}

void ExtentServer::end_offer(const std::shared_ptr<Offer>& offer, OfferEnd end) {
  offer->is_over = true;
  offer->end = end;
  offer->stop.stop();
  for (const auto& stream : offer->streams) {
    stream->end();
  }
  std::erase_if(waiting_, [&](const Task& task) { return task.offer == offer; });
  settle(offer);
}

// Reports an offer when no thread reads its slots, or will.
void ExtentServer::settle(const std::shared_ptr<Offer>& offer) {
  if (offer->running > 0 || !(offer->is_over || offer->connections_left == 0)) {
    return;
  }
  offer->is_over = true;
  outcomes_.push_back({offer->id, offer->end, offer->bytes, offer->gone_chunks});
  const auto peer = peers_.find(offer->plan->peer);
  if (--peer->second.offers == 0) {
    peers_.erase(peer);
  }
  offers_.erase(offer->id);
  notify(event_fd_);
}

void ExtentServer::expire() {
  std::vector<std::shared_ptr<Offer>> late;
  const auto now = StreamClock::now();
  for (const auto& [id, offer] : offers_) {
    if (!offer->is_over && offer->plan->deadline <= now) {
      late.push_back(offer);
    }
  }
  for (const auto& offer : late) {
    end_offer(offer, OfferEnd::EXPIRED);
  }
}

StreamClock::time_point ExtentServer::next_deadline() const {
  auto first = StreamClock::time_point::max();
  for (const auto& [id, offer] : offers_) {
    first = offer->is_over ? first : std::min(first, offer->plan->deadline);
  }
  return first;
}

std::vector<OfferOutcome> ExtentServer::take_outcomes(size_t limit) {
  const std::lock_guard guard(lock_);
  return take_front(outcomes_, limit, event_fd_);
}

bool ExtentServer::stop(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard guard(lock_);
    is_stopped_ = true;
    std::vector<std::shared_ptr<Offer>> left;
    for (const auto& [id, offer] : offers_) {
      left.push_back(offer);
    }
    for (const auto& offer : left) {
      if (!offer->is_over) {
        end_offer(offer, OfferEnd::CANCELLED);
      }
    }
  }
  wake_.notify_all();
  notify(watch_fd_);
  return threads_.join(timeout);
}

ExtentServerStats ExtentServer::stats() const {
  const std::lock_guard guard(lock_);
  ExtentServerStats stats = stats_;
  stats.offers = offers_.size();
  stats.waiting = waiting_.size();
  return stats;
}

}  // namespace kvpool
