// A line of tasks for a few threads in which no peer takes more than its share of them.
//
// What it is: the oldest task whose peer has a thread left to it goes first, so that a peer that stalls delays its own tasks alone.
// What it is not: threads, or a lock: its owner has both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace kvpool {

template <typename Peer, typename Task>
class PeerLine {
 public:
  explicit PeerLine(size_t threads) : running_max_(std::max<size_t>(1, threads / 2)) {}

  void add(Peer peer, Task task) { waiting_.emplace_back(std::move(peer), std::move(task)); }

  // The next task, which runs from now on until `end` is called for its peer; nothing where all that wait have to wait.
  [[nodiscard]] std::optional<std::pair<Peer, Task>> next() {
    const auto found = std::find_if(waiting_.begin(), waiting_.end(), [this](const auto& entry) {
      const auto running = running_.find(entry.first);
      return running == running_.end() || running->second < running_max_;
    });
    if (found == waiting_.end()) {
      return std::nullopt;
    }
    auto taken = std::move(*found);
    waiting_.erase(found);
    ++running_[taken.first];
    return taken;
  }
  void end(const Peer& peer) {
    if (--running_[peer] == 0) {
      running_.erase(peer);
    }
  }

  // Takes the waiting tasks out for which `is_wanted` is true.
  template <typename Wanted>
  [[nodiscard]] std::vector<Task> take(Wanted is_wanted) {
    std::vector<Task> taken;
    std::deque<std::pair<Peer, Task>> kept;
    for (auto& entry : waiting_) {
      if (is_wanted(std::as_const(entry.second))) {
        taken.push_back(std::move(entry.second));
      } else {
        kept.push_back(std::move(entry));
      }
    }
    waiting_.swap(kept);
    return taken;
  }
  template <typename Visit>
  void each(Visit visit) const {
    for (const auto& entry : waiting_) {
      visit(entry.second);
    }
  }

  [[nodiscard]] size_t waiting() const noexcept { return waiting_.size(); }

 private:
  const size_t running_max_;
  std::deque<std::pair<Peer, Task>> waiting_;
  std::map<Peer, size_t> running_;
};

}  // namespace kvpool
