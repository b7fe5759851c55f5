// The slot arena recounted from its segments, runs and owner words. See the invariants in slot_arena.h.
#include "kvpool/slot_arena.h"

namespace kvpool {

std::vector<std::string> SlotArena::verify() const {
  std::vector<std::string> broken;
  uint32_t ready = 0;
  uint32_t free = 0;
  std::vector<uint64_t> used(classes_.size());
  std::vector<uint32_t> runs(classes_.size());
  for (uint32_t segment = 0; segment < shape_.segments; ++segment) {
    const Segment& state = segments_[segment];
    ready += state.state != SegmentState::NOT_READY ? 1U : 0U;
    free += state.state == SegmentState::FREE ? 1U : 0U;
    const bool lent = state.state == SegmentState::LENT;
    if (lent != (state.run != NONE)) {
      broken.push_back("segment " + std::to_string(segment) + " is lent without a run, or has one and is not lent");
    } else if (lent && state.run == segment) {
      verify_run(segment, broken);
      used[runs_[segment].size_class.value()] += runs_[segment].used;
      ++runs[runs_[segment].size_class.value()];
    } else if (lent && (state.run > segment || segment >= state.run + runs_[state.run].segments)) {
      broken.push_back("segment " + std::to_string(segment) + " lies outside its run");
    }
  }
  if (ready != ready_segments_ || free != free_segments_) {
    broken.push_back("counts of ready or free segments are wrong");
  }
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    if (used[index] != classes_[index].used || runs[index] != classes_[index].runs) {
      broken.push_back("class " + std::to_string(index) + " miscounts its slots or runs");
    }
    for (uint32_t run = classes_[index].first_run; run != NONE; run = runs_[run].next) {
      --runs[index];
      if (runs_[run].used == runs_[run].slots || runs_[run].size_class != ClassId(index)) {
        broken.push_back("run " + std::to_string(run) + " does not belong in its class's list");
      }
    }
    for (uint32_t run = 0; run < shape_.segments; ++run) {
      const bool full = runs_[run].segments != 0 && runs_[run].used == runs_[run].slots;
      runs[index] -= full && runs_[run].size_class == ClassId(index) ? 1U : 0U;
    }
    if (runs[index] != 0) {
      broken.push_back("class " + std::to_string(index) + " has a run with a free slot outside its list");
    }
  }
  return broken;
}

void SlotArena::verify_run(uint32_t first, std::vector<std::string>& broken) const {
  const Run& run = runs_[first];
  const std::string name = "run " + std::to_string(first);
  uint32_t used = 0;
  for (uint32_t slot = 0; slot < run.fresh; ++slot) {
    used += owner(slot_page(first, slot)).valid() ? 1U : 0U;
  }
  uint32_t free = run.slots - run.fresh;
  for (uint32_t page = run.free_page; page != END_OF_CHAIN && free <= run.slots;
       page = owner_words_[page] & ~FREE_BIT) {
    ++free;
  }
  if (used != run.used || used + free != run.slots) {
    broken.push_back(name + " miscounts its slots");
  }
  if (run.idle > run.used || run.kept > run.used || run.used == 0) {
    broken.push_back(name + " is empty, or has more idle or kept than used slots");
  }
}

}  // namespace kvpool
