// How many of a few threads each peer has, so that one that stalls delays its own tasks alone.
//
// What it is: a count for each peer with threads. What it is not: a line, threads, or a lock: its owner has all three.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>

namespace kvpool {

template <typename Peer>
class PeerShares {
 public:
  // One peer takes at most half of the threads.
  explicit PeerShares(size_t threads) : running_max_(std::max<size_t>(1, threads / 2)) {}

  // True where a thread is left to the peer, which it has from now on until `end`.
  [[nodiscard]] bool begin(const Peer& peer) {
    size_t& running = running_[peer];
    const bool begins = running < running_max_;
    running += begins ? 1U : 0U;
    return begins;
  }
  void end(const Peer& peer) {
    if (--running_.at(peer) == 0) {
      running_.erase(peer);
    }
  }

 private:
  const size_t running_max_;
  std::map<Peer, size_t> running_;
};

}  // namespace kvpool
