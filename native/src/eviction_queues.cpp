// Levels, queues and the search for a victim. See eviction_queues.h.
#include "kvpool/eviction_queues.h"

#include <bit>

#include "kvpool/check.h"

namespace kvpool {

EvictionQueues::Level& EvictionQueues::level_of(const ChunkRecord& record) {
  auto& level = classes_[record.size_class.value()].levels[record.level];
  if (level == nullptr) {
    level = std::make_unique<Level>();
  }
  return *level;
}

// The record's level and queue are set; `older` unset: it becomes the oldest there.
void EvictionQueues::link(RecordId id, RecordId older) {
  const ChunkRecord& record = records_[id];
  link(level_of(record), record, id, older);
}

void EvictionQueues::link(Level& level, const ChunkRecord& record, RecordId id, RecordId older) noexcept {
  ChunkList& list = level.queues[record.queue];
  records_.link_behind(list, id, older);
  if (list.length == 1) {
    level.occupied |= 1U << record.queue;
    classes_[record.size_class.value()].occupied[record.level / 64] |= uint64_t{1} << (record.level % 64);
  }
}

void EvictionQueues::add(RecordId id) {
  ChunkRecord& record = records_[id];
  record.level = record.priority;
  Level& level = level_of(record);
  link(level, record, id, level.queues[record.queue].newest);
}

void EvictionQueues::add_by_access(RecordId id, uint32_t steps, bool or_oldest) {
  ChunkRecord& record = records_[id];
  record.level = record.priority;
  const ChunkList& list = level_of(record).queues[record.queue];
  RecordId below = list.newest;  // from the newest end down to one that is not newer
  RecordId above = list.oldest;  // from the oldest end up to one that is
  const auto was_used_with = [&](RecordId other) { return other.valid() && stands_alike(other, record); };
  if (was_used_with(record.parent)) {
    return link(id, records_[record.parent].older);
  }
  if (was_used_with(record.first_child)) {
    return link(id, record.first_child);
  }
  for (uint32_t step = 0; step < steps; ++step) {
    if (!below.valid() || (is_in_order(below) && records_[below].last_access_ns <= record.last_access_ns)) {
      return link(id, below);
    }
    if (is_in_order(above) && records_[above].last_access_ns > record.last_access_ns) {
      return link(id, records_[above].older);
    }
    below = records_[below].older;
    above = records_[above].newer;
  }
  if (or_oldest) {
    return link(id, RecordId());
  }
  record.last_access_ns = records_[list.newest].last_access_ns;
  link(id, list.newest);
}

void EvictionQueues::remove(RecordId id) noexcept {
  const ChunkRecord& record = records_[id];
  SizeClassQueues& queues = classes_[record.size_class.value()];
  Level& level = *queues.levels[record.level];
  ChunkList& list = level.queues[record.queue];
  records_.unlink(list, id);
  if (list.length == 0) {
    level.occupied &= ~(1U << record.queue);
    if (level.occupied == 0) {
      queues.occupied[record.level / 64] &= ~(uint64_t{1} << (record.level % 64));
    }
  }
}

const EvictionQueues::Level* EvictionQueues::lowest(ClassId size_class) const noexcept {
  const SizeClassQueues& queues = classes_[size_class.value()];
  for (size_t word = 0; word < queues.occupied.size(); ++word) {
    if (queues.occupied[word] != 0) {
      return queues.levels[word * 64 + static_cast<size_t>(std::countr_zero(queues.occupied[word]))].get();
    }
  }
  return nullptr;
}

RecordId EvictionQueues::cheapest(const Level& level, uint64_t now_ns) const noexcept {
  if (std::has_single_bit(level.occupied)) {
    return level.queues[static_cast<size_t>(std::countr_zero(level.occupied))].oldest;
  }
  RecordId best;
  double lowest_worth = 0;
  for (uint32_t left = level.occupied; left != 0; left &= left - 1) {
    const auto queue = static_cast<uint8_t>(std::countr_zero(left));
    const RecordId oldest = level.queues[queue].oldest;
    const double worth = policy_.worth(queue, records_[oldest].last_access_ns, now_ns);
    if (!best.valid() || worth < lowest_worth ||
        (worth == lowest_worth && records_[oldest].last_access_ns < records_[best].last_access_ns)) {
      best = oldest;
      lowest_worth = worth;
    }
  }
  return best;
}

RecordId EvictionQueues::victim(ClassId size_class, uint64_t now_ns) noexcept {
  while (const Level* level = lowest(size_class)) {
    const RecordId id = cheapest(*level, now_ns);
    if (!records_[id].first_child.valid()) {
      return id;
    }
    move_beside_child(id);
  }
  return RecordId();
}

// And with it what follows in its queue with its last use, from the last of these on: moved one by one past each other, a chain
// of n would take n * n moves.
void EvictionQueues::move_beside_child(RecordId id) {
  RecordId child = records_[id].first_child;
  while (is_in_order(id) && records_[child].first_child.valid() && stands_alike(child, records_[id])) {
    child = records_[child].first_child;
  }
  for (RecordId moved; moved != id; child = moved) {
    moved = records_[child].parent;
    remove(moved);
    records_[moved].level = records_[child].level;
    records_[moved].queue = records_[child].queue;
    link(moved, child);
  }
}

// Whether a chunk stands by its own last use: what was moved from another level stands where its child was.
bool EvictionQueues::is_in_order(RecordId id) const noexcept { return records_[id].level == records_[id].priority; }

bool EvictionQueues::stands_alike(RecordId id, const ChunkRecord& other) const noexcept {
  const ChunkRecord& record = records_[id];
  if (!is_in_order(id) || record.size_class != other.size_class || record.level != other.level || record.queue != other.queue ||
      record.last_access_ns != other.last_access_ns) {
    return false;
  }
  const Level* level = classes_[record.size_class.value()].levels[record.level].get();
  return record.older.valid() || record.newer.valid() || (level != nullptr && level->queues[record.queue].oldest == id);
}

RecordId EvictionQueues::victim(uint64_t now_ns) noexcept {
  RecordId best;
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    const RecordId found = victim(ClassId(index), now_ns);
    if (!found.valid() || !best.valid()) {
      best = found.valid() ? found : best;
      continue;
    }
    const ChunkRecord& candidate = records_[found];
    const ChunkRecord& other = records_[best];
    if (candidate.level != other.level
            ? candidate.level < other.level
            : policy_.worth(candidate.queue, candidate.last_access_ns, now_ns) <
                  policy_.worth(other.queue, other.last_access_ns, now_ns)) {
      best = found;
    }
  }
  return best;
}

std::vector<RecordId> EvictionQueues::fronts_of(ClassId size_class, bool newest_first) const {
  std::vector<RecordId> fronts;
  for (const auto& level : classes_[size_class.value()].levels) {
    for (uint32_t left = level == nullptr ? 0 : level->occupied; left != 0; left &= left - 1) {
      const ChunkList& list = level->queues[static_cast<size_t>(std::countr_zero(left))];
      fronts.push_back(newest_first ? list.newest : list.oldest);
    }
  }
  return fronts;
}

size_t EvictionQueues::first_of(const std::vector<RecordId>& fronts, uint64_t now_ns,
                                bool newest_first) const noexcept {
  size_t first = 0;
  for (size_t index = 1; index < fronts.size(); ++index) {
    const ChunkRecord& record = records_[fronts[index]];
    const ChunkRecord& best = records_[fronts[first]];
    const bool is_before =
        newest_first ? record.last_access_ns > best.last_access_ns
        : record.level != best.level
            ? record.level < best.level
            : policy_.worth(record.queue, record.last_access_ns, now_ns) <
                  policy_.worth(best.queue, best.last_access_ns, now_ns);
    first = is_before ? index : first;
  }
  return first;
}

uint64_t EvictionQueues::listed(ClassId size_class) const noexcept {
  uint64_t count = 0;
  for (const auto& level : classes_[size_class.value()].levels) {
    for (uint32_t left = level == nullptr ? 0 : level->occupied; left != 0; left &= left - 1) {
      count += level->queues[static_cast<size_t>(std::countr_zero(left))].length;
    }
  }
  return count;
}

std::vector<std::string> EvictionQueues::verify(std::vector<uint8_t>& found) const {
  std::vector<std::string> broken;
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    for (uint32_t number = 0; number < LEVELS; ++number) {
      const Level* level = classes_[index].levels[number].get();
      const bool has_bit = (classes_[index].occupied[number / 64] >> (number % 64) & 1U) != 0;
      if (has_bit != (level != nullptr && level->occupied != 0)) {
        broken.push_back("level " + std::to_string(number) + " is empty and marked, or neither");
      }
      for (uint32_t queue = 0; level != nullptr && queue < EvictionPolicy::QUEUES; ++queue) {
        ChunkRecord expected;
        expected.size_class = ClassId(index);
        expected.level = static_cast<uint8_t>(number);
        expected.queue = static_cast<uint8_t>(queue);
        verify_queue(level->queues[queue], expected, found, broken);
        if ((level->queues[queue].length != 0) != ((level->occupied >> queue & 1U) != 0)) {
          broken.push_back("queue " + std::to_string(queue) + " is empty and marked, or neither");
        }
      }
    }
  }
  return broken;
}

void EvictionQueues::verify_queue(const ChunkList& list, const ChunkRecord& expected, std::vector<uint8_t>& found,
                                  std::vector<std::string>& broken) const {
  uint64_t length = 0;
  for (RecordId id = list.oldest; id.valid() && length <= records_.alive(); id = records_[id].newer) {
    const ChunkRecord& record = records_[id];
    ++length;
    ++found[id.value()];
    if (record.size_class != expected.size_class || record.level != expected.level || record.queue != expected.queue) {
      broken.push_back("chunk record " + std::to_string(id.value()) + " does not name the queue it stands in");
    }
  }
  if (length != list.length) {
    broken.push_back("a queue of level " + std::to_string(expected.level) + " miscounts itself or runs in a circle");
  }
}

}  // namespace kvpool
