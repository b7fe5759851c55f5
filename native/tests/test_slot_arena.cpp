// Segments, runs and slots, against a set of intervals.
#include <map>
#include <set>

#include "harness.h"
#include "kvpool/slot_arena.h"

using namespace kvpool;

namespace {

constexpr uint64_t SEGMENT = 16 * PAGE_BYTES;

void make_ready(SlotArena& arena) {
  for (uint32_t segment = 0; segment < arena.shape().segments; ++segment) {
    arena.mark_ready(segment);
  }
}

}  // namespace

TEST(class_geometry_follows_the_bytes_and_the_layers) {
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

TEST(random_allocations_never_overlap_and_never_leak) {
  std::mt19937_64 random(kvpool::testing::seed());
  SlotArena arena({SEGMENT, 37});
  std::vector<ClassId> classes;
  for (const uint64_t bytes : {PAGE_BYTES, 5 * PAGE_BYTES, 16 * PAGE_BYTES, 17 * PAGE_BYTES, 60 * PAGE_BYTES}) {
    classes.push_back(*arena.add_class(bytes, 1));
  }
  std::map<uint32_t, std::pair<uint64_t, RecordId>> slots;  // first page -> pages, owner
  std::set<uint32_t> idle;
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
