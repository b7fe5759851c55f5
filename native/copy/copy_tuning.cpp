#include "copy/copy_tuning.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "checksum/crc32c.h"

namespace kvpool {
namespace {

constexpr const char* VARIABLE = "KVPOOL_COPY_VARIANT";
constexpr size_t REGION_BYTES = size_t{4} << 20;
constexpr size_t HUGE_BYTES = size_t{2} << 20;
// More than a second-level cache keeps beside the other lines of a turn: in shorter turns prefetching too much looks free.
constexpr size_t TURN_BYTES = size_t{512} << 10;
constexpr size_t ROUNDS_MAX = 15;
constexpr double ROUNDS_MAX_S = 2.0e-3;
// A variant whose fastest turn is so much slower than the fastest of all gets no more of them.
constexpr double BEATEN = 1.3;
// A variant has to be this much better than the first one: less is chance.
constexpr double WORTHWHILE = 1.02;

struct ClassState {
  std::atomic<bool> is_measured = false;
  std::array<std::atomic<uint8_t>, COPY_KINDS> variant{};
  std::array<double, COPY_KINDS> gb_per_s{};  // written before `is_measured`, constant after it
  std::array<double, COPY_KINDS> first_gb_per_s{};
};

struct State {
  std::array<ClassState, PIECE_CLASSES.size()> classes;
  const char* unknown = nullptr;
  bool is_given = false;
  std::atomic<bool> is_measuring = false;
  std::atomic<double> seconds = 0.0;

  State() noexcept {
    const char* given = std::getenv(VARIABLE);
    if (given == nullptr || *given == '\0') {
      return;
    }
    const auto* found = std::find_if(COPY_VARIANTS.begin(), COPY_VARIANTS.end(),
                                     [&](const CopyVariant& each) { return std::strcmp(each.name, given) == 0; });
    if (found == COPY_VARIANTS.end()) {
      unknown = given;
      return;
    }
    is_given = true;
    for (ClassState& each : classes) {
      for (auto& variant : each.variant) {
        variant = static_cast<uint8_t>(found - COPY_VARIANTS.begin());
      }
    }
  }
};

State& state() noexcept {
  static State the_state;
  return the_state;
}

double cpu_seconds() noexcept {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Memory of this measurement alone, in huge pages where there are any, touched.
class Region {
 public:
  Region() noexcept : base_(mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (is_valid()) {
      const auto address = reinterpret_cast<uintptr_t>(base_);
      data_ = static_cast<uint8_t*>(base_) + (HUGE_BYTES - address % HUGE_BYTES) % HUGE_BYTES;
      madvise(data_, REGION_BYTES, MADV_HUGEPAGE);
      std::memset(data_, 1, REGION_BYTES);
    }
  }
  ~Region() {
    if (is_valid()) {
      munmap(base_, SIZE);
    }
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] bool is_valid() const noexcept { return base_ != MAP_FAILED; }
  [[nodiscard]] uint8_t* data() const noexcept { return data_; }

 private:
  static constexpr size_t SIZE = REGION_BYTES + HUGE_BYTES;
  void* base_;
  uint8_t* data_ = nullptr;
};

// One measurement: pieces of one length between two regions, in random order on the engine's side.
class Trial {
 public:
  Trial(CopyKind kind, size_t piece_bytes, const Region& engine, const Region& extents) noexcept
      : kind_(kind), piece_(piece_bytes), pieces_(REGION_BYTES / piece_bytes), engine_(engine), extents_(extents) {
    const auto end = order_.begin() + static_cast<std::ptrdiff_t>(pieces_);
    std::iota(order_.begin(), end, uint16_t{0});
    std::shuffle(order_.begin(), end, std::mt19937(1));
  }

  // CPU seconds for the next TURN_BYTES by a variant, from and into memory.
  double turn(size_t variant) noexcept {
    const size_t count = TURN_BYTES / piece_;
    for (size_t i = 0; i <= count; ++i) {
      flush_lines(block(first_ + i), piece_);
      flush_lines(extent(first_ + i), piece_);
    }
    copy_fence();
    const double start = cpu_seconds();
    uint32_t crc = 0;
    for (size_t i = first_; i < first_ + count; ++i) {
      crc = kind_ == CopyKind::SAVE ? copy_piece(variant, crc, extent(i), block(i), piece_, block(i + 1))
                                    : copy_piece(variant, crc, block(i), extent(i), piece_, extent(i + 1));
    }
    for (size_t i = first_; i < first_ + count; ++i) {
      flush_lines(kind_ == CopyKind::SAVE ? extent(i) : block(i), piece_);
    }
    copy_fence();
    asm volatile("" : : "r"(crc));
    first_ += count;
    return cpu_seconds() - start;
  }

 private:
  [[nodiscard]] uint8_t* block(size_t i) const noexcept { return engine_.data() + order_[i % pieces_] * piece_; }
  [[nodiscard]] uint8_t* extent(size_t i) const noexcept { return extents_.data() + i % pieces_ * piece_; }

  CopyKind kind_;
  size_t piece_;
  size_t pieces_;
  const Region& engine_;
  const Region& extents_;
  std::array<uint16_t, REGION_BYTES / PIECE_CLASSES[0].measured_bytes> order_{};
  size_t first_ = 0;
};

// What the turns of one variant took, in order of size.
class Turns {
 public:
  void add(double seconds) noexcept {
    size_t at = count_++;
    for (; at > 0 && seconds_[at - 1] > seconds; --at) {
      seconds_[at] = seconds_[at - 1];
    }
    seconds_[at] = seconds;
  }
  [[nodiscard]] double least() const noexcept { return seconds_[0]; }
  [[nodiscard]] double median() const noexcept { return seconds_[count_ / 2]; }

 private:
  std::array<double, ROUNDS_MAX> seconds_{};
  size_t count_ = 0;
};

// The variants in turn, first all of them, then those that may still win, until the time is over.
void measure(ClassState& result, CopyKind kind, Trial trial) noexcept {
  std::array<Turns, COPY_VARIANTS.size()> turns;
  std::array<bool, COPY_VARIANTS.size()> is_beaten{};
  const double start = cpu_seconds();
  for (size_t round = 0; round < ROUNDS_MAX && (round < 2 || cpu_seconds() - start < ROUNDS_MAX_S); ++round) {
    double best = std::numeric_limits<double>::max();
    for (size_t variant = 0; variant < COPY_VARIANTS.size(); ++variant) {
      if (!is_beaten[variant]) {
        turns[variant].add(trial.turn(variant));
        best = std::min(best, turns[variant].least());
      }
    }
    for (size_t variant = 1; round > 0 && variant < COPY_VARIANTS.size(); ++variant) {
      is_beaten[variant] = is_beaten[variant] || turns[variant].least() > best * BEATEN;
    }
  }
  size_t best = 0;
  double least = turns[0].median() / WORTHWHILE;
  for (size_t variant = 1; variant < COPY_VARIANTS.size(); ++variant) {
    if (!is_beaten[variant] && turns[variant].median() < least) {
      best = variant;
      least = turns[variant].median();
    }
  }
  const auto number = static_cast<size_t>(kind);
  result.gb_per_s[number] = TURN_BYTES / turns[best].median() / 1e9;
  result.first_gb_per_s[number] = TURN_BYTES / turns[0].median() / 1e9;
  result.variant[number].store(static_cast<uint8_t>(best), std::memory_order_relaxed);
}

size_t class_of(size_t piece_bytes) noexcept {
  size_t found = 0;
  while (piece_bytes > PIECE_CLASSES[found].max_bytes) {
    ++found;
  }
  return found;
}

}  // namespace

size_t copy_variant(CopyKind kind, size_t piece_bytes) noexcept {
  const ClassState& of_class = state().classes[class_of(piece_bytes)];
  return of_class.variant[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
}

uint32_t copy_piece(size_t variant, uint32_t crc, uint8_t* target, const uint8_t* source, size_t size,
                    const uint8_t* next) noexcept {
  return copy_crc32c_with(crc32c_best_path(), variant, crc, target, source, size, next);
}

uint32_t copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) noexcept {
  return copy_piece(copy_variant(CopyKind::LOAD, size), crc, target, source, size, source + size);
}

void tune_copies(size_t piece_bytes) noexcept {
  State& all = state();
  const size_t number = class_of(piece_bytes);
  ClassState& of_class = all.classes[number];
  // Two measurements at once would measure each other. The flag that a fork inherits set leaves its child the first variants.
  if (all.is_given || !has_copy_variants(crc32c_best_path()) || of_class.is_measured.load(std::memory_order_acquire) ||
      all.is_measuring.exchange(true)) {
    return;
  }
  const double start = cpu_seconds();
  const Region engine;
  const Region extents;
  if (!of_class.is_measured.load(std::memory_order_acquire) && engine.is_valid() && extents.is_valid()) {
    for (const CopyKind kind : {CopyKind::SAVE, CopyKind::LOAD}) {
      measure(of_class, kind, Trial(kind, PIECE_CLASSES[number].measured_bytes, engine, extents));
    }
    all.seconds.store(all.seconds.load(std::memory_order_relaxed) + cpu_seconds() - start, std::memory_order_relaxed);
    of_class.is_measured.store(true, std::memory_order_release);
  }
  all.is_measuring.store(false, std::memory_order_release);
}

CopyChoice copy_choice(CopyKind kind, size_t piece_class) noexcept {
  const ClassState& of_class = state().classes[piece_class];
  const auto number = static_cast<size_t>(kind);
  CopyChoice choice{of_class.variant[number].load(std::memory_order_relaxed), false, 0.0, 0.0};
  if (of_class.is_measured.load(std::memory_order_acquire)) {
    choice.is_measured = true;
    choice.gb_per_s = of_class.gb_per_s[number];
    choice.first_gb_per_s = of_class.first_gb_per_s[number];
  }
  return choice;
}

double copy_tuning_seconds() noexcept { return state().seconds.load(std::memory_order_relaxed); }

bool is_copy_variant_given() noexcept { return state().is_given; }

const char* unknown_copy_variant() noexcept { return state().unknown; }

}  // namespace kvpool
