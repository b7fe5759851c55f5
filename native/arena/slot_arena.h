// Slot arena: segments of memory that are lent in runs to size classes and cut into slots.
//
// What it is: bookkeeping of slots. What it is not: the memory itself, or the choice of victims. It never evicts: it knows what is
// free, and which window of segments is the cheapest to clear.
//
// A segment is NOT_READY until its memory is pre-faulted, then free, then part of a run:
//
//     NOT_READY --mark_ready--> FREE <--release of the run's last slot-- LENT
//                                 \------allocate, no free slot left-----/
//
// A run is 1..n contiguous segments lent to one class and cut into slots from its start. n is the smallest count
// whose unused end is at most 1/8 of the run; where no such window is free, a shorter run that holds a slot is lent.
// A run whose last slot is freed goes back at once, so classes exchange memory in whole segments.
//
// Invariants: a run's segments are contiguous and name its first segment; `used` counts its allocated slots, `idle`
// those the owner may evict, `retained` those of retained chunks, and neither exceeds used; a class's list holds exactly its
// runs with a free slot; a run's slot has either an owner or a bit among the free ones.
// No two used slots have a number or a checksum in common.
// A run whose slots are all idle stands in `idle_runs_`; the free segments are in `free_`.
// Threads: the control thread only. allocate and release are O(1) but where a run is lent or given back, and the search for a
// window looks at so many runs and segments and no more: O(log segments).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena/free_segments.h"
#include "records/idle_runs.h"
#include "records/kept_region.h"
#include "base/check.h"
#include "base/types.h"

namespace kvpool {

// Sizes of an arena, fixed before any memory is mapped.
//
// What readers look at of a slot is found by the slot's number, and the checksums of its extents by the number of the first one. Each
// segment has as many of both as its slots can need, and a run has those of its segments, which its slots take from the start: so they
// never run out, and lie close together however few slots there are. That asks for the least size of a slot: `slot_bytes_min`, and
// `checksum_bytes_min` for each extent.
struct ArenaShape {
  uint64_t segment_bytes;
  uint32_t segments;
  uint32_t max_run_segments = 8;  // 1 where a slot must not straddle segments
  uint64_t slot_bytes_min = PAGE_BYTES;
  uint64_t checksum_bytes_min = PAGE_BYTES / 4;
  [[nodiscard]] uint64_t total_bytes() const noexcept { return segment_bytes * segments; }
  [[nodiscard]] uint64_t slots_per_segment() const noexcept { return (segment_bytes + slot_bytes_min - 1) / slot_bytes_min; }
  [[nodiscard]] uint64_t checksums_per_segment() const noexcept {
    return (segment_bytes + checksum_bytes_min - 1) / checksum_bytes_min;
  }
};

// The numbers by which readers find the words of a slot.
struct SlotNumbers {
  uint32_t number;
  uint32_t first_checksum;
};

// The lent run that a slot was asked for last.
struct LastRun {
  uint32_t begin = 0;  // its first page
  uint32_t pages = 0;  // of all its slots; 0: none was asked for
  uint32_t slot_pages = 0;
  uint32_t extents = 0;
  SlotNumbers numbers{};  // of its first slot
};

// The lent run of a slot that became idle or busy last.
struct TouchedRun {
  uint64_t begin = 0;  // its first page
  uint64_t pages = 0;  // of its segments; 0: none was touched
  uint32_t first = 0;  // its first segment
};

struct SizeClass {
  uint64_t chunk_bytes;
  uint32_t extents;
  uint64_t slot_bytes;    // whole pages, no less than its words ask for: see ArenaShape
  uint32_t min_segments;  // shortest run that holds a slot
  uint32_t run_segments;  // preferred run
  bool has_place_below = true;  // in lower tiers, where there are any
};

// Segments that are lent together.
struct SegmentRun {
  uint32_t first = 0;
  uint32_t segments = 0;
};

// A window of segments that would be free if every idle slot of the runs that touch it were evicted.
struct SegmentWindow {
  uint32_t first;
  uint32_t count;
  uint64_t newest_ns;    // the latest access of a slot in it
  bool is_retained = false;  // a chunk in it is retained
};

class SlotArena {
 public:
  static constexpr uint32_t MAX_CLASSES = 64;

  // `kept`: an entry for each segment, which is to say how it was lent last; nullptr: nobody asks.
  explicit SlotArena(ArenaShape shape, KeptRun* kept = nullptr);
  SlotArena(const SlotArena&) = delete;
  SlotArena& operator=(const SlotArena&) = delete;

  // The class for chunks of this geometry, made where it is new, or taken from another geometry (`instead`, a class of which no
  // slot is in use). Nothing where no slot of it fits the arena, or there are MAX_CLASSES already.
  [[nodiscard]] std::optional<ClassId> add_class(uint64_t chunk_bytes, uint32_t extents, bool has_place_below = true, ClassId instead = {});

  // The segment's memory is there: it may be handed out. Marking twice changes nothing.
  void mark_ready(uint32_t segment) noexcept;

  [[nodiscard]] bool can_allocate(ClassId size_class) const noexcept;

  // A slot for `record`; nothing where can_allocate is false. A new slot is not idle.
  [[nodiscard]] std::optional<PageIndex> allocate(ClassId size_class, RecordId record) noexcept;

  // Takes this very slot, which a chunk had in an earlier life of the process. False where no slot of the class starts there, or it
  // is taken.
  [[nodiscard]] bool claim(ClassId size_class, PageIndex page, RecordId record) noexcept;
  // The same of a slot of this run, which is lent where its segments are free. Where nobody has used them since, they are ready.
  [[nodiscard]] bool claim(ClassId size_class, SegmentRun run, PageIndex page, RecordId record) noexcept;
  // The numbers of the slot that starts at the page, if the run were lent to the class; nothing where none does.
  [[nodiscard]] std::optional<SlotNumbers> words_in(ClassId size_class, SegmentRun run, PageIndex page) const noexcept;
  // Whether the entry of a used slot's run is what it was lent as. REQUIRES: there are entries.
  [[nodiscard]] bool is_kept(PageIndex page) const noexcept;

  // REQUIRES: the slot is used and not idle.
  void release(PageIndex page) noexcept;

  // The slot may be evicted / may no longer. `now_ns` is the time of its last access.
  void set_idle(PageIndex page, uint64_t now_ns) noexcept {
    TouchedRun last;
    set_idle(page, now_ns, last);
  }
  void set_busy(PageIndex page) noexcept {
    TouchedRun last;
    set_busy(page, last);
  }
  // The same, quicker for one slot after the other of the same run. REQUIRES: no run is lent or given back between two calls with
  // the same `last`.
  void set_idle(PageIndex page, uint64_t now_ns, TouchedRun& last) noexcept {
    Run& run = touch(page, last);
    KVPOOL_CHECK(run.idle < run.used);
    ++run.idle;
    run.newest_ns = std::max(run.newest_ns, now_ns);
    if (is_idle(run)) {
      note_idle(last.first);
    }
  }
  void set_busy(PageIndex page, TouchedRun& last) noexcept {
    Run& run = touch(page, last);
    KVPOOL_CHECK(run.idle > 0);
    --run.idle;
  }

  // The chunk of the used slot is retained from now on / is not any more: see RetentionLedger.
  void set_retained(PageIndex page, bool is_retained) noexcept;

  // slot_arena_windows.cpp. A window of the class's run length, of segments that are free or lent to other classes with idle slots
  // only. It is the one used longest ago, of those without retained chunks if there are any, as far as it lies around one of the
  // coldest runs; where nothing can be cleared around these, any window, found by a search that goes on with the next call.
  [[nodiscard]] std::optional<SegmentWindow> coldest_window(ClassId size_class) noexcept;

  // Whether a window that was found earlier can still be cleared.
  [[nodiscard]] bool is_clearable(ClassId size_class, const SegmentWindow& window) const noexcept;

  // The owners of all used slots of the runs that touch the window.
  [[nodiscard]] std::vector<RecordId> owners_in(const SegmentWindow& window) const;

  // The numbers of the slot that starts at this page. REQUIRES: one of a lent run does; the arena has less than 2^32 pages.
  [[nodiscard]] SlotNumbers words_of(PageIndex page) const noexcept {
    return words_of(page, latest_);
  }
  // The same, quicker for one slot after the other of the same run. REQUIRES: no run is lent or given back between two calls with
  // the same `last`.
  [[nodiscard]] SlotNumbers words_of(PageIndex page, LastRun& last) const noexcept {
    const auto at = static_cast<uint32_t>(page.value());
    if (at - last.begin >= last.pages) {
      last = last_run(at);
      KVPOOL_CHECK(at - last.begin < last.pages);
    }
    // A division of 32 bits: this is asked for each chunk of a lease.
    const uint32_t slot = (at - last.begin) / last.slot_pages;
    KVPOOL_CHECK(slot * last.slot_pages == at - last.begin);
    return {last.numbers.number + slot, last.numbers.first_checksum + slot * last.extents};
  }
  // The owner of the used slot that starts at this page; unset where none does.
  [[nodiscard]] RecordId owner(PageIndex page) const noexcept;
  [[nodiscard]] const SizeClass& size_class(ClassId id) const noexcept { return classes_[id.value()].geometry; }
  [[nodiscard]] uint32_t class_count() const noexcept { return static_cast<uint32_t>(classes_.size()); }
  [[nodiscard]] uint64_t used_slots(ClassId id) const noexcept { return classes_[id.value()].used; }
  [[nodiscard]] uint32_t lent_runs(ClassId id) const noexcept { return classes_[id.value()].runs; }
  // Slots of all runs lent to the class, used and free.
  [[nodiscard]] uint64_t lent_slots(ClassId id) const noexcept { return classes_[id.value()].slots; }
  [[nodiscard]] const ArenaShape& shape() const noexcept { return shape_; }
  [[nodiscard]] bool is_behind() const noexcept { return ready_segments_ < shape_.segments; }
  [[nodiscard]] uint32_t free_segments() const noexcept { return free_segments_; }
  [[nodiscard]] uint32_t ready_segments() const noexcept { return ready_segments_; }

  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  static constexpr uint32_t NONE = UINT32_MAX;
  enum class SegmentState : uint8_t { NOT_READY, FREE, LENT };

  struct Segment {
    SegmentState state = SegmentState::NOT_READY;
    uint32_t run = NONE;  // first segment of the run it is lent in
  };
  // Lives at the index of its first segment.
  struct Run {
    ClassId size_class;
    uint32_t segments = 0;
    uint32_t slots = 0;
    SlotNumbers numbers{};  // of its first slot
    uint32_t slot_pages = 0, extents = 0;
    uint32_t used = 0;
    uint32_t idle = 0;
    uint32_t retained = 0;
    uint32_t free_word = 0;    // no word of `free` before this one has a bit
    uint64_t newest_ns = 0;    // never less than the last access of its idle slots
    uint32_t previous = NONE;  // in the class's list of runs with a free slot
    uint32_t next = NONE;
    std::unique_ptr<RecordId[]> owners;  // by slot; unset: free
    std::unique_ptr<uint64_t[]> free;    // a bit for each slot
  };
  struct ClassState {
    SizeClass geometry;
    uint32_t first_run = NONE;
    uint32_t runs = 0;
    uint64_t used = 0;
    uint64_t slots = 0;
  };

  [[nodiscard]] std::optional<uint32_t> slot_in(const SizeClass& geometry, SegmentRun run, PageIndex page) const noexcept;
  [[nodiscard]] KeptRun described(uint32_t first, uint32_t segment) const noexcept;
  [[nodiscard]] LastRun last_run(uint32_t page) const noexcept;
  // A run was lent or given back.
  void forget_latest() noexcept { latest_ = {}; }
  [[nodiscard]] uint64_t pages_per_segment() const noexcept { return shape_.segment_bytes / PAGE_BYTES; }
  [[nodiscard]] PageIndex slot_page(uint32_t first, uint32_t slot) const noexcept;
  [[nodiscard]] Run& run_of(PageIndex page) noexcept;
  [[nodiscard]] Run& touch(PageIndex page, TouchedRun& last) noexcept {
    if (page.value() - last.begin >= last.pages) {
      last = touched_run(page);
    }
    return runs_[last.first];
  }
  [[nodiscard]] TouchedRun touched_run(PageIndex page) noexcept;
  // Which slot of its run, which begins at segment `first`, starts at the page; nothing where none does.
  [[nodiscard]] std::optional<uint32_t> slot_at(uint32_t first, PageIndex page) const noexcept;
  void take(uint32_t first, uint32_t slot, RecordId record) noexcept;
  [[nodiscard]] static RunAge age_of(const Run& run) noexcept { return {run.newest_ns, run.retained > 0}; }
  [[nodiscard]] static bool is_idle(const Run& run) noexcept { return run.used > 0 && run.idle == run.used; }
  void note_idle(uint32_t first) noexcept;
  [[nodiscard]] std::optional<SegmentWindow> coldest_window(ClassId size_class, uint32_t count) noexcept;
  void refresh_idle_runs(ClassId size_class) noexcept;
  [[nodiscard]] std::optional<RunAge> clearing_age(ClassId size_class, uint32_t segment) const noexcept;
  [[nodiscard]] std::optional<SegmentWindow> window_around(ClassId size_class, uint32_t run, uint32_t count) const noexcept;
  [[nodiscard]] std::optional<SegmentWindow> window_near_hand(ClassId size_class, uint32_t count) noexcept;
  [[nodiscard]] std::optional<SegmentWindow> window_at(ClassId size_class, uint32_t first, uint32_t count) const noexcept;
  void lend(ClassId size_class) noexcept;
  void lend_at(ClassId size_class, uint32_t first, uint32_t count) noexcept;
  void give_back(uint32_t first) noexcept;
  void link_run(uint32_t first) noexcept;
  void unlink_run(uint32_t first) noexcept;
  void verify_run(uint32_t first, std::vector<std::string>& broken) const;

  const ArenaShape shape_;
  KeptRun* const kept_;
  std::vector<Segment> segments_;
  std::vector<Run> runs_;
  std::vector<ClassState> classes_;
  FreeSegments free_;
  IdleRuns idle_runs_;
  uint32_t hand_ = 0;  // segment from which the next search for any window goes on
  uint32_t free_segments_ = 0;
  uint32_t ready_segments_ = 0;
  mutable LastRun latest_{};  // one that is lent
};

}  // namespace kvpool
