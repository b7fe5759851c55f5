// Learning what chunks are worth. See survival.h.
#include "eviction/survival.h"

#include <algorithm>
#include <cstddef>

#include "checksum/crc32c.h"
#include "records/kept_region.h"

namespace kvpool {
namespace {

// Of what was learned, this much is left after the next learning: half of it after 7,000 requests.
constexpr double COUNTS_DECAY = 0.99;
// As many intervals as a class takes from all classes together, and a bin of these from the bin before.
constexpr double BORROWED = 50;
// An age that no interval was long enough to reach says little: so many are assumed to have reached it without a use.
constexpr double ASSUMED = 1;
// A class is taken to have so many uses more that are as likely as all classes' are.
constexpr double ALIKE = 100;
// Of a bin, its neighbours, and theirs.
constexpr std::array<double, 3> WEIGHTS{6, 4, 1};
// Until something is learned the older one is worth less.
constexpr double UNLEARNED = 1e-9;
constexpr double LEAST_SURVIVAL = 1e-6;
// More of anything is not counted in the life of a machine.
constexpr double MOST = 1e15;

using Bins = std::array<double, SurvivalModel::BINS>;

[[nodiscard]] uint32_t crc_of(const SurvivalModel::History& history) noexcept {
  constexpr size_t BEGIN = offsetof(SurvivalModel::History, crc) + sizeof(history.crc);
  return crc32c(0, reinterpret_cast<const uint8_t*>(&history) + BEGIN, sizeof(history) - BEGIN);
}

// No comparison is true of what is no number.
[[nodiscard]] bool is_count(double value) noexcept { return value >= -MOST && value <= MOST; }

[[nodiscard]] bool is_whole(const SurvivalModel::History& history) noexcept {
  if (history.number == 0 || history.epoch_count == 0 || history.epoch_count > SurvivalModel::EPOCHS_MAX ||
      history.crc != crc_of(history)) {
    return false;
  }
  const auto in_range = [](const auto& counts) { return std::ranges::all_of(counts, is_count); };
  return std::ranges::all_of(history.uses, in_range) &&
         std::ranges::all_of(history.epochs, in_range, &SurvivalModel::Epoch::started);
}

[[nodiscard]] bool are_in_range(const SurvivalModel::Counts& counts) noexcept {
  const auto in_range = [](int64_t count) { return is_count(static_cast<double>(count)); };
  return counts.requests <= SurvivalModel::LEARN_EVERY && std::ranges::all_of(counts.started, in_range);
}

[[nodiscard]] Bins smoothed(const Bins& counts) noexcept {
  Bins out{};
  for (size_t bin = 0; bin < out.size(); ++bin) {
    double sum = WEIGHTS[0] * counts[bin];
    double weight = WEIGHTS[0];
    for (size_t step = 1; step < WEIGHTS.size(); ++step) {
      sum += bin >= step ? WEIGHTS[step] * counts[bin - step] : 0;
      sum += bin + step < out.size() ? WEIGHTS[step] * counts[bin + step] : 0;
      weight += WEIGHTS[step] * ((bin >= step ? 1 : 0) + (bin + step < out.size() ? 1 : 0));
    }
    out[bin] = sum / weight;
  }
  return out;
}

}  // namespace

SurvivalModel::SurvivalModel(Memory* memory)
    : own_(memory == nullptr ? std::make_unique<Memory>() : nullptr),
      memory_(memory == nullptr ? own_.get() : memory),
      worth_(CLASSES),
      chances_(CLASSES) {
  for (auto& row : worth_) {
    for (uint32_t bin = 0; bin < BINS; ++bin) {
      row[bin] = static_cast<float>(UNLEARNED / (bin + 1));
    }
  }
}

void SurvivalModel::restore(const Memory& former) noexcept {
  const History* known = nullptr;
  for (const History& one : former.histories) {
    known = is_whole(one) && (known == nullptr || one.number > known->number) ? &one : known;
  }
  const uint64_t number = known == nullptr ? 0 : known->number;
  if (known != nullptr) {
    memory_->histories[number % 2] = *known;
  }
  if (former.counts.number == number && are_in_range(former.counts)) {
    memory_->counts = former.counts;
  }
  memory_->counts.number = number;
  if (known != nullptr) {
    form_opinions(known->epochs[known->epoch_count - 1].now_ns);
  }
}

// The next history is whole before the counts that it has taken in are gone, and they follow it only then.
void SurvivalModel::close_epoch(uint64_t now_ns) noexcept {
  Counts& counts = memory_->counts;
  History& next = memory_->histories[(counts.number + 1) % 2];
  next = history();
  for (uint32_t epoch = 0; epoch < next.epoch_count; ++epoch) {
    for (float& count : next.epochs[epoch].started) {
      count *= static_cast<float>(COUNTS_DECAY);
    }
  }
  if (next.epoch_count == EPOCHS_MAX) {
    for (uint32_t number = 0; number < CLASSES; ++number) {
      next.epochs[1].started[number] += next.epochs[0].started[number];
    }
    std::copy(next.epochs.begin() + 1, next.epochs.end(), next.epochs.begin());
    --next.epoch_count;
  }
  Epoch& last = next.epochs[next.epoch_count++];
  last.now_ns = now_ns;
  for (uint32_t number = 0; number < CLASSES; ++number) {
    last.started[number] = static_cast<float>(counts.started[number]);
    for (uint32_t bin = 0; bin < BINS; ++bin) {
      next.uses[number][bin] = next.uses[number][bin] * COUNTS_DECAY + counts.ended[number][bin];
    }
  }
  next.number = counts.number + 1;
  keep_order();
  next.crc = crc_of(next);
  keep_order();
  counts.requests = 0;
  counts.started.fill(0);
  counts.ended.fill({});
  keep_order();
  counts.number = next.number;
}

// By bin: intervals that began long enough ago to have lasted so long.
SurvivalModel::Row SurvivalModel::intervals_seen(uint32_t of_class, uint64_t now_ns) const noexcept {
  double old_enough = 0;
  const History& known = history();
  for (uint32_t epoch = 0; epoch < known.epoch_count; ++epoch) {
    old_enough += static_cast<double>(known.epochs[epoch].started[of_class]);
  }
  Row seen{};
  size_t epoch = known.epoch_count;
  for (uint32_t bin = 0; bin < BINS; ++bin) {
    while (epoch > 0 && (now_ns - known.epochs[epoch - 1].now_ns) >> TICK_SHIFT < first_tick(bin)) {
      old_enough -= static_cast<double>(known.epochs[--epoch].started[of_class]);
    }
    seen[bin] = std::max(old_enough, 0.0);
  }
  return seen;
}

void SurvivalModel::learn(uint64_t now_ns) {
  close_epoch(now_ns);
  form_opinions(now_ns);
}

void SurvivalModel::form_opinions(uint64_t now_ns) {
  std::vector<Row> seen(CLASSES);
  Row all_seen{};
  Row all_ended{};
  for (uint32_t number = 0; number < CLASSES; ++number) {
    seen[number] = intervals_seen(number, now_ns);
    for (uint32_t bin = 0; bin < BINS; ++bin) {
      all_seen[bin] += seen[number][bin];
      all_ended[bin] += history().uses[number][bin];
    }
  }
  horizon_ = 0;
  while (horizon_ < BINS && all_seen[horizon_] >= BORROWED) {
    ++horizon_;
  }
  Row common{};
  for (uint32_t bin = 0; bin < BINS; ++bin) {
    const double before = bin > 0 ? common[bin - 1] : 0;
    common[bin] = (all_ended[bin] + BORROWED * before) / (all_seen[bin] + BORROWED + ASSUMED);
  }
  for (uint32_t number = 0; number < CLASSES; ++number) {
    const double likelihood = likelihood_of(number, seen[number], common);
    const Row ended_near = smoothed(history().uses[number]);
    const Row seen_near = smoothed(seen[number]);
    Row share_ended{};
    for (uint32_t bin = 0; bin < BINS; ++bin) {
      share_ended[bin] =
          (ended_near[bin] + BORROWED * likelihood * common[bin]) / (seen_near[bin] + BORROWED + ASSUMED);
    }
    appraise(number, share_ended);
    estimate_chances(number, share_ended);
  }
}

// Beyond the horizon nothing is known to be used again: what `appraise` assumes there would count as seen.
void SurvivalModel::estimate_chances(uint32_t of_class, const Row& share_ended) noexcept {
  double later = 0;  // share of intervals that end at this age or later
  double survival = 1;
  for (uint32_t bin = 0; bin < horizon_; ++bin) {
    survival -= share_ended[bin];
  }
  survival = std::max(survival, LEAST_SURVIVAL);
  chances_[of_class].fill(0);
  for (uint32_t bin = horizon_; bin-- > 0;) {
    later += share_ended[bin];
    chances_[of_class][bin] = static_cast<float>(later / (later + survival));
  }
}

// How much more likely this class's chunks are used again than those of all classes at the same ages.
double SurvivalModel::likelihood_of(uint32_t of_class, const Row& seen, const Row& common) const noexcept {
  double ended = ALIKE;
  double expected = ALIKE;
  for (uint32_t bin = 0; bin < BINS; ++bin) {
    ended += history().uses[of_class][bin];
    expected += common[bin] * seen[bin];
  }
  return ended / expected;
}

// For each age the steepest way up to a later one, of uses gained over time spent: tangents to the upper hull of the points
// (time spent, uses gained), found from the last age to the first.
void SurvivalModel::appraise(uint32_t of_class, const Row& share_ended) noexcept {
  std::array<double, BINS + 1> spent{};   // integral of the survival up to the bin's start
  std::array<double, BINS + 1> gained{};  // share of intervals ended by then
  double survival = 1;
  for (uint32_t bin = 0; bin < BINS; ++bin) {
    const double left = std::max(survival - share_ended[bin], LEAST_SURVIVAL);
    const auto ticks = static_cast<double>(first_tick(bin + 1) - first_tick(bin));
    spent[bin + 1] = spent[bin] + ticks * (survival + left) / 2;
    gained[bin + 1] = 1 - left;
    survival = left;
  }
  std::array<uint32_t, BINS + 1> hull{};  // a stack, the nearest on top
  uint32_t height = 0;
  hull[height++] = BINS;
  const auto slope = [&](uint32_t from, uint32_t to) {
    return (gained[to] - gained[from]) / (spent[to] - spent[from]);
  };
  for (uint32_t bin = BINS; bin-- > 0;) {
    while (height > 1 && slope(bin, hull[height - 2]) >= slope(bin, hull[height - 1])) {
      --height;
    }
    worth_[of_class][bin] = static_cast<float>(slope(bin, hull[height - 1]));
    hull[height++] = bin;
  }
}

}  // namespace kvpool
