// Loads of chunks that are still on their way into the arena: extent by extent, and their failures.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <thread>

#include "tests/copy/copy_jobs.h"
#include "tests/harness.h"
#include "shared_index/landing_board.h"
#include "shared_index/landing_wait.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(extents_are_copied_as_they_land_and_others_are_served_meanwhile) {
  CopySetting setting(4, 3, 4096, 11);
  for (size_t chunk = 2; chunk < 4; ++chunk) {
    setting.table->set_landed(setting.slot(chunk), 0);
  }
  CopyPool pool(1);
  const auto job = start_load(pool, setting.load_plan());
  EXPECT(job->wait_extent(0, 0.02) == ExtentState::TIMED_OUT);
  CopySetting other(2, 3, 4096, 12);
  const auto quick = start_load(pool, other.load_plan());
  expect_loaded(other, *quick, 2, LoadReason::COMPLETE);
  CopySetting third(2, 3, 4096, 13);
  const auto save = std::make_shared<SaveJob>(third.save_plan());
  for (uint32_t extent = 0; extent < 3; ++extent) {
    EXPECT(announce(pool, save, extent));
  }
  EXPECT(save->wait(LONG_S));
  for (uint32_t extent = 0; extent < 3; ++extent) {
    for (size_t chunk = 2; chunk < 4; ++chunk) {
      setting.table->set_landed(setting.slot(chunk), extent + 1);
    }
    EXPECT(job->wait_extent(extent, LONG_S) == ExtentState::IN_PLACE);
    EXPECT(extent == 2 || job->wait_extent(extent + 1, 0.01) == ExtentState::TIMED_OUT);
  }
  expect_loaded(setting, *job, 4, LoadReason::COMPLETE);
}

TEST(a_failed_landing_or_a_freed_slot_ends_the_load_at_that_chunk) {
  for (const bool goes : {false, true}) {
    CopySetting setting(4, 2, 4096, 21);
    setting.table->set_landed(setting.slot(2), 1);
    CopyPool pool(1);
    const auto job = start_load(pool, setting.load_plan());
    EXPECT(job->wait_extent(0, LONG_S) == ExtentState::IN_PLACE);
    EXPECT(!job->wait(0.01));
    if (goes) {
      setting.table->set_generation(setting.slot(2), 0);
    } else {
      setting.table->set_landed(setting.slot(2), LANDING_FAILED);
    }
    expect_loaded(setting, *job, 2, goes ? LoadReason::GONE : LoadReason::IO);
  }
}

TEST(nothing_more_counts_of_an_arena_that_a_later_life_has_taken_over) {
  for (const bool is_set : {false, true}) {
    CopySetting setting(3, 2, 4096, 23);
    const LifePage page(Mapping::create("test-life", PAGE_BYTES, false).mapping);
    page.begin(4);
    setting.index = IndexView::attach(setting.words, nullptr, IndexLife{page, 4});
    setting.table->set_landed(setting.slot(1), 1);
    LoadPlan plan = setting.load_plan();
    plan.is_set = is_set;
    CopyPool pool(1);
    const auto job = start_load(pool, std::move(plan));
    EXPECT(job->wait_extent(0, LONG_S) == ExtentState::IN_PLACE);
    EXPECT(!job->wait(0.01));
    page.begin(5);
    // What the slot gets now, the old index never learns: its words stand as they were.
    setting.extent(1, 1)[0] ^= 0xFF;
    setting.table->set_landed(setting.slot(1), 2);
    EXPECT(job->wait(LONG_S));
    if (is_set) {
      EXPECT(job->reasons()[1] == LoadReason::GONE);
    } else {
      EXPECT(job->chunks() <= 1 && job->reason() == LoadReason::GONE);
    }
    const auto late = start_load(pool, setting.load_plan());
    expect_loaded(setting, *late, 0, LoadReason::GONE);
  }
}

namespace {

uint64_t thread_switches() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<uint64_t>(used.ru_nvcsw);
}

// Announces an extent with the checksum that it has.
void land(CopySetting& setting, LandingBoard& board, size_t chunk, uint32_t extent) {
  const uint32_t checksum = setting.index->checksum_at(setting.slot(chunk), extent);
  board.land(setting.slot(chunk), extent, &checksum, 1);
}

LandingWait wait_for(const CopySetting& setting, const std::vector<size_t>& chunks) {
  LandingWait wait;
  for (const size_t chunk : chunks) {
    wait.add(setting.index, setting.slot(chunk), setting.index->landed_at(setting.slot(chunk)));
  }
  return wait;
}

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// As where a container's filter does not know the call. For this thread alone.
[[nodiscard]] bool refuse_futex_waitv() {
  constexpr uint32_t FUTEX_WAITV = 449;
  sock_filter steps[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, FUTEX_WAITV, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, steps};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

constexpr double SHORT_S = 0.02;

}  // namespace

TEST(a_landing_wakes_only_the_threads_that_wait_for_its_chunk) {
  constexpr size_t WAITERS = 32;
  constexpr uint32_t EXTENTS = 16;
  CopySetting setting(WAITERS, EXTENTS, 4096, 31);
  LandingBoard board(setting.words);
  std::vector<std::unique_ptr<CopyPool>> pools;
  std::vector<std::shared_ptr<LoadJob>> jobs;
  for (size_t chunk = 0; chunk < WAITERS; ++chunk) {
    setting.table->set_landed(setting.slot(chunk), 0);
    LoadPlan plan = setting.load_plan();
    plan.offsets = {plan.offsets[chunk]};
    plan.slots = {plan.slots[chunk]};
    plan.generations = {plan.generations[chunk]};
    plan.block_ids = {plan.block_ids[chunk]};
    pools.push_back(std::make_unique<CopyPool>(1));
    jobs.push_back(start_load(*pools.back(), std::move(plan)));
  }
  const auto begun = std::chrono::steady_clock::now();
  const uint64_t before = thread_switches();
  for (uint32_t extent = 0; extent < EXTENTS; ++extent) {
    for (size_t chunk = 0; chunk < WAITERS; ++chunk) {
      land(setting, board, chunk, extent);
      EXPECT(jobs[chunk]->wait_extent(extent, LONG_S) == ExtentState::IN_PLACE);
    }
  }
  const uint64_t switches = thread_switches() - before;
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begun;
  // Whoever waits looks every millisecond whether it has other work.
  const double looks = WAITERS * elapsed.count();
  std::printf("  %zu waiters, %zu landings in %.1f ms: %llu waits ended, %.0f of them by time\n", WAITERS, WAITERS * EXTENTS,
              elapsed.count(), static_cast<unsigned long long>(switches), looks);
  EXPECT(static_cast<double>(switches) < 4.0 * WAITERS * EXTENTS + 2.0 * looks);
}

TEST(a_wait_ends_once_for_each_landing_of_its_chunk) {
  constexpr size_t WAITERS = 8;
  constexpr uint32_t EXTENTS = 8;
  for (const bool is_first_alone : {false, true}) {
    CopySetting setting(2 * WAITERS, EXTENTS, 4096, 41);
    LandingBoard board(setting.words);
    std::vector<std::atomic<uint32_t>> seen(WAITERS);
    std::vector<uint32_t> wakes(WAITERS);
    std::vector<std::thread> waiters;
    for (size_t chunk = 0; chunk < 2 * WAITERS; ++chunk) {
      setting.table->set_landed(setting.slot(chunk), 0);
    }
    for (size_t chunk = 0; chunk < WAITERS; ++chunk) {
      waiters.emplace_back([&, chunk] {
        while (setting.index->landed_at(setting.slot(chunk)) < EXTENTS) {
          const LandingWait wait = wait_for(setting, {chunk, WAITERS + chunk});
          seen[chunk].store(setting.index->landed_at(setting.slot(chunk)) + 1);
          seen[chunk].notify_one();
          is_first_alone ? wait.wait_for_first(LONG_S) : wait.wait(LONG_S);
          ++wakes[chunk];
        }
      });
    }
    for (uint32_t extent = 0; extent < EXTENTS; ++extent) {
      for (size_t chunk = 0; chunk < WAITERS; ++chunk) {
        seen[chunk].wait(extent);
        land(setting, board, chunk, extent);
      }
    }
    for (size_t chunk = 0; chunk < WAITERS; ++chunk) {
      waiters[chunk].join();
      EXPECT(wakes[chunk] == EXTENTS);
    }
  }
}

namespace {

// Whether a thread of this process sleeps in the kernel now.
bool is_asleep(long thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string words{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = words.rfind(')');
  return name_end != std::string::npos && name_end + 2 < words.size() && words[name_end + 2] == 'S';
}

}  // namespace

TEST(a_publication_wakes_who_follows_the_slot_though_no_extent_had_landed) {
  CopySetting setting(2, 3, 4096, 61);
  for (const uint32_t landed : {0U, 2U}) {
    setting.table->set_landed(setting.slot(1), landed);
    std::atomic<long> thread = 0;
    const auto begun = std::chrono::steady_clock::now();
    std::thread follower([&] {
      const LandingWait wait = wait_for(setting, {1});
      thread = syscall(SYS_gettid);
      wait.wait(LONG_S);
    });
    while (thread == 0 || !is_asleep(thread)) {
      std::this_thread::yield();
    }
    setting.table->set_landed(setting.slot(1), 3);
    follower.join();
    EXPECT(seconds_since(begun) < LONG_S / 2);
  }
}

TEST(a_wait_for_several_chunks_ends_with_the_first_landing_and_in_any_case_in_time) {
  CopySetting setting(40, 2, 4096, 51);
  LandingBoard board(setting.words);
  const std::vector<size_t> chunks{3, 4, 5, 6};
  for (const size_t landing : chunks) {
    for (const size_t chunk : chunks) {
      setting.table->set_landed(setting.slot(chunk), 0);
    }
    const LandingWait wait = wait_for(setting, chunks);
    const auto begun = std::chrono::steady_clock::now();
    wait.wait(SHORT_S);  // no landing
    wait.wait_for_first(SHORT_S);
    EXPECT(seconds_since(begun) >= 2 * SHORT_S);
    std::thread lander([&] { landing == 6 ? board.fail(setting.slot(landing)) : land(setting, board, landing, 0); });
    while (setting.index->landed_at(setting.slot(landing)) == 0) {
      wait.wait(LONG_S);
    }
    lander.join();
    EXPECT(seconds_since(begun) < LONG_S);
  }
  std::vector<size_t> many(40);
  std::iota(many.begin(), many.end(), 0);
  const LandingWait full = wait_for(setting, many);
  EXPECT(full.is_full());
  board.fail(setting.slot(LandingWait::WORDS_MAX - 1));
  const auto begun = std::chrono::steady_clock::now();
  full.wait(LONG_S);  // the last of the words has changed already
  EXPECT(seconds_since(begun) < LONG_S);
}

TEST(loads_go_on_where_the_kernel_does_not_know_the_wait_for_several) {
  CopySetting setting(6, 2, 4096, 61);
  LandingBoard board(setting.words);
  for (size_t chunk = 0; chunk < 6; ++chunk) {
    setting.table->set_landed(setting.slot(chunk), 0);
  }
  std::thread filtered([&] {
    if (!refuse_futex_waitv()) {
      std::printf("  no filter of system calls here\n");
    }
    CopyPool pool(2);  // its threads inherit the filter
    const auto job = start_load(pool, setting.load_plan());
    for (uint32_t extent = 0; extent < 2; ++extent) {
      for (size_t chunk = 6; chunk-- > 0;) {
        EXPECT(job->wait_extent(extent, 0) == ExtentState::TIMED_OUT);
        land(setting, board, chunk, extent);
      }
      EXPECT(job->wait_extent(extent, LONG_S) == ExtentState::IN_PLACE);
    }
    expect_loaded(setting, *job, 6, LoadReason::COMPLETE);
  });
  filtered.join();
}
