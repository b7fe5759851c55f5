#include "shared_index/hit_needs.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

[[nodiscard]] bool is_elsewhere(uint8_t level) noexcept { return level >= static_cast<uint8_t>(Tier::PEER); }

// Each of these is the slower of both.
void add_levels(std::span<const uint8_t> levels, uint8_t* slowest) noexcept {
  for (const uint8_t level : levels) {
    *slowest = std::max(*slowest, level);
    ++slowest;
  }
}

}  // namespace

FoundHit HitNeeds::find(const IndexView& index, Columns columns, size_t end, bool here) const {
  KVPOOL_DCHECK(columns.size() == runs_.size());
  FoundHit hit = find_chains(index, columns, end, here);
  if (!add_runs(index, columns, here, hit.levels)) {
    hit = find_chains(index, columns, end, true);
    static_cast<void>(add_runs(index, columns, true, hit.levels));
  }
  return hit;
}

FoundHit HitNeeds::find_chains(const IndexView& index, Columns columns, size_t end, bool here) const {
  FoundHit hit;
  bool is_first = true;
  std::vector<uint8_t> further;
  for (size_t number = 0; number < runs_.size(); ++number) {
    if (runs_[number] != 0) {
      continue;
    }
    std::vector<uint8_t>& found = is_first ? hit.levels : further;
    found.resize(is_first ? end : hit.levels.size());
    size_t count = index.lookup(columns[number].data(), found.size(), found.data());
    if (here) {
      count = static_cast<size_t>(std::find_if(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), is_elsewhere) - found.begin());
    }
    hit.levels.resize(count);
    if (!is_first) {
      add_levels({further.data(), count}, hit.levels.data());
    }
    is_first = false;
  }
  if (is_first) {
    hit.levels.assign(end, static_cast<uint8_t>(Tier::DRAM));
  }
  hit.chained = hit.levels.size();
  return hit;
}

// Shortens the chains' levels to the last end before which every other column has its run, and adds those of the runs. False where too many
// of them are elsewhere.
bool HitNeeds::add_runs(const IndexView& index, Columns columns, bool here, std::vector<uint8_t>& levels) const {
  const size_t most = levels.size();
  size_t end = most;
  size_t room = 0;  // of the levels of all runs
  for (const size_t run : runs_) {
    room += std::min(run, most);
  }
  if (room == 0) {
    return true;
  }
  std::vector<uint8_t> scratch(most);
  std::vector<uint8_t> found(room);
  for (size_t before = end + 1; end > 0 && end < before;) {
    before = end;
    for (size_t number = 0, place = 0; number < runs_.size() && end > 0; ++number) {
      const size_t run = runs_[number];
      if (run == 0) {
        continue;
      }
      end = index.last_run(columns[number].data(), end, run, here, scratch.data());
      const size_t first = end - std::min(run, end);
      std::copy(scratch.data() + first, scratch.data() + end, found.data() + place);
      place += std::min(run, most);
    }
  }
  levels.resize(end);
  size_t elsewhere = 0;
  size_t place = 0;
  for (const size_t run : runs_) {
    const std::span<const uint8_t> of_run(found.data() + place, std::min(run, end));
    elsewhere += static_cast<size_t>(std::count_if(of_run.begin(), of_run.end(), is_elsewhere));
    add_levels(of_run, levels.data() + (end - of_run.size()));
    place += std::min(run, most);
  }
  return elsewhere <= elsewhere_max_;
}

std::string HitNeeds::keys_of(Columns columns, size_t end, bool leaves) const {
  KVPOOL_DCHECK(columns.size() == runs_.size());
  std::string keys;
  const auto needed = [&](size_t run) { return run == 0 ? (leaves ? std::min<size_t>(end, 1) : end) : std::min(run, end); };
  size_t count = 0;
  for (const size_t run : runs_) {
    count += needed(run);
  }
  keys.reserve(count * KEY_BYTES);
  for (size_t number = 0; number < runs_.size(); ++number) {
    const size_t wanted = needed(runs_[number]);
    const auto* const first = reinterpret_cast<const char*>(columns[number].data()) + (end - wanted) * KEY_BYTES;
    keys.append(first, wanted * KEY_BYTES);
  }
  return keys;
}

}  // namespace kvpool
