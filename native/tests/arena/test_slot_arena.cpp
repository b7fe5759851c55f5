// Segments, runs and slots, against a set of intervals.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>

#include "tests/harness.h"
#include "arena/slot_arena.h"

using namespace kvpool;

namespace {

constexpr uint64_t SEGMENT = 16 * PAGE_BYTES;

void make_ready(SlotArena& arena) {
  for (uint32_t segment = 0; segment < arena.shape().segments; ++segment) {
    arena.mark_ready(segment);
  }
}

// The newest use of a window of slots of one segment each, by their last uses (0: busy); nothing where one is busy.
std::optional<uint64_t> age_of_window(const std::vector<uint64_t>& uses, size_t first, size_t count) {
  const auto from = uses.begin() + static_cast<std::ptrdiff_t>(first);
  const auto to = from + static_cast<std::ptrdiff_t>(count);
  return std::count(from, to, 0U) > 0 ? std::nullopt : std::optional(*std::max_element(from, to));
}

std::optional<uint64_t> age_of_coldest(const std::vector<uint64_t>& uses, size_t count) {
  std::optional<uint64_t> coldest;
  for (size_t first = 0; first + count <= uses.size(); ++first) {
    const auto age = age_of_window(uses, first, count);
    coldest = age && (!coldest || *age < *coldest) ? age : coldest;
  }
  return coldest;
}

// Seconds for a search for room in an arena of so many segments that is full of another class, all of it idle; the quickest of
// some. A chunk is used between two searches.
double search_seconds(uint32_t segments) {
  SlotArena arena({SEGMENT, segments});
  make_ready(arena);
  const ClassId small = *arena.add_class(SEGMENT, 1);
  const ClassId large = *arena.add_class(2 * SEGMENT, 1);
  std::vector<PageIndex> pages;
  for (uint32_t record = 0; record < segments; ++record) {
    pages.push_back(*arena.allocate(small, RecordId(record)));
    arena.set_idle(pages.back(), record + 1);
  }
  double quickest = 1e9;
  for (uint32_t step = 0; step < 50; ++step) {
    arena.set_busy(pages[step * 7 % segments]);
    arena.set_idle(pages[step * 7 % segments], segments + step);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT(!arena.can_allocate(large));
    EXPECT(arena.coldest_window(large).has_value());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    quickest = std::min(quickest, taken.count());
  }
  return quickest;
}

}  // namespace

TEST(class_geometry_follows_the_bytes_and_the_extents) {
  SlotArena arena({SEGMENT, 10});
  const auto& small = arena.size_class(*arena.add_class(PAGE_BYTES + 1, 4));
  EXPECT(small.slot_bytes == 2 * PAGE_BYTES);
  EXPECT(small.run_segments == 1);
  const auto& deep = arena.size_class(*arena.add_class(100, 33));
  EXPECT(deep.slot_bytes == 9 * PAGE_BYTES);  // 33 checksum words need nine pages
  const auto& odd = arena.size_class(*arena.add_class(7 * PAGE_BYTES, 1));
  EXPECT(odd.run_segments == 1);  // a rest of 2 pages of 16 is allowed
  const auto& wide = arena.size_class(*arena.add_class(3 * SEGMENT + 1, 1));
  EXPECT(wide.min_segments == 4);
  EXPECT(wide.run_segments == 7);  // 2 slots of 49 pages leave 14 of 112, just 1/8
  const auto known = arena.add_class(3 * SEGMENT + 1, 1);
  EXPECT(known.has_value());
  EXPECT(arena.class_count() == 4);
  EXPECT(!arena.add_class(10 * SEGMENT + 1, 1));
  EXPECT(!arena.add_class(0, 1));
  EXPECT(!arena.add_class(1, 0));
}

TEST(only_ready_segments_are_handed_out) {
  SlotArena arena({SEGMENT, 4});
  const ClassId two = *arena.add_class(2 * SEGMENT, 1);
  EXPECT(!arena.allocate(two, RecordId(0)));
  arena.mark_ready(0);
  arena.mark_ready(2);
  EXPECT(!arena.can_allocate(two));
  arena.mark_ready(3);
  arena.mark_ready(3);
  EXPECT(arena.is_behind());
  EXPECT(arena.allocate(two, RecordId(5)) == PageIndex(32));
  EXPECT(arena.owner(PageIndex(32)) == RecordId(5));
  EXPECT(!arena.owner(PageIndex(0)).valid());
  EXPECT(arena.verify().empty());
}

TEST(window_of_other_classes_is_found_by_age_and_cleared_whole) {
  SlotArena arena({SEGMENT, 4});
  make_ready(arena);
  const ClassId small = *arena.add_class(8 * PAGE_BYTES, 1);
  const ClassId large = *arena.add_class(2 * SEGMENT, 1);
  std::vector<PageIndex> pages;
  for (uint32_t record = 0; record < 8; ++record) {
    pages.push_back(*arena.allocate(small, RecordId(record)));
  }
  EXPECT(!arena.can_allocate(large));
  EXPECT(!arena.coldest_window(large));  // all busy
  for (uint32_t record = 0; record < 8; ++record) {
    arena.set_idle(pages[record], record == 0 ? 100 : record);
  }
  const auto window = arena.coldest_window(large);
  EXPECT(window.has_value());
  const auto owners = arena.owners_in(*window);
  EXPECT(owners.size() == 4);
  EXPECT(window->newest_ns < 100);
  EXPECT(!arena.coldest_window(small));  // its own runs are not others'
  for (const RecordId record : owners) {
    EXPECT(record != RecordId(0));
    arena.set_busy(pages[record.value()]);
    arena.release(pages[record.value()]);
  }
  EXPECT(arena.allocate(large, RecordId(9)).has_value());
  EXPECT(!arena.is_clearable(large, *window));
  EXPECT(arena.verify().empty());
}

TEST(the_window_used_longest_ago_is_found_without_a_look_at_every_segment) {
  std::mt19937_64 random(kvpool::testing::seed());
  constexpr uint32_t SEGMENTS = 40;
  SlotArena arena({SEGMENT, SEGMENTS});
  make_ready(arena);
  const ClassId one = *arena.add_class(SEGMENT, 1);
  const ClassId other = *arena.add_class(SEGMENT - 1, 2);
  const ClassId two = *arena.add_class(2 * SEGMENT, 1);
  std::vector<PageIndex> pages;
  std::vector<uint64_t> uses(SEGMENTS, 0);
  for (uint32_t record = 0; record < SEGMENTS; ++record) {
    pages.push_back(*arena.allocate(one, RecordId(record)));
  }
  for (uint64_t now = 1; now < 5000; ++now) {
    const size_t at = random() % SEGMENTS;
    if (uses[at] != 0) {
      arena.set_busy(pages[at]);
    }
    uses[at] = uses[at] != 0 && random() % 3 != 0 ? 0 : now;
    if (uses[at] != 0) {
      arena.set_idle(pages[at], now);
    }
    const auto window = arena.coldest_window(other);
    EXPECT((window ? std::optional(window->newest_ns) : std::nullopt) == age_of_coldest(uses, 1));
    const auto pair = arena.coldest_window(two);
    EXPECT((pair ? std::optional(pair->newest_ns) : std::nullopt) == age_of_coldest(uses, 2));
    EXPECT(now % 50 != 0 || arena.verify().empty());
  }
}

TEST(retained_slots_are_evicted_last_and_in_the_usual_order_once_no_longer_retained) {
  SlotArena arena({SEGMENT, 3});
  make_ready(arena);
  const ClassId one = *arena.add_class(SEGMENT, 1);
  const ClassId other = *arena.add_class(SEGMENT - 1, 2);
  std::vector<PageIndex> pages;
  for (uint32_t record = 0; record < 3; ++record) {
    pages.push_back(*arena.allocate(one, RecordId(record)));
    arena.set_idle(pages.back(), record + 1);
  }
  arena.set_retained(pages[0], true);
  EXPECT(arena.coldest_window(other)->newest_ns == 2);
  arena.set_retained(pages[1], true);
  arena.set_retained(pages[2], true);
  EXPECT(arena.coldest_window(other)->newest_ns == 1);
  EXPECT(arena.coldest_window(other)->is_retained);
  arena.set_retained(pages[2], false);
  EXPECT(arena.coldest_window(other)->newest_ns == 3);
  arena.set_retained(pages[1], false);
  EXPECT(arena.coldest_window(other)->newest_ns == 2);
  EXPECT(arena.verify().empty());
}

// Where nothing can be cleared around the coldest runs, whoever asks again finds what there is.
TEST(a_window_behind_many_cold_runs_is_found_in_the_end) {
  constexpr uint32_t SEGMENTS = 9000;
  SlotArena arena({SEGMENT, SEGMENTS});
  make_ready(arena);
  const ClassId one = *arena.add_class(SEGMENT, 1);
  const ClassId two = *arena.add_class(2 * SEGMENT, 1);
  for (uint32_t record = 0; record < SEGMENTS; ++record) {
    const PageIndex page = *arena.allocate(one, RecordId(record));
    if (record % 2 == 0 || record == 7777) {
      arena.set_idle(page, record == 7777 ? SEGMENTS : 1);
    }
  }
  uint32_t asked = 0;
  while (!arena.coldest_window(two) && asked < 20) {
    ++asked;
  }
  const auto found = arena.coldest_window(two);
  EXPECT(found.has_value());
  EXPECT(found && found->first <= 7777);
  EXPECT(found && found->first + found->count > 7777);
  EXPECT(arena.verify().empty());
}

TIMED_TEST(a_search_for_room_takes_as_long_in_an_arena_of_any_size) {
  EXPECT_TIME(search_seconds(1 << 16) < 20 * search_seconds(1 << 6) + 5e-6);
}

TEST(random_allocations_never_overlap_and_never_leak) {
  std::mt19937_64 random(kvpool::testing::seed());
  SlotArena arena({SEGMENT, 37});
  std::vector<ClassId> classes;
  for (const uint64_t bytes : {PAGE_BYTES, 5 * PAGE_BYTES, 16 * PAGE_BYTES, 17 * PAGE_BYTES, 60 * PAGE_BYTES}) {
    classes.push_back(*arena.add_class(bytes, 1));
  }
  std::map<uint64_t, std::pair<uint64_t, RecordId>> slots;  // first page -> pages, owner
  std::set<uint64_t> idle;
  uint32_t last_record = 0;
  for (int step = 0; step < 20000; ++step) {
    if (step % 50 == 0) {
      arena.mark_ready(static_cast<uint32_t>(random() % 37));
    }
    // Phases of growth and of shrinking, so that runs come and go.
    if (random() % 100 < (step / 2000 % 2 == 0 ? 70U : 25U)) {
      const ClassId size_class = classes[random() % classes.size()];
      const bool can = arena.can_allocate(size_class);
      const auto page = arena.allocate(size_class, RecordId(++last_record));
      EXPECT(page.has_value() == can);
      if (page) {
        const uint64_t pages = arena.size_class(size_class).slot_bytes / PAGE_BYTES;
        EXPECT(page->value() + pages <= 37 * 16);
        const auto after = slots.lower_bound(page->value());
        EXPECT(after == slots.end() || after->first >= page->value() + pages);
        EXPECT(after == slots.begin() || std::prev(after)->first + std::prev(after)->second.first <= page->value());
        slots[page->value()] = {pages, RecordId(last_record)};
      }
    } else if (!slots.empty()) {
      auto slot = slots.lower_bound(static_cast<uint32_t>(random() % (37 * 16)));
      slot = slot == slots.end() ? slots.begin() : slot;
      const PageIndex page(slot->first);
      EXPECT(arena.owner(page) == slot->second.second);
      if (idle.erase(slot->first) != 0) {
        arena.set_busy(page);
      } else if (random() % 3 == 0) {
        arena.set_idle(page, random() % 1000);
        idle.insert(slot->first);
      } else {
        arena.release(page);
        EXPECT(!arena.owner(page).valid());
        slots.erase(slot);
      }
    }
    EXPECT(step % 7 != 0 || arena.verify().empty());
  }
  for (const auto& [page, slot] : slots) {
    if (idle.count(page) != 0) {
      arena.set_busy(PageIndex(page));
    }
    arena.release(PageIndex(page));
  }
  EXPECT(arena.free_segments() == arena.ready_segments());
  EXPECT(arena.verify().empty());
}
