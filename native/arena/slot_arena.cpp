// Segments, runs and slots. See slot_arena.h.
#include "arena/slot_arena.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace kvpool {
namespace {

// A run may leave at most this part of itself unused, if any length up to the limit achieves it.
constexpr uint64_t REST_DIVISOR = 8;
constexpr uint32_t SLOTS_PER_WORD = 64;

uint32_t preferred_run(uint64_t slot_bytes, uint64_t segment_bytes, uint32_t shortest, uint32_t longest) {
  uint32_t best = shortest;
  double best_rest = 1.0;
  for (uint32_t count = shortest; count <= longest; ++count) {
    const uint64_t bytes = count * segment_bytes;
    const uint64_t rest = bytes % slot_bytes;
    if (rest * REST_DIVISOR <= bytes) {
      return count;
    }
    const double part = static_cast<double>(rest) / static_cast<double>(bytes);
    if (part < best_rest) {
      best_rest = part;
      best = count;
    }
  }
  return best;
}

}  // namespace

SlotArena::SlotArena(ArenaShape shape, KeptRun* kept)
    : shape_(shape),
      kept_(kept),
      segments_(shape.segments),
      runs_(shape.segments),
      free_(shape.segments),
      idle_runs_(shape.segments) {
  KVPOOL_CHECK(shape_.segment_bytes != 0);
  KVPOOL_CHECK(shape_.segment_bytes % PAGE_BYTES == 0);
  KVPOOL_CHECK(shape_.slot_bytes_min >= PAGE_BYTES);
  KVPOOL_CHECK(shape_.checksum_bytes_min != 0);
  classes_.reserve(MAX_CLASSES);
}

std::optional<ClassId> SlotArena::add_class(uint64_t chunk_bytes, uint32_t extents, bool has_place_below, ClassId instead) {
  if (chunk_bytes == 0 || extents == 0 || chunk_bytes > shape_.total_bytes()) {
    return std::nullopt;
  }
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    const SizeClass& known = classes_[index].geometry;
    if (known.chunk_bytes == chunk_bytes && known.extents == extents) {
      return ClassId(index);
    }
  }
  const uint64_t for_words = std::max(shape_.slot_bytes_min, extents * shape_.checksum_bytes_min);
  const uint64_t slot_bytes = round_up(std::max(chunk_bytes, for_words), PAGE_BYTES);
  const uint64_t shortest = round_up(slot_bytes, shape_.segment_bytes) / shape_.segment_bytes;
  const bool is_too_long = shortest > shape_.segments || (shortest > shape_.max_run_segments && shape_.max_run_segments == 1);
  if (is_too_long || (!instead.valid() && classes_.size() == MAX_CLASSES)) {
    return std::nullopt;
  }
  const auto min_segments = static_cast<uint32_t>(shortest);
  const uint32_t longest = std::min(std::max(min_segments, shape_.max_run_segments), shape_.segments);
  const uint32_t run_segments = preferred_run(slot_bytes, shape_.segment_bytes, min_segments, longest);
  const SizeClass geometry{chunk_bytes, extents, slot_bytes, min_segments, run_segments, has_place_below};
  if (instead.valid()) {
    ClassState& state = classes_[instead.value()];
    KVPOOL_CHECK(state.used == 0);
    KVPOOL_CHECK(state.runs == 0);
    state.geometry = geometry;
    return instead;
  }
  classes_.push_back({geometry, NONE, 0, 0, 0});
  idle_runs_.add_class();
  return ClassId(static_cast<uint32_t>(classes_.size() - 1));
}

void SlotArena::mark_ready(uint32_t segment) noexcept {
  KVPOOL_CHECK(segment < segments_.size());
  if (segments_[segment].state == SegmentState::NOT_READY) {
    segments_[segment].state = SegmentState::FREE;
    free_.mark(segment, true);
    ++free_segments_;
    ++ready_segments_;
  }
}

bool SlotArena::can_allocate(ClassId size_class) const noexcept {
  const ClassState& state = classes_[size_class.value()];
  return state.first_run != NONE || free_.longest() >= state.geometry.min_segments;
}

std::optional<PageIndex> SlotArena::allocate(ClassId size_class, RecordId record) noexcept {
  KVPOOL_CHECK(size_class.value() < classes_.size());
  KVPOOL_CHECK(record.valid());
  ClassState& state = classes_[size_class.value()];
  if (state.first_run == NONE) {
    lend(size_class);
    if (state.first_run == NONE) {
      return std::nullopt;
    }
  }
  const uint32_t first = state.first_run;
  Run& run = runs_[first];
  while (run.free[run.free_word] == 0) {
    ++run.free_word;
  }
  const uint32_t slot = run.free_word * SLOTS_PER_WORD + static_cast<uint32_t>(std::countr_zero(run.free[run.free_word]));
  take(first, slot, record);
  return slot_page(first, slot);
}

// REQUIRES: the slot is free.
void SlotArena::take(uint32_t first, uint32_t slot, RecordId record) noexcept {
  Run& run = runs_[first];
  KVPOOL_CHECK(!run.owners[slot].valid());
  run.owners[slot] = record;
  run.free[slot / SLOTS_PER_WORD] &= ~(uint64_t{1} << (slot % SLOTS_PER_WORD));
  ++classes_[run.size_class.value()].used;
  if (++run.used == run.slots) {
    unlink_run(first);
  }
}

void SlotArena::release(PageIndex page) noexcept {
  Run& run = run_of(page);
  const auto first = static_cast<uint32_t>(&run - runs_.data());
  const auto slot = slot_at(first, page);
  KVPOOL_CHECK(slot.has_value());
  KVPOOL_CHECK(run.owners[*slot].valid());
  KVPOOL_CHECK(run.used > run.idle);
  KVPOOL_CHECK(run.retained < run.used);
  run.owners[*slot] = RecordId();
  run.free[*slot / SLOTS_PER_WORD] |= uint64_t{1} << (*slot % SLOTS_PER_WORD);
  run.free_word = std::min(run.free_word, *slot / SLOTS_PER_WORD);
  --classes_[run.size_class.value()].used;
  if (run.used == run.slots) {
    link_run(first);
  }
  if (--run.used == 0) {
    give_back(first);
  } else {
    note_idle(first);
  }
}

TouchedRun SlotArena::touched_run(PageIndex page) noexcept {
  const Run& run = run_of(page);
  const auto first = static_cast<uint32_t>(&run - runs_.data());
  return {first * pages_per_segment(), run.segments * pages_per_segment(), first};
}

// A run all of whose slots may be evicted can be found by its age from now on.
void SlotArena::note_idle(uint32_t first) noexcept {
  const Run& run = runs_[first];
  if (is_idle(run) && !idle_runs_.has(first)) {
    idle_runs_.add(run.size_class, {age_of(run), first});
  }
}

void SlotArena::set_retained(PageIndex page, bool is_retained) noexcept {
  Run& run = run_of(page);
  KVPOOL_CHECK(is_retained ? run.retained < run.used : run.retained > 0);
  run.retained += is_retained ? 1U : UINT32_MAX;
  const auto first = static_cast<uint32_t>(&run - runs_.data());
  if (run.retained == 0 && idle_runs_.has(first)) {
    idle_runs_.set_age(run.size_class, first, age_of(run));  // not retained any more: the key is too high
  }
}

LastRun SlotArena::last_run(uint32_t page) const noexcept {
  const auto segment_pages = static_cast<uint32_t>(pages_per_segment());
  const uint32_t segment = page / segment_pages;
  KVPOOL_CHECK(segment < segments_.size());
  const uint32_t first = segments_[segment].run;
  KVPOOL_CHECK(first != NONE);
  const Run& run = runs_[first];
  return {first * segment_pages, run.slots * run.slot_pages, run.slot_pages, run.extents, run.numbers};
}

RecordId SlotArena::owner(PageIndex page) const noexcept {
  const uint64_t segment = page.value() / pages_per_segment();
  if (segment >= segments_.size() || segments_[segment].state != SegmentState::LENT) {
    return RecordId();
  }
  const uint32_t first = segments_[segment].run;
  const auto slot = slot_at(first, page);
  return slot ? runs_[first].owners[*slot] : RecordId();
}

std::optional<uint32_t> SlotArena::slot_at(uint32_t first, PageIndex page) const noexcept {
  const uint64_t slot_pages = classes_[runs_[first].size_class.value()].geometry.slot_bytes / PAGE_BYTES;
  const uint64_t inside = page.value() - first * pages_per_segment();
  if (inside % slot_pages != 0 || inside / slot_pages >= runs_[first].slots) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(inside / slot_pages);
}

PageIndex SlotArena::slot_page(uint32_t first, uint32_t slot) const noexcept {
  const SizeClass& geometry = classes_[runs_[first].size_class.value()].geometry;
  return PageIndex(first * pages_per_segment() + slot * (geometry.slot_bytes / PAGE_BYTES));
}

SlotArena::Run& SlotArena::run_of(PageIndex page) noexcept {
  KVPOOL_CHECK(page.value() / pages_per_segment() < segments_.size());
  const uint32_t first = segments_[page.value() / pages_per_segment()].run;
  KVPOOL_CHECK(first != NONE);
  return runs_[first];
}

void SlotArena::lend(ClassId size_class) noexcept {
  ClassState& state = classes_[size_class.value()];
  std::optional<uint32_t> first;
  uint32_t count = state.geometry.run_segments + 1;
  while (!first && count > state.geometry.min_segments) {
    first = free_.first_window(--count);
  }
  if (first) {
    lend_at(size_class, *first, count);
  }
}

void SlotArena::lend_at(ClassId size_class, uint32_t first, uint32_t count) noexcept {
  forget_latest();
  ClassState& state = classes_[size_class.value()];
  for (uint32_t segment = first; segment < first + count; ++segment) {
    segments_[segment] = {SegmentState::LENT, first};
    free_.mark(segment, false);
  }
  free_segments_ -= count;
  Run& run = runs_[first];
  run = Run{};
  run.size_class = size_class;
  run.segments = count;
  run.slots = static_cast<uint32_t>(count * shape_.segment_bytes / state.geometry.slot_bytes);
  KVPOOL_CHECK(run.slots > 0);
  run.numbers = {static_cast<uint32_t>(first * shape_.slots_per_segment()),
                 static_cast<uint32_t>(first * shape_.checksums_per_segment())};
  run.slot_pages = static_cast<uint32_t>(state.geometry.slot_bytes / PAGE_BYTES);
  run.extents = state.geometry.extents;
  run.owners = std::make_unique<RecordId[]>(run.slots);
  const uint32_t words = (run.slots + SLOTS_PER_WORD - 1) / SLOTS_PER_WORD;
  run.free = std::make_unique<uint64_t[]>(words);
  std::fill_n(run.free.get(), words, UINT64_MAX);
  if (run.slots % SLOTS_PER_WORD != 0) {
    run.free[words - 1] = (uint64_t{1} << (run.slots % SLOTS_PER_WORD)) - 1;
  }
  ++state.runs;
  state.slots += run.slots;
  link_run(first);
  for (uint32_t segment = first; kept_ != nullptr && segment < first + count; ++segment) {
    kept_[segment] = described(first, segment);
  }
  keep_order();
}

// The entry of a segment of a lent run.
KeptRun SlotArena::described(uint32_t first, uint32_t segment) const noexcept {
  const SizeClass& geometry = classes_[runs_[first].size_class.value()].geometry;
  KeptRun entry{first, runs_[first].segments, geometry.chunk_bytes, geometry.extents, geometry.has_place_below ? 1U : 0U, 0, 0};
  entry.crc = crc_of(entry, segment);
  return entry;
}

bool SlotArena::is_kept(PageIndex page) const noexcept {
  const auto segment = static_cast<uint32_t>(page.value() / pages_per_segment());
  const KeptRun expected = described(segments_[segment].run, segment);
  return std::memcmp(&expected, &kept_[segment], sizeof(expected)) == 0;
}

// Which slot of a run of the class starts at the page; nothing where none does.
std::optional<uint32_t> SlotArena::slot_in(const SizeClass& geometry, SegmentRun run, PageIndex page) const noexcept {
  const uint64_t begin = run.first * pages_per_segment();
  const uint64_t slot_pages = geometry.slot_bytes / PAGE_BYTES;
  if (run.segments == 0 || run.first >= shape_.segments || run.segments > shape_.segments - run.first || page.value() < begin) {
    return std::nullopt;
  }
  const uint64_t inside = page.value() - begin;
  if (inside % slot_pages != 0 || inside / slot_pages >= run.segments * shape_.segment_bytes / geometry.slot_bytes) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(inside / slot_pages);
}

std::optional<SlotNumbers> SlotArena::words_in(ClassId size_class, SegmentRun run, PageIndex page) const noexcept {
  const SizeClass& geometry = classes_[size_class.value()].geometry;
  const auto slot = slot_in(geometry, run, page);
  if (!slot) {
    return std::nullopt;
  }
  return SlotNumbers{static_cast<uint32_t>(run.first * shape_.slots_per_segment() + *slot),
                     static_cast<uint32_t>(run.first * shape_.checksums_per_segment() + *slot * geometry.extents)};
}

bool SlotArena::claim(ClassId size_class, PageIndex page, RecordId record) noexcept {
  const uint64_t segment = page.value() / pages_per_segment();
  if (segment >= segments_.size() || classes_[size_class.value()].geometry.run_segments != 1 ||
      segments_[segment].state == SegmentState::NOT_READY) {
    return false;
  }
  return claim(size_class, {static_cast<uint32_t>(segment), 1}, page, record);
}

bool SlotArena::claim(ClassId size_class, SegmentRun run, PageIndex page, RecordId record) noexcept {
  const auto slot = slot_in(classes_[size_class.value()].geometry, run, page);
  if (!slot) {
    return false;
  }
  const auto begin = segments_.begin() + run.first;
  const auto end = begin + run.segments;
  if (std::all_of(begin, end, [](const Segment& segment) { return segment.state != SegmentState::LENT; })) {
    for (uint32_t segment = run.first; segment < run.first + run.segments; ++segment) {
      mark_ready(segment);
    }
    lend_at(size_class, run.first, run.segments);
  }
  const Run& lent = runs_[run.first];
  if (begin->run != run.first || lent.segments != run.segments || lent.size_class != size_class || lent.owners[*slot].valid()) {
    return false;
  }
  take(run.first, *slot, record);
  return true;
}

void SlotArena::give_back(uint32_t first) noexcept {
  forget_latest();
  Run& run = runs_[first];
  KVPOOL_CHECK(run.used == 0);
  KVPOOL_CHECK(run.idle == 0);
  unlink_run(first);
  if (idle_runs_.has(first)) {
    idle_runs_.remove(run.size_class, first);
  }
  for (uint32_t segment = first; segment < first + run.segments; ++segment) {
    segments_[segment] = {SegmentState::FREE, NONE};
    free_.mark(segment, true);
  }
  free_segments_ += run.segments;
  --classes_[run.size_class.value()].runs;
  classes_[run.size_class.value()].slots -= run.slots;
  run = Run{};
}

void SlotArena::link_run(uint32_t first) noexcept {
  ClassState& state = classes_[runs_[first].size_class.value()];
  runs_[first].previous = NONE;
  runs_[first].next = state.first_run;
  if (state.first_run != NONE) {
    runs_[state.first_run].previous = first;
  }
  state.first_run = first;
}

void SlotArena::unlink_run(uint32_t first) noexcept {
  Run& run = runs_[first];
  if (run.previous != NONE) {
    runs_[run.previous].next = run.next;
  } else {
    classes_[run.size_class.value()].first_run = run.next;
  }
  if (run.next != NONE) {
    runs_[run.next].previous = run.previous;
  }
  run.previous = NONE;
  run.next = NONE;
}

}  // namespace kvpool
