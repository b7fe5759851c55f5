// Numbers of slots and of their checksums, against sets of those in use.
#include <map>
#include <set>

#include "tests/harness.h"
#include "arena/slot_arena.h"

using namespace kvpool;

namespace {

struct Class {
  ClassId id;
  uint32_t extents;
};

// Numbers in use: each checksum by itself.
struct Used {
  std::set<uint64_t> numbers;
  std::set<uint64_t> checksums;

  void take(const SlotArena& arena, PageIndex page, uint32_t extents) {
    const SlotNumbers words = arena.words_of(page);
    EXPECT(words.number < arena.shape().segments * arena.shape().slots_per_segment());
    EXPECT(numbers.insert(words.number).second);
    EXPECT(words.first_checksum + uint64_t{extents} <= arena.shape().segments * arena.shape().checksums_per_segment());
    for (uint32_t extent = 0; extent < extents; ++extent) {
      EXPECT(checksums.insert(words.first_checksum + uint64_t{extent}).second);
    }
  }
  void give_back(const SlotArena& arena, PageIndex page, uint32_t extents) {
    const SlotNumbers words = arena.words_of(page);
    EXPECT(numbers.erase(words.number) == 1);
    for (uint32_t extent = 0; extent < extents; ++extent) {
      EXPECT(checksums.erase(words.first_checksum + uint64_t{extent}) == 1);
    }
  }
};

void make_ready(SlotArena& arena) {
  for (uint32_t segment = 0; segment < arena.shape().segments; ++segment) {
    arena.mark_ready(segment);
  }
}

}  // namespace

TEST(no_two_slots_in_use_share_a_number_or_a_checksum) {
  std::mt19937_64 random(kvpool::testing::seed());
  // Segments that are whole slots of the least size, and such that are not.
  for (const uint64_t segment_pages : {uint64_t{16}, uint64_t{13}}) {
    ArenaShape shape{segment_pages * PAGE_BYTES, 29};
    shape.slot_bytes_min = segment_pages == 16 ? PAGE_BYTES : 2 * PAGE_BYTES;
    shape.checksum_bytes_min = segment_pages == 16 ? 1024 : 768;
    SlotArena arena(shape);
    make_ready(arena);
    std::vector<Class> classes;
    for (const auto& [bytes, extents] : std::map<uint64_t, uint32_t>{{1, 1}, {4096, 4}, {5000, 40}, {60'000, 3}, {150'000, 64}}) {
      classes.push_back({*arena.add_class(bytes, extents), extents});
    }
    Used used;
    std::map<uint64_t, uint32_t> slots;  // first page -> extents
    for (uint32_t step = 0; step < 20'000; ++step) {
      if (random() % 100 < (step / 1000 % 2 == 0 ? 70U : 25U)) {
        const Class& chosen = classes[random() % classes.size()];
        if (const auto page = arena.allocate(chosen.id, RecordId(step))) {
          used.take(arena, *page, chosen.extents);
          slots[page->value()] = chosen.extents;
        }
      } else if (!slots.empty()) {
        auto slot = slots.lower_bound(random() % (29 * segment_pages));
        slot = slot == slots.end() ? slots.begin() : slot;
        used.give_back(arena, PageIndex(slot->first), slot->second);
        arena.release(PageIndex(slot->first));
        slots.erase(slot);
      }
      EXPECT(step % 97 != 0 || arena.verify().empty());
    }
  }
}

TEST(the_smallest_slots_take_every_number_and_then_there_is_no_room) {
  ArenaShape shape{64 * PAGE_BYTES, 3};
  shape.slot_bytes_min = 8 * PAGE_BYTES;
  shape.checksum_bytes_min = 2 * PAGE_BYTES;
  for (const uint32_t extents : {1U, 4U}) {
    SlotArena arena(shape);
    make_ready(arena);
    const ClassId tiny = *arena.add_class(1, extents);
    EXPECT(arena.size_class(tiny).slot_bytes == 8 * PAGE_BYTES);
    Used used;
    uint32_t taken = 0;
    while (const auto page = arena.allocate(tiny, RecordId(taken))) {
      used.take(arena, *page, extents);
      ++taken;
    }
    EXPECT(taken == shape.segments * shape.slots_per_segment());
    EXPECT(!arena.can_allocate(tiny));
    EXPECT(arena.verify().empty());
  }
  // Many thin extents ask for more than their bytes, and for more than an arena has.
  SlotArena arena(shape);
  make_ready(arena);
  const ClassId thin = *arena.add_class(1, 33);
  EXPECT(arena.size_class(thin).slot_bytes == 66 * PAGE_BYTES);
  uint32_t count = 0;
  while (arena.allocate(thin, RecordId(count))) {
    ++count;
  }
  EXPECT(count == 2);
  EXPECT(!arena.add_class(1, 97));
}

TEST(a_run_has_its_numbers_side_by_side_from_those_of_its_first_segment_on) {
  ArenaShape shape{16 * PAGE_BYTES, 8};
  SlotArena arena(shape);
  make_ready(arena);
  const ClassId wide = *arena.add_class(24 * PAGE_BYTES, 10);
  EXPECT(arena.size_class(wide).run_segments == 3);
  const auto first = arena.allocate(wide, RecordId(0));
  const auto second = arena.allocate(wide, RecordId(1));
  const auto other = arena.allocate(wide, RecordId(2));
  EXPECT(arena.words_of(*first).number == 0);
  EXPECT(arena.words_of(*second).number == 1);
  EXPECT(arena.words_of(*second).first_checksum == 10);
  EXPECT(arena.words_of(*other).number == 3 * 16);
  EXPECT(arena.words_of(*other).first_checksum == 3 * 64);
}
