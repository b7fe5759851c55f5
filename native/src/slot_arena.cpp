// Segments, runs and slots. See slot_arena.h.
#include "kvpool/slot_arena.h"

#include <algorithm>
#include <cstdlib>

#include "kvpool/check.h"

namespace kvpool {
namespace {

// A run may leave at most this part of itself unused, if any length up to the limit achieves it.
constexpr uint64_t REST_DIVISOR = 8;

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

SlotArena::SlotArena(ArenaShape shape)
    : shape_(shape),
      segments_(shape.segments),
      runs_(shape.segments),
      owner_words_(static_cast<uint32_t*>(std::calloc(shape.total_bytes() / PAGE_BYTES, sizeof(uint32_t)))) {
  KVPOOL_CHECK(owner_words_ != nullptr);
  KVPOOL_CHECK(shape_.segment_bytes != 0);
  KVPOOL_CHECK(shape_.segment_bytes % PAGE_BYTES == 0);
  KVPOOL_CHECK(shape_.total_bytes() / PAGE_BYTES < END_OF_CHAIN);
  classes_.reserve(MAX_CLASSES);
}

std::optional<ClassId> SlotArena::add_class(uint64_t chunk_bytes, uint32_t layers) {
  if (chunk_bytes == 0 || layers == 0 || chunk_bytes > shape_.total_bytes()) {
    return std::nullopt;
  }
  for (uint32_t index = 0; index < classes_.size(); ++index) {
    const SizeClass& known = classes_[index].geometry;
    if (known.chunk_bytes == chunk_bytes && known.layers == layers) {
      return ClassId(index);
    }
  }
  // Four checksum words belong to a page: chunk_table.h.
  const uint64_t checksum_pages = (uint64_t{layers} + 3) / 4;
  const uint64_t slot_bytes = std::max(round_up(chunk_bytes, PAGE_BYTES), checksum_pages * PAGE_BYTES);
  const uint64_t shortest = round_up(slot_bytes, shape_.segment_bytes) / shape_.segment_bytes;
  if (shortest > shape_.segments || (shortest > shape_.max_run_segments && shape_.max_run_segments == 1) || classes_.size() == MAX_CLASSES) {
    return std::nullopt;
  }
  const auto min_segments = static_cast<uint32_t>(shortest);
  const uint32_t longest = std::min(std::max(min_segments, shape_.max_run_segments), shape_.segments);
  const uint32_t run_segments = preferred_run(slot_bytes, shape_.segment_bytes, min_segments, longest);
  classes_.push_back({{chunk_bytes, layers, slot_bytes, min_segments, run_segments}, NONE, 0, 0});
  return ClassId(static_cast<uint32_t>(classes_.size() - 1));
}

void SlotArena::mark_ready(uint32_t segment) noexcept {
  KVPOOL_CHECK(segment < segments_.size());
  if (segments_[segment].state == SegmentState::NOT_READY) {
    segments_[segment].state = SegmentState::FREE;
    ++free_segments_;
    ++ready_segments_;
  }
}

bool SlotArena::can_allocate(ClassId size_class) const noexcept {
  const ClassState& state = classes_[size_class.value()];
  return state.first_run != NONE || free_window(state.geometry.min_segments).has_value();
}

std::optional<PageIndex> SlotArena::allocate(ClassId size_class, RecordId record) noexcept {
  KVPOOL_CHECK(size_class.value() < classes_.size());
  KVPOOL_CHECK(record.value() < FREE_BIT - 1);
  ClassState& state = classes_[size_class.value()];
  if (state.first_run == NONE) {
    lend(size_class);
    if (state.first_run == NONE) {
      return std::nullopt;
    }
  }
  const uint32_t first = state.first_run;
  Run& run = runs_[first];
  uint32_t page = run.free_page;
  if (page != END_OF_CHAIN) {
    run.free_page = owner_words_[page] & ~FREE_BIT;
  } else {
    KVPOOL_CHECK(run.fresh < run.slots);
    page = static_cast<uint32_t>(first * pages_per_segment() + run.fresh * (state.geometry.slot_bytes / PAGE_BYTES));
    ++run.fresh;
  }
  owner_words_[page] = record.value() + 1;
  ++state.used;
  if (++run.used == run.slots) {
    unlink_run(first);
  }
  return PageIndex(page);
}

void SlotArena::release(PageIndex page) noexcept {
  KVPOOL_CHECK(owner(page).valid());
  Run& run = run_of(page);
  const auto first = static_cast<uint32_t>(&run - runs_.data());
  KVPOOL_CHECK(run.used > run.idle);
  KVPOOL_CHECK(run.kept < run.used);
  owner_words_[page.value()] = run.free_page | FREE_BIT;
  run.free_page = page.value();
  --classes_[run.size_class.value()].used;
  if (run.used == run.slots) {
    link_run(first);
  }
  if (--run.used == 0) {
    give_back(first);
  }
}

void SlotArena::set_idle(PageIndex page, uint64_t now_ns) noexcept {
  Run& run = run_of(page);
  KVPOOL_CHECK(run.idle < run.used);
  ++run.idle;
  run.newest_ns = std::max(run.newest_ns, now_ns);
}

void SlotArena::set_busy(PageIndex page) noexcept {
  Run& run = run_of(page);
  KVPOOL_CHECK(run.idle > 0);
  --run.idle;
}

void SlotArena::set_kept(PageIndex page, bool is_kept) noexcept {
  Run& run = run_of(page);
  KVPOOL_CHECK(is_kept ? run.kept < run.used : run.kept > 0);
  run.kept += is_kept ? 1U : UINT32_MAX;
}

std::optional<SegmentWindow> SlotArena::coldest_window(ClassId size_class) const noexcept {
  const SizeClass& geometry = classes_[size_class.value()].geometry;
  auto window = coldest_window(size_class, geometry.run_segments);
  if (!window && geometry.min_segments < geometry.run_segments) {
    window = coldest_window(size_class, geometry.min_segments);
  }
  return window;
}

std::optional<SegmentWindow> SlotArena::coldest_window(ClassId size_class, uint32_t count) const noexcept {
  std::optional<SegmentWindow> best;
  for (uint32_t first = 0; first + count <= shape_.segments; ++first) {
    const auto window = window_at(size_class, first, count);
    if (window && (!best || (window->is_kept != best->is_kept ? best->is_kept : window->newest_ns < best->newest_ns))) {
      best = window;
    }
  }
  return best;
}

bool SlotArena::is_clearable(ClassId size_class, const SegmentWindow& window) const noexcept {
  const auto now = window_at(size_class, window.first, window.count);
  return now && now->is_kept == window.is_kept;
}

std::optional<SegmentWindow> SlotArena::window_at(ClassId size_class, uint32_t first, uint32_t count) const noexcept {
  SegmentWindow window{first, count, 0};
  for (uint32_t segment = first; segment < first + count; ++segment) {
    if (segments_[segment].state == SegmentState::NOT_READY) {
      return std::nullopt;
    }
    if (segments_[segment].state == SegmentState::LENT) {
      const Run& run = runs_[segments_[segment].run];
      if (run.size_class == size_class || run.idle != run.used) {
        return std::nullopt;
      }
      window.newest_ns = std::max(window.newest_ns, run.newest_ns);
      window.is_kept = window.is_kept || run.kept > 0;
    }
  }
  return window;
}

std::vector<RecordId> SlotArena::owners_in(const SegmentWindow& window) const {
  std::vector<RecordId> owners;
  uint32_t previous = NONE;
  for (uint32_t segment = window.first; segment < window.first + window.count; ++segment) {
    const uint32_t first = segments_[segment].run;
    if (first == NONE || first == previous) {
      continue;
    }
    previous = first;
    for (uint32_t slot = 0; slot < runs_[first].fresh; ++slot) {
      const RecordId found = owner(slot_page(first, slot));
      if (found.valid()) {
        owners.push_back(found);
      }
    }
  }
  return owners;
}

uint64_t SlotArena::lent_slots(ClassId id) const noexcept {
  uint64_t slots = 0;
  for (const Run& run : runs_) {
    slots += run.segments != 0 && run.size_class == id ? run.slots : 0;
  }
  return slots;
}

RecordId SlotArena::owner(PageIndex page) const noexcept {
  const uint32_t word = owner_words_[page.value()];
  return word == 0 || (word & FREE_BIT) != 0 ? RecordId() : RecordId(word - 1);
}

PageIndex SlotArena::slot_page(uint32_t first, uint32_t slot) const noexcept {
  const SizeClass& geometry = classes_[runs_[first].size_class.value()].geometry;
  return PageIndex(static_cast<uint32_t>(first * pages_per_segment() + slot * (geometry.slot_bytes / PAGE_BYTES)));
}

SlotArena::Run& SlotArena::run_of(PageIndex page) noexcept {
  KVPOOL_CHECK(page.value() / pages_per_segment() < segments_.size());
  const uint32_t first = segments_[page.value() / pages_per_segment()].run;
  KVPOOL_CHECK(first != NONE);
  return runs_[first];
}

// First fit: a low hint would save little, since a run of segments is lent once for many slots or tens of MiB.
std::optional<uint32_t> SlotArena::free_window(uint32_t count) const noexcept {
  if (free_segments_ < count) {
    return std::nullopt;
  }
  uint32_t length = 0;
  for (uint32_t segment = 0; segment < shape_.segments; ++segment) {
    length = segments_[segment].state == SegmentState::FREE ? length + 1 : 0;
    if (length == count) {
      return segment + 1 - count;
    }
  }
  return std::nullopt;
}

void SlotArena::lend(ClassId size_class) noexcept {
  ClassState& state = classes_[size_class.value()];
  std::optional<uint32_t> first;
  uint32_t count = state.geometry.run_segments + 1;
  while (!first && count > state.geometry.min_segments) {
    first = free_window(--count);
  }
  if (first) {
    lend_at(size_class, *first, count);
  }
}

void SlotArena::lend_at(ClassId size_class, uint32_t first, uint32_t count) noexcept {
  ClassState& state = classes_[size_class.value()];
  for (uint32_t segment = first; segment < first + count; ++segment) {
    segments_[segment] = {SegmentState::LENT, first};
  }
  free_segments_ -= count;
  Run& run = runs_[first];
  run = Run{};
  run.size_class = size_class;
  run.segments = count;
  run.slots = static_cast<uint32_t>(count * shape_.segment_bytes / state.geometry.slot_bytes);
  KVPOOL_CHECK(run.slots > 0);
  ++state.runs;
  link_run(first);
}

bool SlotArena::claim(ClassId size_class, PageIndex page, RecordId record) noexcept {
  const SizeClass& geometry = classes_[size_class.value()].geometry;
  const auto segment = static_cast<uint32_t>(page.value() / pages_per_segment());
  if (segment >= segments_.size() || geometry.run_segments != 1) {
    return false;
  }
  if (segments_[segment].state == SegmentState::FREE) {
    lend_at(size_class, segment, 1);
  }
  Run& run = runs_[segment];
  const uint64_t slot_pages = geometry.slot_bytes / PAGE_BYTES;
  const uint64_t inside = page.value() % pages_per_segment();
  if (segments_[segment].state != SegmentState::LENT || run.size_class != size_class || inside % slot_pages != 0 ||
      inside / slot_pages >= run.slots || owner(page).valid()) {
    return false;
  }
  run.fresh = std::max(run.fresh, static_cast<uint32_t>(inside / slot_pages) + 1);
  owner_words_[page.value()] = record.value() + 1;
  ++classes_[size_class.value()].used;
  if (++run.used == run.slots) {
    unlink_run(segment);
  }
  return true;
}

// The slots between claimed ones were never handed out in this life: they join the chains of free ones.
void SlotArena::finish_claims() noexcept {
  for (uint32_t first = 0; first < shape_.segments; ++first) {
    Run& run = runs_[first];
    for (uint32_t slot = 0; slot < run.fresh; ++slot) {
      const PageIndex page = slot_page(first, slot);
      if (owner_words_[page.value()] == 0) {
        owner_words_[page.value()] = run.free_page | FREE_BIT;
        run.free_page = page.value();
      }
    }
    if (run.segments != 0 && run.used == 0) {
      give_back(first);
    }
  }
}

void SlotArena::give_back(uint32_t first) noexcept {
  Run& run = runs_[first];
  KVPOOL_CHECK(run.used == 0);
  KVPOOL_CHECK(run.idle == 0);
  unlink_run(first);
  for (uint32_t slot = 0; slot < run.fresh; ++slot) {
    owner_words_[slot_page(first, slot).value()] = 0;
  }
  for (uint32_t segment = first; segment < first + run.segments; ++segment) {
    segments_[segment] = {SegmentState::FREE, NONE};
  }
  free_segments_ += run.segments;
  --classes_[run.size_class.value()].runs;
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
