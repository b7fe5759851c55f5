// The main program of every room's tests:
//
//     test_ROOM [--timed] [FILE | PART_OF_A_NAME]
//
// No match is a failure: a misspelt name must not look like a pass. With --timed a room without timed tests has nothing to do.
#include "tests/harness.h"

#include <filesystem>
#include <string>

int main(int argc, char** argv) {
  std::string wanted;
  bool& judges = kvpool::testing::judges_time();
  for (int index = 1; index < argc; ++index) {
    const std::string word = argv[index];
    judges = judges || word == "--timed";
    wanted = word == "--timed" ? wanted : word;
  }
  const auto is_wanted = [&](const kvpool::testing::Case& test) {
    const bool is_named = wanted.empty() || std::filesystem::path(test.file).stem() == wanted ||
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
  std::printf("%zu tests, %d failures\n", runs, kvpool::testing::failures());
  return runs > 0 && kvpool::testing::failures() == 0 ? 0 : 1;
}
