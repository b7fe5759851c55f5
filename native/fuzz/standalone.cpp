// Runs a fuzz target without libFuzzer: the files of a corpus, then seeded random inputs and mutations of the files.
//
// usage: fuzz_NAME [-runs=N] [-max_total_time=SECONDS] [-max_len=BYTES] [DIRECTORY…]      KVPOOL_SEED replays
//
// What it is not: guided by coverage. Options of libFuzzer that it does not know are passed over.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "fuzz_input.h"

namespace {

using Bytes = std::vector<uint8_t>;

struct Options {
  uint64_t runs = 1000;
  double seconds = 0;  // 0: `runs` alone
  size_t bytes_max = 4096;
  std::vector<Bytes> corpus;
};

void read_directory(const std::string& path, std::vector<Bytes>& corpus) {
  if (!std::filesystem::is_directory(path)) {
    return;
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
}

Options parse(int count, char** words) {
  Options options;
  for (int index = 1; index < count; ++index) {
    const std::string word = words[index];
    const std::string value = word.substr(word.find('=') + 1);
    if (word.starts_with("-runs=")) {
      options.runs = std::stoull(value);
    } else if (word.starts_with("-max_total_time=")) {
      options.seconds = std::stod(value);
    } else if (word.starts_with("-max_len=")) {
      options.bytes_max = std::stoull(value);
    } else if (!word.starts_with("-")) {
      read_directory(word, options.corpus);
    }
  }
  return options;
}

Bytes random_input(std::mt19937_64& random, const Options& options) {
  Bytes input;
  if (!options.corpus.empty() && random() % 2 == 0) {
    input = options.corpus[random() % options.corpus.size()];
    for (uint64_t change = random() % 8; change > 0 && !input.empty(); --change) {
      input[random() % input.size()] = static_cast<uint8_t>(random());
    }
  } else {
    input.resize(random() % (random() % 4 == 0 ? options.bytes_max + 1 : 200));
    for (uint8_t& byte : input) {
      byte = static_cast<uint8_t>(random());
    }
  }
  return input;
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  const char* given = std::getenv("KVPOOL_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  std::printf("seed %llu, %zu files\n", static_cast<unsigned long long>(seed), options.corpus.size());
  std::fflush(stdout);
  for (const Bytes& input : options.corpus) {
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::mt19937_64 random(seed);
  const auto begun = std::chrono::steady_clock::now();
  const auto is_over = [&](uint64_t run) {
    const std::chrono::duration<double> used = std::chrono::steady_clock::now() - begun;
    return options.seconds > 0 ? used.count() >= options.seconds : run >= options.runs;
  };
  uint64_t run = 0;
  for (; !is_over(run); ++run) {
    const Bytes input = random_input(random, options);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(run));
  return 0;
}
