// The walk along unsaved chunks. See unsaved_order.h.
#include "directory/unsaved_order.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr auto UNSAVED = static_cast<size_t>(Standing::UNSAVED);

}  // namespace

void UnsavedOrder::start(uint64_t now_ns, WriteOrder order) {
  now_ns_ = now_ns;
  order_ = order;
  next_level_ = 0;
  classes_.clear();
  fronts_.clear();
  for (uint32_t index = 0; order != WriteOrder::COLDEST && index < queues_.classes_.size(); ++index) {
    const auto& of_class = queues_.classes_[index];
    if (order == WriteOrder::WORTHIEST) {
      push_levels(index);
    } else if (of_class.occupied[UNSAVED] != decltype(of_class.occupied[UNSAVED]){}) {
      push(index, of_class.newest_unsaved_ns, RecordId());
    }
  }
}

RecordId UnsavedOrder::next() { return order_ == WriteOrder::COLDEST ? next_coldest() : next_newest(); }

RecordId UnsavedOrder::next_coldest() {
  gather_next_level();
  if (classes_.empty()) {
    return RecordId();
  }
  std::pop_heap(classes_.begin(), classes_.end(), comes_after);
  ClassHeads& of_class = classes_.back();
  const RecordId id = of_class.first.id;
  const auto taken = std::find_if(of_class.heads.begin(), of_class.heads.end(), [id](const Head& head) { return head.id == id; });
  KVPOOL_CHECK(taken != of_class.heads.end());
  if (const RecordId behind = queues_.records_[id].newer; behind.valid()) {
    *taken = head_of(behind);
  } else {
    *taken = of_class.heads.back();
    of_class.heads.pop_back();
  }
  if (of_class.heads.empty()) {
    classes_.pop_back();
  } else {
    choose_first(of_class);
    std::push_heap(classes_.begin(), classes_.end(), comes_after);
  }
  return id;
}

// Where nothing is left: the oldest chunks of all lists of the lowest level that is not done and has any.
void UnsavedOrder::gather_next_level() {
  for (; classes_.empty() && next_level_ < EvictionQueues::LEVELS; ++next_level_) {
    const uint64_t bit = uint64_t{1} << (next_level_ % 64);
    for (uint32_t index = 0; index < queues_.classes_.size(); ++index) {
      if ((queues_.classes_[index].occupied[UNSAVED][next_level_ / 64] & bit) == 0) {
        continue;
      }
      const auto& level = *queues_.classes_[index].levels[next_level_];
      ClassHeads of_class{shares_.lost_part(ClassId(index)), {}, {}};
      for (uint32_t left = level.occupied[UNSAVED]; left != 0; left &= left - 1) {
        of_class.heads.push_back(head_of(level.queues[static_cast<size_t>(std::countr_zero(left))][UNSAVED].oldest));
      }
      choose_first(of_class);
      classes_.push_back(std::move(of_class));
      std::push_heap(classes_.begin(), classes_.end(), comes_after);
    }
  }
}

UnsavedOrder::Head UnsavedOrder::head_of(RecordId id) const noexcept {
  const ChunkRecord& record = queues_.records_[id];
  return {id, queues_.policy_.worth(record.queue, record.last_access_ns, now_ns_), record.last_access_ns};
}

void UnsavedOrder::choose_first(ClassHeads& of_class) noexcept {
  of_class.first = *std::min_element(of_class.heads.begin(), of_class.heads.end(), [](const Head& one, const Head& other) {
    return one.worth != other.worth ? one.worth < other.worth : one.access_ns < other.access_ns;
  });
}

bool UnsavedOrder::comes_after(const ClassHeads& one, const ClassHeads& other) noexcept {
  if (one.lost_part != other.lost_part) {
    return one.lost_part < other.lost_part;
  }
  return one.first.worth != other.first.worth ? one.first.worth > other.first.worth
                                              : one.first.access_ns > other.first.access_ns;
}

RecordId UnsavedOrder::next_newest() {
  while (!fronts_.empty()) {
    std::pop_heap(fronts_.begin(), fronts_.end());
    const Front front = fronts_.back();
    fronts_.pop_back();
    if (front.id.valid()) {
      if (const RecordId behind = queues_.records_[front.id].older; behind.valid()) {
        push(front.size_class, queues_.records_[behind].last_access_ns, behind);
      }
      return front.id;
    }
    if (front.level == EvictionQueues::LEVELS) {
      push_levels(front.size_class);
    } else {
      push_lists(front.size_class, front.level);
    }
  }
  return RecordId();
}

void UnsavedOrder::push(uint32_t size_class, uint64_t access_ns, RecordId id, uint32_t level) {
  const uint32_t of_level = id.valid() ? queues_.records_[id].level : level;
  const double first = order_ == WriteOrder::WORTHIEST ? of_level : shares_.lost_part(ClassId(size_class));
  fronts_.push_back({first, access_ns, id, size_class, level});
  std::push_heap(fronts_.begin(), fronts_.end());
}

// None of the class's levels has anything later than the latest of their times.
void UnsavedOrder::push_levels(uint32_t size_class) {
  auto& of_class = queues_.classes_[size_class];
  of_class.newest_unsaved_ns = 0;
  for (uint32_t word = 0; word < of_class.occupied[UNSAVED].size(); ++word) {
    for (uint64_t left = of_class.occupied[UNSAVED][word]; left != 0; left &= left - 1) {
      const uint32_t number = word * 64 + static_cast<uint32_t>(std::countr_zero(left));
      const uint64_t newest_ns = of_class.levels[number]->newest_unsaved_ns;
      of_class.newest_unsaved_ns = std::max(of_class.newest_unsaved_ns, newest_ns);
      push(size_class, newest_ns, RecordId(), number);
    }
  }
}

void UnsavedOrder::push_lists(uint32_t size_class, uint32_t level) {
  auto& of_level = *queues_.classes_[size_class].levels[level];
  of_level.newest_unsaved_ns = 0;
  for (uint32_t left = of_level.occupied[UNSAVED]; left != 0; left &= left - 1) {
    const RecordId newest = of_level.queues[static_cast<size_t>(std::countr_zero(left))][UNSAVED].newest;
    const uint64_t newest_ns = queues_.records_[newest].last_access_ns;
    of_level.newest_unsaved_ns = std::max(of_level.newest_unsaved_ns, newest_ns);
    push(size_class, newest_ns, newest);
  }
}

}  // namespace kvpool
