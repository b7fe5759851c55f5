// A test harness of one screen: TEST(name) registers a function, EXPECT(...) reports and counts, main() runs all, or those
// whose names contain its argument.
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
  const char* name;
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
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

}  // namespace kvpool::testing

#define TEST(name)                                                          \
  static void test_##name();                                                \
  static const kvpool::testing::Register register_##name(#name, test_##name); \
  static void test_##name()

#define EXPECT(...)                                                              \
  do {                                                                           \
    if (!(__VA_ARGS__)) {                                                        \
      ++kvpool::testing::failures();                                             \
      std::printf("  %s:%d: expected %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
    }                                                                            \
  } while (false)

int main(int argc, char** argv) {
  size_t runs = 0;
  for (const auto& test : kvpool::testing::cases()) {
    if (argc < 2 || std::string_view(test.name).find(argv[1]) != std::string_view::npos) {
      std::printf("%s\n", test.name);
      test.run();
      ++runs;
    }
  }
  std::printf("%zu tests, %d failures\n", runs, kvpool::testing::failures());
  return kvpool::testing::failures() == 0 ? 0 : 1;
}
