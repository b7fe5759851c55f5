// Levels, queues and the search for a victim. See eviction_queues.h.
#include "eviction/eviction_queues.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {
namespace {

// Entries looked at from where the one before was put, before a place near enough has to do: a guess that bounds the control
// thread's time at some tens of microseconds.
constexpr uint32_t HAND_STEPS = 1024;

[[nodiscard]] constexpr size_t number_of(Standing standing) noexcept { return static_cast<size_t>(standing); }

}  // namespace

EvictionQueues::Level& EvictionQueues::level_of(const ChunkRecord& record) {
  auto& level = classes_[record.size_class.value()].levels[record.level];
  if (level == nullptr) {
    level = std::make_unique<Level>();
  }
  return *level;
}

ChunkList& EvictionQueues::list_of(Level& level, const ChunkRecord& record) const noexcept {
  return level.queues[record.queue][number_of(record.standing)];
}

// The level, queue and standing of each are set, and those of one list; `older` unset: the last one becomes the oldest there.
void EvictionQueues::link_run(Level& level, std::span<const RecordId> run, RecordId older) noexcept {
  const ChunkRecord& record = records_[run.front()];
  SizeClassQueues& queues = classes_[record.size_class.value()];
  const size_t standing = number_of(record.standing);
  ChunkList& list = list_of(level, record);
  const bool was_empty = list.length == 0;
  records_.link_run_behind(list, run, older);
  queues.counts[standing] += run.size();
  if (record.standing == Standing::UNSAVED) {
    uint64_t newest_ns = 0;
    for (const RecordId id : run) {
      newest_ns = std::max(newest_ns, records_[id].last_access_ns);
    }
    level.newest_unsaved_ns = std::max(level.newest_unsaved_ns, newest_ns);
    queues.newest_unsaved_ns = std::max(queues.newest_unsaved_ns, newest_ns);
    unsaved_changes_ += run.size();
  }
  if (was_empty) {
    level.occupied[standing] |= 1U << record.queue;
    queues.occupied[standing][record.level / 64] |= uint64_t{1} << (record.level % 64);
  }
}

void EvictionQueues::add_all(std::span<const RecordId> ids) {
  for (size_t first = ids.size(), end = ids.size(); end > 0; end = first) {
    ChunkRecord& last = records_[ids[--first]];
    last.level = last.priority;
    for (; first > 0; --first) {
      ChunkRecord& next = records_[ids[first - 1]];
      next.level = next.priority;
      if (next.level != last.level || next.queue != last.queue || next.standing != last.standing) {
        break;
      }
    }
    Level& level = level_of(last);
    link_run(level, ids.subspan(first, end - first), list_of(level, last).newest);
  }
}

void EvictionQueues::add_oldest(RecordId id) {
  ChunkRecord& record = records_[id];
  record.level = record.priority;
  link(level_of(record), id, RecordId());
}

void EvictionQueues::add_by_access(RecordId id, uint32_t steps, bool or_oldest) {
  ChunkRecord& record = records_[id];
  record.level = record.priority;
  Level& level = level_of(record);
  ChunkList& list = list_of(level, record);
  std::optional<RecordId> older = place_from_ends(list, id, steps);
  if (!older) {
    older = or_oldest ? RecordId() : place_from_hand(list, record);
  }
  link(level, id, *older);
  list.hand = id;
}

// Behind whom a record belongs by its last access; nothing where that is too far from both ends.
std::optional<RecordId> EvictionQueues::place_from_ends(const ChunkList& list, RecordId id, uint32_t steps) const noexcept {
  const ChunkRecord& record = records_[id];
  RecordId below = list.newest;  // from the newest end down to one that is not newer
  RecordId above = list.oldest;  // from the oldest end up to one that is
  const auto was_used_with = [&](RecordId other) { return other.valid() && has_same_position(other, record); };
  if (was_used_with(record.parent)) {
    return records_[record.parent].older;
  }
  if (was_used_with(record.first_child)) {
    return record.first_child;
  }
  for (uint32_t step = 0; step < steps; ++step) {
    if (!below.valid() || (is_in_order(below) && records_[below].last_access_ns <= record.last_access_ns)) {
      return below;
    }
    if (is_in_order(above) && records_[above].last_access_ns > record.last_access_ns) {
      return records_[above].older;
    }
    below = records_[below].older;
    above = records_[above].newer;
  }
  return std::nullopt;
}

// The same from the list's hand on, or as near as the steps go. What is not in order says nothing about the way.
RecordId EvictionQueues::place_from_hand(const ChunkList& list, const ChunkRecord& record) const noexcept {
  const auto is_newer = [&](RecordId id) { return records_[id].last_access_ns > record.last_access_ns; };
  RecordId at = list.hand.valid() ? list.hand : list.newest;
  uint32_t steps = HAND_STEPS;
  for (; at.valid() && (!is_in_order(at) || is_newer(at)) && steps > 0; --steps) {
    at = records_[at].older;
  }
  if (!at.valid() || !is_in_order(at) || is_newer(at)) {
    return at;
  }
  for (; steps > 0; --steps) {
    const RecordId next = records_[at].newer;
    if (!next.valid() || (is_in_order(next) && is_newer(next))) {
      break;
    }
    at = next;
  }
  return at;
}

void EvictionQueues::remove_all(std::span<const RecordId> ids) noexcept {
  for (size_t first = 0, end = 0; first < ids.size(); first = end) {
    end = first + 1;
    ChunkRecord& record = records_[ids[first]];
    if (record.is_aside) {
      record.is_aside = false;
      continue;
    }
    while (end < ids.size() && records_[ids[end - 1]].older == ids[end]) {
      ++end;
    }
    unlink_run(ids.subspan(first, end - first));
  }
}

void EvictionQueues::unlink_run(std::span<const RecordId> run) noexcept {
  const ChunkRecord& record = records_[run.front()];
  const size_t standing = number_of(record.standing);
  SizeClassQueues& queues = classes_[record.size_class.value()];
  Level& level = *queues.levels[record.level];
  ChunkList& list = list_of(level, record);
  records_.unlink_run(list, run);
  queues.counts[standing] -= run.size();
  unsaved_changes_ += record.standing == Standing::UNSAVED ? run.size() : 0;
  if (list.length == 0) {
    level.occupied[standing] &= ~(1U << record.queue);
    if (level.occupied[standing] == 0) {
      queues.occupied[standing][record.level / 64] &= ~(uint64_t{1} << (record.level % 64));
    }
  }
}

EvictionQueues::Place EvictionQueues::take_out(RecordId id) noexcept {
  const Place place{records_[id].older, records_[id].is_aside};
  remove(id);
  return place;
}

void EvictionQueues::put_back(RecordId id, Place place) noexcept {
  ChunkRecord& record = records_[id];
  record.is_aside = place.is_aside;
  if (place.is_aside) {
    return;
  }
  const bool is_there = place.older.valid() && stands(place.older) && names_list_of(place.older, record);
  link(level_of(record), id, is_there ? place.older : RecordId());
}

// The lowest level from `first` on that somebody stands on; LEVELS where there is none.
uint32_t EvictionQueues::next_level(ClassId size_class, Among among, uint32_t first) const noexcept {
  const SizeClassQueues& queues = classes_[size_class.value()];
  uint64_t mask = UINT64_MAX << (first % 64);
  for (uint32_t word = first / 64; word < queues.occupied[0].size(); ++word) {
    uint64_t occupied = queues.occupied[number_of(Standing::SAVED)][word];
    occupied |= among == Among::ALL ? queues.occupied[number_of(Standing::UNSAVED)][word] : 0;
    if ((occupied & mask) != 0) {
      return word * 64 + static_cast<uint32_t>(std::countr_zero(occupied & mask));
    }
    mask = UINT64_MAX;
  }
  return LEVELS;
}

// Of a queue, the oldest chunk without a pin.
RecordId EvictionQueues::oldest_of(const Level& level, uint32_t queue, Among among) const noexcept {
  const auto first_free = [&](Standing standing) {
    RecordId id = level.queues[queue][number_of(standing)].oldest;
    while (id.valid() && records_[id].pins > 0) {
      id = records_[id].newer;
    }
    return id;
  };
  const RecordId saved = first_free(Standing::SAVED);
  const RecordId unsaved = among == Among::ALL ? first_free(Standing::UNSAVED) : RecordId();
  if (!saved.valid() || !unsaved.valid()) {
    return saved.valid() ? saved : unsaved;
  }
  return records_[unsaved].last_access_ns < records_[saved].last_access_ns ? unsaved : saved;
}

RecordId EvictionQueues::cheapest(const Level& level, uint64_t now_ns, Among among) const noexcept {
  uint32_t occupied = level.occupied[number_of(Standing::SAVED)];
  occupied |= among == Among::ALL ? level.occupied[number_of(Standing::UNSAVED)] : 0;
  if (std::has_single_bit(occupied)) {
    return oldest_of(level, static_cast<uint32_t>(std::countr_zero(occupied)), among);
  }
  RecordId best;
  double lowest_worth = 0;
  for (uint32_t left = occupied; left != 0; left &= left - 1) {
    const auto queue = static_cast<uint8_t>(std::countr_zero(left));
    const RecordId oldest = oldest_of(level, queue, among);
    if (!oldest.valid()) {
      continue;
    }
    const double worth = policy_.worth(queue, records_[oldest].last_access_ns, now_ns);
    if (!best.valid() || worth < lowest_worth ||
        (worth == lowest_worth && records_[oldest].last_access_ns < records_[best].last_access_ns)) {
      best = oldest;
      lowest_worth = worth;
    }
  }
  return best;
}

RecordId EvictionQueues::victim(ClassId size_class, uint64_t now_ns, Among among) noexcept {
  uint32_t number = next_level(size_class, among, 0);
  while (number < LEVELS) {
    const RecordId id = cheapest(*classes_[size_class.value()].levels[number], now_ns, among);
    if (id.valid() && !records_[id].first_child.valid()) {
      return id;
    }
    if (id.valid()) {
      move_beside_child(id);
    }
    number = next_level(size_class, among, id.valid() ? 0 : number + 1);  // without anybody: all there have pins
  }
  return RecordId();
}

// And with it what follows in its queue with its last use, from the last of these on: moved one by one past each other, a chain
// of n would take n * n moves.
void EvictionQueues::move_beside_child(RecordId id) {
  RecordId child = records_[id].first_child;
  while (is_in_order(id) && records_[child].first_child.valid() && has_same_position(child, records_[id])) {
    child = records_[child].first_child;
  }
  for (RecordId moved; moved != id; child = moved) {
    moved = records_[child].parent;
    remove(moved);
    ChunkRecord& record = records_[moved];
    record.is_aside = !can_stand_beside(moved, child);
    record.queue = records_[child].queue;
    if (!record.is_aside) {
      record.level = records_[child].level;
      link(level_of(record), moved, child);
    }
  }
}

// Whether a search that comes to the chunk there has come past the child, and may have taken it. A child that was used later than
// its parent will be so again: each time the parent would have to follow.
bool EvictionQueues::can_stand_beside(RecordId id, RecordId child) const noexcept {
  return records_[child].standing == records_[id].standing && records_[child].pins == 0 &&
         records_[child].last_access_ns <= records_[id].last_access_ns && stands(child);
}

// Whether a chunk stands by its own last use: what was moved from another level stands where its child was.
bool EvictionQueues::is_in_order(RecordId id) const noexcept { return records_[id].level == records_[id].priority; }

// Whether a chunk is in the list that it names.
bool EvictionQueues::stands(RecordId id) const noexcept {
  const ChunkRecord& record = records_[id];
  const Level* level = classes_[record.size_class.value()].levels[record.level].get();
  return record.older.valid() || record.newer.valid() ||
         (level != nullptr && level->queues[record.queue][number_of(record.standing)].oldest == id);
}

bool EvictionQueues::has_same_position(RecordId id, const ChunkRecord& other) const noexcept {
  return is_in_order(id) && names_list_of(id, other) && records_[id].last_access_ns == other.last_access_ns && stands(id);
}

bool EvictionQueues::names_list_of(RecordId id, const ChunkRecord& other) const noexcept {
  const ChunkRecord& record = records_[id];
  return record.size_class == other.size_class && record.level == other.level && record.queue == other.queue &&
         record.standing == other.standing;
}

// Worth is uses per time whatever the size: a use saves about what the chunk's bytes took to compute.
bool EvictionQueues::is_colder(const ChunkRecord& record, const ChunkRecord& other, uint64_t now_ns) const noexcept {
  if (record.level != other.level) {
    return record.level < other.level;
  }
  const double worth = policy_.worth(record.queue, record.last_access_ns, now_ns);
  const double other_worth = policy_.worth(other.queue, other.last_access_ns, now_ns);
  return worth != other_worth ? worth < other_worth : record.last_access_ns < other.last_access_ns;
}

RecordId EvictionQueues::victim(uint64_t now_ns, Among among) noexcept {
  RecordId best;
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    const RecordId found = victim(ClassId(index), now_ns, among);
    if (!found.valid() || !best.valid()) {
      best = found.valid() ? found : best;
      continue;
    }
    if (is_colder(records_[found], records_[best], now_ns)) {
      best = found;
    }
  }
  return best;
}

std::vector<std::string> EvictionQueues::verify(std::vector<uint8_t>& found) const {
  std::vector<std::string> broken;
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    for (uint32_t number = 0; number < LEVELS * STANDINGS; ++number) {
      ChunkRecord expected;
      expected.size_class = ClassId(index);
      expected.level = static_cast<uint8_t>(number / STANDINGS);
      expected.standing = static_cast<Standing>(number % STANDINGS);
      verify_level(classes_[index], expected, found, broken);
    }
    for (size_t standing = 0; standing < STANDINGS; ++standing) {
      uint64_t length = 0;
      for (uint32_t number = 0; number < LEVELS * EvictionPolicy::QUEUES; ++number) {
        const Level* level = classes_[index].levels[number / EvictionPolicy::QUEUES].get();
        length += level == nullptr ? 0 : level->queues[number % EvictionPolicy::QUEUES][standing].length;
      }
      if (length != classes_[index].counts[standing]) {
        broken.push_back("the lists of standing " + std::to_string(standing) + " are miscounted");
      }
    }
  }
  return broken;
}

void EvictionQueues::verify_level(const SizeClassQueues& queues, const ChunkRecord& expected, std::vector<uint8_t>& found,
                                  std::vector<std::string>& broken) const {
  const size_t standing = number_of(expected.standing);
  const Level* level = queues.levels[expected.level].get();
  const bool has_bit = (queues.occupied[standing][expected.level / 64] >> (expected.level % 64) & 1U) != 0;
  if (has_bit != (level != nullptr && level->occupied[standing] != 0)) {
    broken.push_back("level " + std::to_string(expected.level) + " is empty and marked, or neither");
  }
  for (uint8_t queue = 0; level != nullptr && queue < EvictionPolicy::QUEUES; ++queue) {
    ChunkRecord standing_here = expected;
    standing_here.queue = queue;
    verify_list(level->queues[queue][standing], standing_here, found, broken);
    if ((level->queues[queue][standing].length != 0) != ((level->occupied[standing] >> queue & 1U) != 0)) {
      broken.push_back("queue " + std::to_string(queue) + " is empty and marked, or neither");
    }
  }
}

void EvictionQueues::verify_list(const ChunkList& list, const ChunkRecord& expected, std::vector<uint8_t>& found,
                                 std::vector<std::string>& broken) const {
  uint64_t length = 0;
  bool has_hand = !list.hand.valid();
  for (RecordId id = list.oldest; id.valid() && length <= records_.alive(); id = records_[id].newer) {
    const ChunkRecord& record = records_[id];
    ++length;
    ++found[id.value()];
    has_hand = has_hand || id == list.hand;
    if (record.size_class != expected.size_class || record.level != expected.level || record.queue != expected.queue ||
        record.standing != expected.standing || record.is_aside) {
      broken.push_back("chunk record " + std::to_string(id.value()) + " does not name the list it stands in");
    }
  }
  if (length != list.length || !has_hand) {
    broken.push_back("a queue of level " + std::to_string(expected.level) +
                     " miscounts itself, runs in a circle or has lost its hand");
  }
}

}  // namespace kvpool
