// The choice among the variants of a copy: made once for each class and kind, within its time, from those there are; the
// environment's word instead of it; and gathers and scatters by every choice the same.
#include "copy/copy_tuning.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/harness.h"
#include "checksum/crc32c.h"
#include "copy/extent_copy.h"

using namespace kvpool;

namespace {

constexpr std::initializer_list<size_t> LENGTHS = {1, 512, 4096, 8192, 16384, 32768, size_t{1} << 20};
// Several times what is promised: a busy machine's memory is slow too.
constexpr double TUNING_MAX_S = 0.1;

// Whether `check` holds in a process of its own, whose environment names `variant`: a choice is made once in each.
template <typename Check>
bool holds_with(const char* variant, Check check) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("KVPOOL_COPY_VARIANT", variant, 1);
    _exit(check() ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool copies_right() {
  std::vector<uint8_t> memory(13 * 4160);
  std::iota(memory.begin(), memory.end(), uint8_t{0});
  for (const size_t piece : std::initializer_list<size_t>{33, 320, 1000, 4096}) {
    const CacheView view{{memory.data() + 5}, 2, 6, piece, 6 * piece, piece};
    const std::vector<int64_t> ids = {3, 0, 5, 1};
    std::vector<uint8_t> extent(view.payload_bytes(ids.size()));
    const uint32_t saved = gather_payload(view, 0, ids, extent.data());
    if (saved != crc32c_with(CrcPath::TABLE, 0, extent.data(), extent.size()) ||
        std::memcmp(extent.data() + piece, view.block(0, 0, 0), piece) != 0 ||
        scatter_payload(view, 0, ids, extent.data()) != saved) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(the_environment_names_the_variant_and_nothing_is_measured) {
  for (size_t variant = 0; variant < COPY_VARIANTS.size(); ++variant) {
    EXPECT(holds_with(COPY_VARIANTS[variant].name, [&] {
      bool holds = unknown_copy_variant() == nullptr;
      for (const size_t length : LENGTHS) {
        tune_copies(length);
        holds = holds && copy_variant(CopyKind::SAVE, length) == variant && copy_variant(CopyKind::LOAD, length) == variant;
      }
      return holds && copy_tuning_seconds() == 0.0 && copies_right();
    }));
  }
}

TEST(an_unknown_variant_name_is_reported_and_the_first_variant_copies) {
  EXPECT(holds_with("fastest", [] {
    return std::strcmp(unknown_copy_variant(), "fastest") == 0 && copy_variant(CopyKind::SAVE, 4096) == 0 && copies_right();
  }));
}

TEST(a_class_is_measured_once_within_its_interval) {
  EXPECT(!copy_choice(CopyKind::SAVE, 0).is_measured);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (const size_t length : LENGTHS) {
        tune_copies(length);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const PieceClass& each : PIECE_CLASSES) {
    tune_copies(each.measured_bytes);
  }
  const double seconds = copy_tuning_seconds();
  for (const size_t length : LENGTHS) {
    tune_copies(length);
  }
  EXPECT(copy_tuning_seconds() == seconds);
  std::printf("  %.1f ms of CPU time\n", seconds * 1e3);
  for (size_t number = 0; number < PIECE_CLASSES.size(); ++number) {
    for (const CopyKind kind : {CopyKind::SAVE, CopyKind::LOAD}) {
      const CopyChoice choice = copy_choice(kind, number);
      EXPECT(choice.is_measured == has_copy_variants(crc32c_best_path()));
      EXPECT(choice.variant < COPY_VARIANTS.size());
      EXPECT(choice.variant == copy_variant(kind, PIECE_CLASSES[number].measured_bytes));
      EXPECT(choice.gb_per_s >= choice.first_gb_per_s);
      std::printf("  %s of %s: %s, %.1f GB/s, %.2f x the first\n", kind == CopyKind::SAVE ? "save" : "load",
                  PIECE_CLASSES[number].name, COPY_VARIANTS[choice.variant].name, choice.gb_per_s,
                  choice.gb_per_s / choice.first_gb_per_s);
    }
  }
// An emulator of another processor takes what it takes, and so does a sanitizer.
#if defined(NDEBUG) && defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_TIME(seconds < TUNING_MAX_S);
#endif
  EXPECT(copies_right());
}
