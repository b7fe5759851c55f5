// A team runs each part once, whatever threads come, also in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "sparse/worker_team.h"
#include "tests/harness.h"

using namespace kvpool;

TEST(each_part_runs_once) {
  for (const unsigned threads : {1U, 2U, 3U, 8U}) {
    WorkerTeam team(threads);
    EXPECT(team.threads() == threads);
    for (uint32_t round = 0; round < 2000; ++round) {
      const uint32_t parts = round % 17;
      std::vector<uint32_t> runs(parts);
      team.run(parts, [&](uint32_t part) { ++runs[part]; });
      for (const uint32_t count : runs) {
        EXPECT(count == 1);
      }
    }
  }
}

TEST(threads_that_sleep_are_woken) {
  WorkerTeam team(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<uint32_t> ran = 0;
    team.run(100, [&](uint32_t) { ran.fetch_add(1); });
    EXPECT(ran == 100);
    ::usleep(3000);
  }
}

TEST(callers_go_one_after_the_other) {
  WorkerTeam team(2);
  std::vector<std::thread> callers;
  std::atomic<uint64_t> total = 0;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        uint64_t sums[8] = {};
        team.run(8, [&](uint32_t part) { sums[part] = part; });
        for (const uint64_t sum : sums) {
          total += sum;
        }
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT(total == 3 * 500 * 28);
}

TEST(a_forked_child_works_alone) {
  auto team = std::make_unique<WorkerTeam>(3);
  team->run(5, [](uint32_t) {});
  const pid_t child = ::fork();
  if (child == 0) {
    uint32_t ran = 0;
    team->run(9, [&](uint32_t) { ++ran; });
    team.reset();
    ::_exit(ran == 9 ? 0 : 1);
  }
  int status = 1;
  EXPECT(::waitpid(child, &status, 0) == child);
  EXPECT(status == 0);
}
