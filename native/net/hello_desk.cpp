#include "net/hello_desk.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvpool {

HelloDesk::~HelloDesk() {
  for (const Stranger& stranger : strangers_) {
    close(stranger.fd);
  }
}

// All zero where the other side has gone already.
HelloDesk::Source HelloDesk::source_of(int fd) noexcept {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  Source source{};
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return source;
  }
  if (address.ss_family == AF_INET) {
    sockaddr_in peer{};
    std::memcpy(&peer, &address, sizeof(peer));
    std::memcpy(source.data(), &peer.sin_addr, sizeof(peer.sin_addr));
  } else if (address.ss_family == AF_INET6) {
    sockaddr_in6 peer{};
    std::memcpy(&peer, &address, sizeof(peer));
    // Of an address that was IPv4's, the last four bytes are the ones that differ.
    std::memcpy(source.data(), peer.sin6_addr.s6_addr + (IN6_IS_ADDR_V4MAPPED(&peer.sin6_addr) ? 8 : 0), source.size());
  }
  return source;
}

// Ends the oldest of the source that has most, the newcomer included. REQUIRES: there is one.
void HelloDesk::make_room(const Source& newcomer) {
  const auto count_of = [&](const Source& source) {
    const auto is_of = [&](const Stranger& one) { return one.source == source; };
    return std::count_if(strangers_.begin(), strangers_.end(), is_of) + (source == newcomer ? 1 : 0);
  };
  auto chosen = strangers_.begin();
  auto most = count_of(chosen->source);
  for (auto one = strangers_.begin(); one != strangers_.end(); ++one) {  // the oldest of each source comes first
    const auto count = count_of(one->source);
    if (count > most) {
      most = count;
      chosen = one;
    }
  }
  close(chosen->fd);
  strangers_.erase(chosen);
}

void HelloDesk::add(int fd, StrangerCounts& counts) {
  const Source source = source_of(fd);
  if (strangers_.size() == most_) {
    make_room(source);
    ++counts.crowded;
  }
  auto session = tls_ == nullptr ? nullptr : tls_->accept(fd);
  if (tls_ != nullptr && session == nullptr) {
    close(fd);
    ++counts.crowded;
    return;
  }
  strangers_.push_back({fd, source, StreamClock::now() + timeout_, std::move(session)});
}

void HelloDesk::watch(std::vector<pollfd>& polls) const {
  for (const Stranger& stranger : strangers_) {
    polls.push_back({stranger.fd, POLLIN, 0});
  }
}

StreamClock::time_point HelloDesk::next_deadline() const {
  return strangers_.empty() ? StreamClock::time_point::max() : strangers_.front().deadline;
}

// Never more than the rest of a hello: what a stranger sends beyond it stays in the kernel, within the connection's window.
HelloDesk::State HelloDesk::read_plain(Stranger& stranger) {
  const size_t missing = stranger.bytes.size() - stranger.received;
  const ssize_t count = recv(stranger.fd, stranger.bytes.data() + stranger.received, missing, MSG_DONTWAIT);
  if (count < 0) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? State::WAITING : State::CLOSED;
  }
  if (count == 0) {
    return State::CLOSED;
  }
  stranger.received += static_cast<size_t>(count);
  return State::WAITING;
}

HelloDesk::State HelloDesk::read_encrypted(Stranger& stranger) {
  if (!stranger.is_trusted) {
    std::array<uint8_t, sizeof(StreamHello)> begin;
    const ssize_t count = recv(stranger.fd, begin.data(), begin.size(), MSG_DONTWAIT | MSG_PEEK);
    if (count > 0 && begins_hello(begin.data(), static_cast<size_t>(count))) {
      // Taken off, so that the connection is closed and not reset.
      static_cast<void>(recv(stranger.fd, begin.data(), begin.size(), MSG_DONTWAIT));
      return State::UNENCRYPTED;
    }
    const TlsState state = stranger.session->handshake();
    if (state != TlsState::DONE) {
      return state == TlsState::WAITS_TO_READ ? State::WAITING : state == TlsState::CLOSED ? State::CLOSED : State::UNTRUSTED;
    }
    stranger.is_trusted = true;
  }
  size_t received = 0;
  const size_t missing = stranger.bytes.size() - stranger.received;
  const TlsState state = stranger.session->read(stranger.bytes.data() + stranger.received, missing, received);
  stranger.received += received;
  return state == TlsState::DONE || state == TlsState::WAITS_TO_READ ? State::WAITING
         : state == TlsState::CLOSED                                 ? State::CLOSED
                                                                     : State::UNTRUSTED;
}

HelloDesk::State HelloDesk::read_one(Stranger& stranger) {
  const State state = stranger.session == nullptr ? read_plain(stranger) : read_encrypted(stranger);
  if (state != State::WAITING) {
    return state;
  }
  if (!begins_hello(stranger.bytes.data(), stranger.received)) {
    return State::BAD;
  }
  if (stranger.received < stranger.bytes.size()) {
    return State::WAITING;
  }
  return read_hello(stranger.bytes.data()) ? State::COMPLETE : State::BAD;
}

void HelloDesk::count(State state, StrangerCounts& counts) {
  switch (state) {
    case State::WAITING:
      ++counts.silent;
      break;
    case State::CLOSED:
      ++counts.closed;
      break;
    case State::UNENCRYPTED:
      ++counts.unencrypted;
      break;
    case State::UNTRUSTED:
      ++counts.untrusted;
      break;
    case State::BAD:
    case State::COMPLETE:
      ++counts.bad_hello;
      break;
  }
}

std::vector<HelloDesk::Presented> HelloDesk::read(const std::vector<pollfd>& polls, size_t first, StrangerCounts& counts) {
  std::vector<Presented> presented;
  std::deque<Stranger> waiting;
  const auto now = StreamClock::now();
  for (size_t index = 0; index < strangers_.size(); ++index) {
    Stranger& stranger = strangers_[index];
    const State state = polls[first + index].revents != 0 ? read_one(stranger) : State::WAITING;
    if (state == State::COMPLETE) {
      presented.push_back({stranger.fd, *read_hello(stranger.bytes.data()), std::move(stranger.session)});
    } else if (state == State::WAITING && stranger.deadline > now) {
      waiting.push_back(std::move(stranger));
    } else {
      close(stranger.fd);
      count(state, counts);
    }
  }
  strangers_.swap(waiting);
  return presented;
}

}  // namespace kvpool
