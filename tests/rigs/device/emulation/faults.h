// What a test orders of the emulated driver: failures of calls, copies that hang, delays. And how often each call was made.
//
// Orders are lines of text, `kvpool_emulated_control(text)` in the same process, or the file that KVPOOL_EMULATED_CONTROL names, which
// every process reads again when it has changed (its orders then take the place of all before):
//
//   fail NAME N CODE    the N-th call of NAME from now on answers CODE and does nothing; 0: every call
//   hang 1              copies, kernels and events do not go on; 0: they do
//   delay_us N          the longest random delay before a copy (default: KVPOOL_EMULATED_DELAY_US, or 200); 0: none
//   clear 1             no failures, nothing hangs
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_types.h"

namespace emulated {

inline uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : otherwise;
}

class Faults {
 public:
  // Counts the call; what it answers instead of being made, or SUCCESS.
  CUresult on_call(const std::string& name) {
    refresh();
    const std::lock_guard guard(lock_);
    ++calls_[name];
    for (Failure& failure : failures_) {
      if (failure.name == name && (failure.left == 0 || --failure.left == 0)) {
        const CUresult code = failure.code;
        if (failure.is_once) {
          failure.name.clear();
        }
        return code;
      }
    }
    return SUCCESS;
  }

  uint64_t calls(const std::string& name) {
    const std::lock_guard guard(lock_);
    const auto found = calls_.find(name);
    return found == calls_.end() ? 0 : found->second;
  }

  void order(const std::string& text) {
    const std::lock_guard guard(lock_);
    read(text);
  }

  [[nodiscard]] bool hangs() {
    refresh();
    return hangs_.load();
  }
  [[nodiscard]] uint64_t delay_us() const { return delay_us_.load(); }

 private:
  struct Failure {
    std::string name;
    uint64_t left;  // calls before it; 0: every one
    CUresult code;
    bool is_once;
  };

  // The file is looked at once in a millisecond at most.
  void refresh() {
    const char* const path = std::getenv("KVPOOL_EMULATED_CONTROL");
    if (path == nullptr || *path == '\0') {
      return;
    }
    const std::lock_guard guard(lock_);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ < std::chrono::milliseconds(1)) {
      return;
    }
    looked_ = now;
    struct stat status = {};
    if (stat(path, &status) != 0 || (status.st_mtim.tv_sec == seen_.tv_sec && status.st_mtim.tv_nsec == seen_.tv_nsec &&
                                     status.st_ino == seen_file_)) {
      return;
    }
    seen_ = status.st_mtim;
    seen_file_ = status.st_ino;
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    read("clear 1\n" + text.str());
  }

  void read(const std::string& text) {
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string verb;
      words >> verb;
      if (verb == "fail") {
        Failure failure{};
        words >> failure.name >> failure.left >> failure.code;
        failure.is_once = failure.left != 0;
        failures_.push_back(failure);
        continue;
      }
      uint64_t value = 0;
      words >> value;
      if (verb == "clear") {
        failures_.clear();
        hangs_ = false;
      } else if (verb == "hang") {
        hangs_ = value != 0;
      } else if (verb == "delay_us") {
        delay_us_ = value;
      }
    }
  }

  std::mutex lock_;
  std::map<std::string, uint64_t> calls_;  // guarded by lock_
  std::vector<Failure> failures_;          // guarded by lock_
  std::chrono::steady_clock::time_point looked_;  // guarded by lock_
  struct timespec seen_ = {};                     // guarded by lock_
  ino_t seen_file_ = 0;                           // guarded by lock_
  std::atomic<bool> hangs_ = false;
  std::atomic<uint64_t> delay_us_ = number_of("KVPOOL_EMULATED_DELAY_US", 200);
};

}  // namespace emulated
