// Heaps of idle runs. See idle_runs.h.
#include "records/idle_runs.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {

void IdleRuns::put(Heap& heap, size_t at, IdleRun run) noexcept {
  heap[at] = run;
  positions_[run.run] = static_cast<uint32_t>(at);
}

void IdleRuns::rise(Heap& heap, size_t at) noexcept {
  const IdleRun moved = heap[at];
  while (at > 0 && moved.age < heap[(at - 1) / 2].age) {
    put(heap, at, heap[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  put(heap, at, moved);
}

void IdleRuns::sink(Heap& heap, size_t at) noexcept {
  const IdleRun moved = heap[at];
  for (size_t child = 2 * at + 1; child < heap.size(); child = 2 * at + 1) {
    child += child + 1 < heap.size() && heap[child + 1].age < heap[child].age ? 1U : 0U;
    if (moved.age <= heap[child].age) {
      break;
    }
    put(heap, at, heap[child]);
    at = child;
  }
  put(heap, at, moved);
}

void IdleRuns::add(ClassId size_class, IdleRun run) {
  KVPOOL_CHECK(!has(run.run));
  Heap& heap = heaps_[size_class.value()];
  heap.push_back(run);
  rise(heap, heap.size() - 1);
}

void IdleRuns::remove(ClassId size_class, uint32_t run) noexcept {
  Heap& heap = heaps_[size_class.value()];
  const size_t at = positions_[run];
  KVPOOL_CHECK(at < heap.size());
  KVPOOL_CHECK(heap[at].run == run);
  const IdleRun last = heap.back();
  heap.pop_back();
  positions_[run] = NONE;
  if (last.run != run) {
    put(heap, at, last);
    rise(heap, at);
    sink(heap, positions_[last.run]);
  }
}

void IdleRuns::set_age(ClassId size_class, uint32_t run, RunAge age) noexcept {
  Heap& heap = heaps_[size_class.value()];
  const size_t at = positions_[run];
  KVPOOL_CHECK(at < heap.size());
  KVPOOL_CHECK(heap[at].run == run);
  heap[at].age = age;
  rise(heap, at);
  sink(heap, positions_[run]);
}

bool IdleRuns::verify() const noexcept {
  size_t listed = 0;
  for (const Heap& heap : heaps_) {
    listed += heap.size();
    for (size_t at = 0; at < heap.size(); ++at) {
      if (positions_[heap[at].run] != at || (at > 0 && heap[at].age < heap[(at - 1) / 2].age)) {
        return false;
      }
    }
  }
  const auto absent = std::count(positions_.begin(), positions_.end(), NONE);
  return listed + static_cast<size_t>(absent) == positions_.size();
}

}  // namespace kvpool
