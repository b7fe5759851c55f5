// Windows of segments that a class can take from other classes, found without a look at every segment. See slot_arena.h.
#include <algorithm>
#include <limits>
#include <queue>

#include "base/check.h"
#include "arena/slot_arena.h"

namespace kvpool {
namespace {

// Of the runs that may be idle, the coldest so many are looked at, and the keys of so many are corrected, in one search: guesses
// that bound it at some ten microseconds. A window of single runs, which most are, is the coldest after one look.
constexpr uint32_t RUNS_MAX = 64;
constexpr uint32_t REFRESHED_MAX = 64;
// Segments looked at in one search around the coldest runs, and by the search for any window.
constexpr uint32_t SEGMENTS_MAX = 2048;
constexpr uint32_t HAND_STEPS = 1024;

// An entry of a class's heap that may be next.
struct Front {
  IdleRun idle;
  uint32_t size_class;
  size_t at;
  bool operator<(const Front& other) const noexcept { return other.idle.age < idle.age; }
};

}  // namespace

std::optional<SegmentWindow> SlotArena::coldest_window(ClassId size_class) noexcept {
  const SizeClass& geometry = classes_[size_class.value()].geometry;
  auto window = coldest_window(size_class, geometry.run_segments);
  if (!window && geometry.min_segments < geometry.run_segments) {
    window = coldest_window(size_class, geometry.min_segments);
  }
  return window;
}

// Takes runs in the order of their keys. No window around a run is older than the run's key, so the search is over when the best
// one found is not younger than the next key.
std::optional<SegmentWindow> SlotArena::coldest_window(ClassId size_class, uint32_t count) noexcept {
  if (const auto first = free_.first_window(count)) {
    return window_at(size_class, *first, count);
  }
  std::priority_queue<Front> fronts;
  const auto add_front = [&](uint32_t of_class, size_t at) {
    const auto& heap = idle_runs_.heap(ClassId(of_class));
    if (at < heap.size()) {
      fronts.push({heap[at], of_class, at});
    }
  };
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    if (ClassId(index) != size_class) {
      refresh_idle_runs(ClassId(index));
      add_front(index, 0);
    }
  }
  std::optional<SegmentWindow> best;
  RunAge best_age(std::numeric_limits<uint64_t>::max(), true);
  for (uint32_t looks = std::max(1U, std::min(RUNS_MAX, SEGMENTS_MAX / count)); looks > 0 && !fronts.empty(); --looks) {
    const Front front = fronts.top();
    if (best && front.idle.age >= best_age) {
      return best;
    }
    fronts.pop();
    add_front(front.size_class, 2 * front.at + 1);
    add_front(front.size_class, 2 * front.at + 2);
    const auto window = window_around(size_class, front.idle.run, count);
    if (window && RunAge(window->newest_ns, window->is_retained) < best_age) {
      best = window;
      best_age = RunAge(window->newest_ns, window->is_retained);
    }
  }
  return best ? best : window_near_hand(size_class, count);
}

// Until the key of the first run of a heap is right: runs in use leave the heap, runs that were used since sink.
void SlotArena::refresh_idle_runs(ClassId size_class) noexcept {
  const auto& heap = idle_runs_.heap(size_class);
  for (uint32_t step = 0; step < REFRESHED_MAX && !heap.empty(); ++step) {
    const IdleRun first = heap.front();
    const Run& run = runs_[first.run];
    if (!is_idle(run)) {
      idle_runs_.remove(size_class, first.run);
    } else if (age_of(run) != first.age) {
      idle_runs_.set_age(size_class, first.run, age_of(run));
    } else {
      return;
    }
  }
}

// The age of what would be cleared with a segment, for the sake of a class; nothing where it cannot be.
std::optional<RunAge> SlotArena::clearing_age(ClassId size_class, uint32_t segment) const noexcept {
  if (segments_[segment].state == SegmentState::FREE) {
    return RunAge();
  }
  if (segments_[segment].state == SegmentState::NOT_READY) {
    return std::nullopt;
  }
  const Run& run = runs_[segments_[segment].run];
  return run.size_class == size_class || !is_idle(run) ? std::nullopt : std::optional(age_of(run));
}

// The coldest window that contains a run, or lies in it: grown to the side of the colder neighbour.
std::optional<SegmentWindow> SlotArena::window_around(ClassId size_class, uint32_t run, uint32_t count) const noexcept {
  if (!clearing_age(size_class, run)) {
    return std::nullopt;
  }
  uint32_t first = run;
  uint32_t end = run + runs_[run].segments;
  while (end - first < count) {
    const auto before = first > 0 ? clearing_age(size_class, first - 1) : std::nullopt;
    const auto behind = end < shape_.segments ? clearing_age(size_class, end) : std::nullopt;
    if (!before && !behind) {
      return std::nullopt;
    }
    const bool goes_back = before && (!behind || *before < *behind);
    first -= goes_back ? 1U : 0U;
    end += goes_back ? 0U : 1U;
  }
  return window_at(size_class, first, count);
}

// The first window from the hand on, of any age. The hand goes on around the arena with each call.
std::optional<SegmentWindow> SlotArena::window_near_hand(ClassId size_class, uint32_t count) noexcept {
  const uint32_t steps = std::min(shape_.segments, HAND_STEPS + count);
  uint32_t length = 0;
  for (uint32_t step = 0; step < steps; ++step) {
    const uint32_t segment = (hand_ + step) % shape_.segments;
    length = segment == 0 ? 0 : length;
    length = clearing_age(size_class, segment) ? length + 1 : 0;
    if (length == count) {
      return window_at(size_class, segment + 1 - count, count);
    }
  }
  hand_ = (hand_ + std::min(shape_.segments, HAND_STEPS)) % shape_.segments;
  return std::nullopt;
}

bool SlotArena::is_clearable(ClassId size_class, const SegmentWindow& window) const noexcept {
  const auto now = window_at(size_class, window.first, window.count);
  return now && now->is_retained == window.is_retained;
}

std::optional<SegmentWindow> SlotArena::window_at(ClassId size_class, uint32_t first, uint32_t count) const noexcept {
  SegmentWindow window{first, count, 0};
  for (uint32_t segment = first; segment < first + count; ++segment) {
    const auto age = clearing_age(size_class, segment);
    if (!age) {
      return std::nullopt;
    }
    window.newest_ns = std::max(window.newest_ns, age->newest_ns());
    window.is_retained = window.is_retained || age->is_retained();
  }
  return window;
}

std::vector<RecordId> SlotArena::owners_in(const SegmentWindow& window) const {
  std::vector<RecordId> owners;
  uint32_t previous = NONE;
  for (uint32_t segment = window.first; segment < window.first + window.count; ++segment) {
    const uint32_t first = segments_[segment].run;
    if (first == NONE || first == previous) {
      continue;
    }
    previous = first;
    for (uint32_t slot = 0; slot < runs_[first].slots; ++slot) {
      if (runs_[first].owners[slot].valid()) {
        owners.push_back(runs_[first].owners[slot]);
      }
    }
  }
  return owners;
}

}  // namespace kvpool
