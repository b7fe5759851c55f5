// The main program of every room's tests:
//
//     test_ROOM [FILE | PART_OF_A_NAME]
//
// FILE as it is called, or as ctest names it: test_ssd_queue, ssd_queue. ctest runs each file in a process of its own, which some
// files need. No match is a failure that lists the files: a misspelt name must not look like a pass. With KVPOOL_TIMED in the
// environment bounds on time are judged too.
#include "tests/harness.h"

#include <filesystem>
#include <set>
#include <string>

int main(int argc, char** argv) {
  const std::string wanted = argc < 2 ? "" : argv[1];
  const bool judges = std::getenv("KVPOOL_TIMED") != nullptr;
  kvpool::testing::judges_time() = judges;
  const auto is_wanted = [&](const kvpool::testing::Case& test) {
    const std::string file = std::filesystem::path(test.file).stem();
    const bool is_named = wanted.empty() || file == wanted || file == "test_" + wanted ||
                          std::string_view(test.name).find(wanted) != std::string_view::npos;
    return is_named && (judges || !test.is_timed);
  };
  size_t runs = 0;
  for (const auto& test : kvpool::testing::cases()) {
    if (is_wanted(test)) {
      std::printf("%s\n", test.name);
      test.run();
      ++runs;
    }
  }
  if (runs == 0) {
    std::set<std::string> files;
    for (const auto& test : kvpool::testing::cases()) {
      files.insert(std::filesystem::path(test.file).stem());
    }
    std::printf("no test's file is %s, and no test's name has it in it; the files:\n", wanted.c_str());
    for (const auto& file : files) {
      std::printf("  %s\n", file.c_str());
    }
  }
  std::printf("%zu tests, %d failures\n", runs, kvpool::testing::failures());
  return runs > 0 && kvpool::testing::failures() == 0 ? 0 : 1;
}
