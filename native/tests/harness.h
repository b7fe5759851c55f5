// A test harness of one screen: TEST(name) registers a function, EXPECT(...) reports and counts, main() (harness.cpp) runs all of
// the program, those of the file that its argument names, or those whose names contain it.
//
// TIMED_TEST(name) and EXPECT_TIME(...) hold bounds on time, which a busy machine breaks: they run and count with KVPOOL_TIMED alone,
// on a machine that has nothing else to do (make bench-bounds).
//
// Not a framework: no fixtures, no mocks. It exists so that the C++ tests need nothing but a compiler.
// A random test prints its seed through `seed()`; KVPOOL_SEED in the environment replays it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

namespace kvpool::testing {

struct Case {
  const char* file;
  const char* name;
  bool is_timed;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline uint64_t seed() {
  const char* given = std::getenv("KVPOOL_SEED");
  const uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  std::printf("  seed %llu\n", static_cast<unsigned long long>(value));
  return value;
}

struct Register {
  Register(const char* file, const char* name, bool is_timed, void (*run)()) { cases().push_back({file, name, is_timed, run}); }
};

inline bool& judges_time() {
  static bool judges = false;
  return judges;
}

}  // namespace kvpool::testing

#define KVPOOL_TEST(name, is_timed)                                                               \
  static void test_##name();                                                                      \
  static const kvpool::testing::Register register_##name(__FILE__, #name, is_timed, test_##name); \
  static void test_##name()
#define TEST(name) KVPOOL_TEST(name, false)
#define TIMED_TEST(name) KVPOOL_TEST(name, true)

#define EXPECT(...)                                                              \
  do {                                                                           \
    if (!(__VA_ARGS__)) {                                                        \
      ++kvpool::testing::failures();                                             \
      std::printf("  %s:%d: expected %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
    }                                                                            \
  } while (false)

#define EXPECT_TIME(...)                    \
  do {                                      \
    if (kvpool::testing::judges_time()) {   \
      EXPECT(__VA_ARGS__);                  \
    }                                       \
  } while (false)
