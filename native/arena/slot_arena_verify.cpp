// The slot arena recounted from its segments, runs and owner words. See the invariants in slot_arena.h.
#include "arena/slot_arena.h"

namespace kvpool {

std::vector<std::string> SlotArena::verify() const {
  std::vector<std::string> broken;
  uint32_t ready = 0;
  uint32_t free = 0;
  std::vector<uint64_t> used(classes_.size());
  std::vector<uint64_t> slots(classes_.size());
  std::vector<uint32_t> runs(classes_.size());
  for (uint32_t segment = 0; segment < shape_.segments; ++segment) {
    const Segment& state = segments_[segment];
    ready += state.state != SegmentState::NOT_READY ? 1U : 0U;
    free += state.state == SegmentState::FREE ? 1U : 0U;
    if (free_.is_free(segment) != (state.state == SegmentState::FREE)) {
      broken.push_back("segment " + std::to_string(segment) + " is free and not found as such, or the other way round");
    }
    const bool lent = state.state == SegmentState::LENT;
    if (lent != (state.run != NONE)) {
      broken.push_back("segment " + std::to_string(segment) + " is lent without a run, or has one and is not lent");
    } else if (lent && state.run == segment) {
      verify_run(segment, broken);
      used[runs_[segment].size_class.value()] += runs_[segment].used;
      slots[runs_[segment].size_class.value()] += runs_[segment].slots;
      ++runs[runs_[segment].size_class.value()];
    } else if (lent && (state.run > segment || segment >= state.run + runs_[state.run].segments)) {
      broken.push_back("segment " + std::to_string(segment) + " lies outside its run");
    }
  }
  if (ready != ready_segments_ || free != free_segments_) {
    broken.push_back("counts of ready or free segments are wrong");
  }
  if (!free_.verify() || !idle_runs_.verify()) {
    broken.push_back("free segments or idle runs are out of order");
  }
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    if (used[index] != classes_[index].used || runs[index] != classes_[index].runs || slots[index] != classes_[index].slots) {
      broken.push_back("class " + std::to_string(index) + " miscounts its slots or runs");
    }
    for (const IdleRun& idle : idle_runs_.heap(ClassId(index))) {
      const Run& run = runs_[idle.run];
      if (run.segments == 0 || run.size_class != ClassId(index) || age_of(run) < idle.age) {
        broken.push_back("run " + std::to_string(idle.run) + " is taken for younger than it is, or for another class's");
      }
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
  uint32_t free = 0;
  bool is_hidden = false;
  for (uint32_t slot = 0; slot < run.slots; ++slot) {
    const bool is_free = (run.free[slot / 64] >> (slot % 64) & 1U) != 0;
    used += run.owners[slot].valid() ? 1U : 0U;
    free += is_free && !run.owners[slot].valid() ? 1U : 0U;
    is_hidden = is_hidden || (is_free && slot / 64 < run.free_word);
  }
  if (is_hidden) {
    broken.push_back(name + " has a free slot before those it looks at");
  }
  if (used != run.used || used + free != run.slots) {
    broken.push_back(name + " miscounts its slots");
  }
  const uint64_t end = uint64_t{first} + run.segments;
  if (uint64_t{run.numbers.number} + run.slots > end * shape_.slots_per_segment() ||
      run.numbers.first_checksum + uint64_t{run.slots} * classes_[run.size_class.value()].geometry.extents >
          end * shape_.checksums_per_segment()) {
    broken.push_back(name + " has more slots or extents than words");
  }
  if (run.idle > run.used || run.retained > run.used || run.used == 0) {
    broken.push_back(name + " is empty, or has more idle or retained than used slots");
  }
  if (is_idle(run) && !idle_runs_.has(first)) {
    broken.push_back(name + " is idle and cannot be found by its age");
  }
}

}  // namespace kvpool
