// Loads and saves on real threads: what is reported good is good, whatever changes, fails or is cancelled meanwhile.
#include "copy/copy_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/copy/copy_jobs.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// A job of one piece that waits until it is let go, and notes when it ran.
struct Gate final : CopyJob {
  Gate(bool load, std::vector<int>& order, int number) : load_(load), order_(order), number_(number) {}
  uint64_t run_piece() override {
    if (has_run_.exchange(true)) {
      return 0;
    }
    while (!is_open) {
      std::this_thread::yield();
    }
    order_.push_back(number_);
    has_ended = true;
    return 1;
  }
  bool has_pieces() const override { return !has_run_; }
  void cancel() override {}
  bool is_load() const noexcept override { return load_; }

  std::atomic<bool> is_open = false;
  std::atomic<bool> has_ended = false;

 private:
  const bool load_;
  std::vector<int>& order_;  // written by one thread at a time: the pool has one
  const int number_;
  std::atomic<bool> has_run_ = false;
};

// A job that notes each piece it has copied.
struct Counted final : CopyJob {
  Counted(std::shared_ptr<CopyJob> job, std::vector<int>& order, int number)
      : job_(std::move(job)), order_(order), number_(number) {}
  uint64_t run_piece() override {
    const uint64_t copied = job_->run_piece();
    if (copied > 0) {
      order_.push_back(number_);
    }
    return copied;
  }
  bool has_pieces() const override { return job_->has_pieces(); }
  bool name_awaited(LandingWait& wait) const override { return job_->name_awaited(wait); }
  void cancel() override { job_->cancel(); }
  bool is_load() const noexcept override { return job_->is_load(); }

  template <typename Job>
  [[nodiscard]] Job* as() const {
    return static_cast<Job*>(job_.get());
  }

 private:
  const std::shared_ptr<CopyJob> job_;
  std::vector<int>& order_;  // written by one thread at a time: the pool has one
  const int number_;
};

}  // namespace

TEST(a_load_brings_every_extent_of_every_chunk) {
  for (const unsigned threads : {1U, 3U}) {
    for (const uint64_t extent_bytes : std::initializer_list<uint64_t>{100, 4096, 200000}) {
      CopySetting setting(11, 5, extent_bytes, testing::seed());
      CopyPool pool(threads);
      const auto job = start_load(pool, setting.load_plan());
      for (uint32_t extent = 0; extent < setting.extents; ++extent) {
        EXPECT(job->wait_extent(extent, LONG_S) == ExtentState::IN_PLACE);
        for (size_t chunk = 0; chunk < 11; ++chunk) {
          EXPECT(setting.holds(chunk, extent));
        }
      }
      expect_loaded(setting, *job, 11, LoadReason::COMPLETE);
      EXPECT(job->progress() == 55);
      EXPECT(pool.bytes_copied() <= 55 * extent_bytes);
    }
  }
}

TEST(a_flipped_bit_ends_the_load_before_its_chunk) {
  for (const unsigned threads : {1U, 3U}) {
    for (const size_t bad : std::initializer_list<size_t>{0, 1, 6, 10}) {
      CopySetting setting(11, 4, 5000, testing::seed());
      setting.extent(bad, 3)[4999] ^= 0x10;
      CopyPool pool(threads);
      const auto job = start_load(pool, setting.load_plan());
      expect_loaded(setting, *job, bad, LoadReason::CHECKSUM);
      const ExtentState expected = bad == 0 ? ExtentState::ENDED : ExtentState::IN_PLACE;
      EXPECT(job->wait_extent(3, LONG_S) == expected);
    }
  }
}

TEST(checksums_are_not_compared_where_the_plan_says_so) {
  CopySetting setting(4, 2, 5000, testing::seed());
  setting.extent(2, 0)[0] ^= 1;
  LoadPlan plan = setting.load_plan();
  plan.verifies = false;
  CopyPool pool(1);
  expect_loaded(setting, *start_load(pool, plan), 4, LoadReason::COMPLETE);
  setting.table->set_generation(setting.slot(1), 77);
  expect_loaded(setting, *start_load(pool, plan), 1, LoadReason::GONE);
}

TEST(a_new_generation_is_a_miss_whatever_its_checksum) {
  CopySetting setting(9, 3, 5000, testing::seed());
  setting.extent(5, 1)[0] ^= 1;
  setting.table->set_generation(setting.slot(5), 99);
  CopyPool pool(2);
  expect_loaded(setting, *start_load(pool, setting.load_plan()), 5, LoadReason::GONE);
}

TEST(the_lowest_failure_gives_the_reason) {
  CopySetting setting(9, 3, 5000, testing::seed());
  setting.table->set_generation(setting.slot(7), 0);
  setting.extent(2, 2)[17] ^= 1;
  CopyPool pool(3);
  expect_loaded(setting, *start_load(pool, setting.load_plan()), 2, LoadReason::CHECKSUM);
}

TEST(of_a_set_each_chunk_has_a_verdict_of_its_own) {
  constexpr size_t CHUNKS = 11;
  constexpr uint32_t EXTENTS = 4;
  CopySetting setting(CHUNKS, EXTENTS, 5000, testing::seed());
  CopyPool pool(2);
  setting.extent(1, EXTENTS - 1)[7] ^= 1;
  setting.extent(4, 0)[0] ^= 0x80;
  LoadPlan plan = setting.load_plan();
  plan.is_set = true;
  plan.generations[2] += 1;
  const auto job = start_load(pool, std::move(plan));
  EXPECT(job->wait(LONG_S));
  std::vector<LoadReason> expected(CHUNKS, LoadReason::COMPLETE);
  expected[1] = expected[4] = LoadReason::CHECKSUM;
  expected[2] = LoadReason::GONE;
  EXPECT(job->reasons() == expected && job->reason() == LoadReason::COMPLETE);
  for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
    for (uint32_t extent = 0; extent < EXTENTS; ++extent) {
      EXPECT(chunk == 2 || setting.holds(chunk, extent));
    }
  }
  LoadPlan never = setting.load_plan();
  never.is_set = true;
  const LoadJob waiting(std::move(never));
  EXPECT(waiting.reasons() == std::vector<LoadReason>(CHUNKS, LoadReason::CANCELLED));
  pool.stop();
}

TEST(a_chunk_that_goes_during_the_load_is_not_reported) {
  for (int round = 0; round < 20; ++round) {
    CopySetting setting(64, 4, 20000, testing::seed());
    CopyPool pool(2);
    const auto job = start_load(pool, setting.load_plan());
    while (job->progress() < static_cast<uint64_t>(round) * 12) {
      std::this_thread::yield();
    }
    setting.table->set_generation(setting.slot(40), 0);
    EXPECT(job->wait(LONG_S));
    EXPECT(job->chunks() == 40 || job->chunks() == 64);
    EXPECT((job->chunks() == 64) == (job->reason() == LoadReason::COMPLETE));
  }
}

TEST(after_cancel_no_byte_is_written) {
  for (int round = 0; round < 20; ++round) {
    CopySetting setting(64, 4, 30000, testing::seed());
    CopyPool pool(2);
    const auto job = start_load(pool, setting.load_plan());
    while (job->progress() < static_cast<uint64_t>(round) * 10) {
      std::this_thread::yield();
    }
    job->cancel();
    const std::vector<uint8_t> then = setting.engine;
    EXPECT(job->is_done());
    const size_t good = job->chunks();
    EXPECT(good == 64 || job->reason() == LoadReason::CANCELLED);
    EXPECT(job->wait_extent(3, 0.0) != ExtentState::TIMED_OUT);
    pool.stop();
    EXPECT(setting.engine == then);
    for (size_t chunk = 0; chunk < good; ++chunk) {
      EXPECT(setting.holds(chunk, 3));
    }
  }
}

TEST(a_save_fills_the_slots_and_knows_their_checksums) {
  for (const unsigned threads : {1U, 3U}) {
    CopySetting setting(7, 6, 3000, testing::seed());
    std::mt19937_64 random(1);
    std::generate(setting.engine.begin(), setting.engine.end(), [&] { return static_cast<uint8_t>(random()); });
    CopyPool pool(threads);
    const auto job = std::make_shared<SaveJob>(setting.save_plan());
    for (const uint32_t extent : {4U, 0U, 5U, 1U, 2U}) {
      EXPECT(announce(pool, job, extent));
      EXPECT(!announce(pool, job, extent));
      EXPECT(job->wait(LONG_S));
      EXPECT(setting.holds(6, extent));
      EXPECT(job->checksums().empty());
    }
    EXPECT(announce(pool, job, 3));
    EXPECT(job->wait(LONG_S));
    const std::vector<uint32_t> sums = job->checksums();
    EXPECT(sums.size() == 42);
    for (size_t chunk = 0; chunk < 7; ++chunk) {
      for (uint32_t extent = 0; extent < 6; ++extent) {
        EXPECT(setting.holds(chunk, extent));
        EXPECT(sums[chunk * 6 + extent] == crc32c(0, setting.block(chunk, extent), 3000));
      }
    }
  }
}

TEST(a_save_copies_nothing_before_it_is_announced) {
  CopySetting setting(3, 2, 5000, testing::seed());
  CopyPool pool(1);
  const auto job = std::make_shared<SaveJob>(setting.save_plan());
  EXPECT(job->wait(0.0));
  EXPECT(announce(pool, job, 1));
  EXPECT(job->wait(LONG_S));
  EXPECT(setting.holds(2, 1));
  EXPECT(!setting.holds(0, 0));
  EXPECT(job->progress() == 3);
}

TEST(what_is_left_of_a_save_is_copied_at_once_where_it_is_little) {
  CopySetting setting(7, 6, 3000, testing::seed());
  CopyQueue nobody;  // no thread looks at it
  const auto job = std::make_shared<SaveJob>(setting.save_plan());
  EXPECT(job->announce(2));
  copy_rest(job, nobody);
  EXPECT(job->wait(0.0));
  EXPECT(job->checksums().size() == 42);
  for (uint32_t extent = 0; extent < 6; ++extent) {
    EXPECT(setting.holds(6, extent));
  }
  copy_rest(job, nobody);
  EXPECT(!job->is_cancelled());
  EXPECT(job->progress() == 42);
}

TEST(what_is_left_of_a_save_is_left_to_the_threads_where_it_is_much) {
  CopySetting setting(70, 6, 3000, testing::seed());
  CopyQueue nobody;
  const auto late = std::make_shared<SaveJob>(setting.save_plan());
  copy_rest(late, nobody);
  EXPECT(!late->wait(0.0));
  EXPECT(late->progress() == 0);
  CopyPool pool(1);
  const auto job = std::make_shared<SaveJob>(setting.save_plan());
  copy_rest(job, *pool.queue());
  EXPECT(job->wait(LONG_S));
  EXPECT(job->checksums().size() == 420);
  pool.stop();
  EXPECT(pool.bytes_copied() == 420 * 3000);
  late->cancel();
}

TEST(who_copies_counts_the_bytes_and_stops_with_the_pool) {
  CopySetting setting(2, 2, 3000, testing::seed());
  CopyPool pool(1);
  const auto job = std::make_shared<SaveJob>(setting.save_plan());
  copy_rest(job, *pool.queue());
  EXPECT(pool.bytes_copied() == 4 * 3000);
  EXPECT(pool.cpu_seconds() > 0.0);
  pool.stop();
  const auto late = std::make_shared<SaveJob>(setting.save_plan());
  copy_rest(late, *pool.queue());
  EXPECT(late->is_cancelled());
  EXPECT(late->checksums().empty());
}

TEST(no_announcement_is_lost_between_threads_that_run_dry) {
  CopySetting setting(2, 64, 64, testing::seed());
  CopyPool pool(3);
  for (int round = 0; round < 300; ++round) {
    const auto job = std::make_shared<SaveJob>(setting.save_plan());
    for (uint32_t extent = 0; extent < setting.extents; ++extent) {
      EXPECT(announce(pool, job, extent));
      if (extent % 3 == 0) {
        EXPECT(job->wait(LONG_S));
      }
    }
    EXPECT(job->wait(LONG_S));
    EXPECT(job->checksums().size() == 128);
  }
}

TEST(a_piece_that_comes_while_a_thread_runs_dry_is_run) {
  // The first thread finds nothing, takes the job out and is then busy. The second has found nothing too, but has yet
  // to take the job out, when the job comes back with a piece.
  struct Dry final : CopyJob {
    uint64_t run_piece() override {
      const int call = entered.fetch_add(1);
      while ((call == 0 && entered < 2) || (call == 1 && !is_released)) {
        std::this_thread::yield();
      }
      return call < 2 ? 0 : pieces.exchange(0);
    }
    bool has_pieces() const override { return pieces > 0; }
    void cancel() override {}
    bool is_load() const noexcept override { return false; }
    std::atomic<int> entered = 0;
    std::atomic<bool> is_released = false;
    std::atomic<uint64_t> pieces = 0;
  };
  std::vector<int> order;
  CopyPool pool(2);
  const auto job = std::make_shared<Dry>();
  EXPECT(pool.queue()->add(job));
  while (job->entered < 2) {
    std::this_thread::yield();
  }
  const auto busy = std::make_shared<Gate>(true, order, 1);
  EXPECT(pool.queue()->add(busy));
  while (busy->has_pieces()) {
    std::this_thread::yield();
  }
  job->pieces = 1;
  EXPECT(pool.queue()->add(job));
  job->is_released = true;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (job->pieces > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT(job->pieces == 0);
  busy->is_open = true;
}

TEST(a_load_of_one_chunk_takes_turns_with_a_long_one_that_came_before) {
  std::vector<int> order;
  CopySetting many(20, 3, 300000, testing::seed());
  CopySetting one(1, 3, 300000, testing::seed());
  CopyPool pool(1);
  const auto gate = std::make_shared<Gate>(true, order, 0);
  EXPECT(pool.queue()->add(gate));
  const auto long_load = std::make_shared<Counted>(std::make_shared<LoadJob>(many.load_plan()), order, 1);
  const auto short_load = std::make_shared<Counted>(std::make_shared<LoadJob>(one.load_plan()), order, 2);
  EXPECT(pool.queue()->add(long_load));
  EXPECT(pool.queue()->add(short_load));
  gate->is_open = true;
  expect_loaded(one, *short_load->as<LoadJob>(), 1, LoadReason::COMPLETE);
  expect_loaded(many, *long_load->as<LoadJob>(), 20, LoadReason::COMPLETE);
  pool.stop();
  EXPECT(order.size() == 1 + 60 + 3);
  EXPECT(std::vector<int>(order.begin(), order.begin() + 7) == std::vector<int>({0, 1, 2, 1, 2, 1, 2}));
  EXPECT(std::count(order.begin() + 7, order.end(), 1) == 57);
}

TEST(a_short_save_takes_turns_with_a_long_one_whose_extents_came_one_by_one) {
  std::vector<int> order;
  CopySetting many(20, 3, 300000, testing::seed());
  CopySetting one(1, 3, 300000, testing::seed());
  CopyPool pool(1);
  const auto gate = std::make_shared<Gate>(false, order, 0);
  EXPECT(pool.queue()->add(gate));
  const auto long_save = std::make_shared<Counted>(std::make_shared<SaveJob>(many.save_plan()), order, 1);
  const auto short_save = std::make_shared<Counted>(std::make_shared<SaveJob>(one.save_plan()), order, 2);
  for (const auto& save : {long_save, short_save}) {
    for (uint32_t extent = 0; extent < 3; ++extent) {
      EXPECT(save->as<SaveJob>()->announce(extent));
      EXPECT(pool.queue()->add(save));
    }
  }
  gate->is_open = true;
  EXPECT(short_save->as<SaveJob>()->wait(LONG_S));
  EXPECT(long_save->as<SaveJob>()->wait(LONG_S));
  pool.stop();
  EXPECT(long_save->as<SaveJob>()->checksums().size() == 60);
  EXPECT(order.size() == 1 + 60 + 3);
  EXPECT(std::vector<int>(order.begin(), order.begin() + 7) == std::vector<int>({0, 1, 2, 1, 2, 1, 2}));
}

TEST(a_load_that_waits_for_its_bytes_is_tried_again_beside_a_long_one_but_not_after_each_piece) {
  struct Blocked final : CopyJob {
    explicit Blocked(std::vector<int>& order) : order_(order) {}
    uint64_t run_piece() override {
      order_.push_back(2);
      return 0;
    }
    bool has_pieces() const override { return !is_cancelled; }
    void cancel() override { is_cancelled = true; }
    bool is_load() const noexcept override { return true; }
    std::atomic<bool> is_cancelled = false;
    std::vector<int>& order_;
  };
  std::vector<int> order;
  CopySetting many(64, 1, 300000, testing::seed());
  CopyPool pool(1);
  const auto gate = std::make_shared<Gate>(true, order, 0);
  EXPECT(pool.queue()->add(gate));
  const auto blocked = std::make_shared<Blocked>(order);
  const auto long_load = std::make_shared<Counted>(std::make_shared<LoadJob>(many.load_plan()), order, 1);
  EXPECT(pool.queue()->add(blocked));
  EXPECT(pool.queue()->add(long_load));
  gate->is_open = true;
  expect_loaded(many, *long_load->as<LoadJob>(), 64, LoadReason::COMPLETE);
  blocked->cancel();
  pool.stop();
  size_t pieces = 0;
  std::vector<size_t> tried_after;
  for (const int number : order) {
    pieces += number == 1 ? 1 : 0;
    if (number == 2 && pieces < 64) {
      tried_after.push_back(pieces);
    }
  }
  EXPECT(pieces == 64);
  EXPECT(tried_after == std::vector<size_t>({0, 15, 31, 47, 63}));
}

TEST(loads_go_before_saves_and_the_oldest_first) {
  std::vector<int> order;
  std::vector<std::shared_ptr<Gate>> gates;
  CopyPool pool(1);
  for (const bool is_load : {false, false, true, false, true}) {
    gates.push_back(std::make_shared<Gate>(is_load, order, static_cast<int>(gates.size())));
    EXPECT(pool.queue()->add(gates.back()));
    while (gates[0]->has_pieces()) {
      std::this_thread::yield();
    }
  }
  for (const auto& gate : gates) {
    gate->is_open = true;
  }
  for (const auto& gate : gates) {
    while (!gate->has_ended) {
      std::this_thread::yield();
    }
  }
  EXPECT(order == std::vector<int>({0, 2, 4, 1, 3}));
}

TEST(stop_cancels_what_waits_and_what_comes_later) {
  CopySetting setting(32, 4, 60000, testing::seed());
  CopyPool pool(2);
  std::vector<std::shared_ptr<LoadJob>> jobs;
  for (int i = 0; i < 8; ++i) {
    jobs.push_back(start_load(pool, setting.load_plan()));
  }
  const auto save = std::make_shared<SaveJob>(setting.save_plan());
  pool.stop();
  jobs.push_back(start_load(pool, setting.load_plan()));
  for (const auto& job : jobs) {
    EXPECT(job->wait(LONG_S));
    EXPECT(job->chunks() == 32 || job->reason() == LoadReason::CANCELLED);
  }
  EXPECT(jobs.back()->chunks() == 0);
  EXPECT(jobs.back()->wait_extent(0, LONG_S) == ExtentState::ENDED);
  EXPECT(announce(pool, save, 0));
  EXPECT(save->wait(LONG_S));
  EXPECT(save->is_cancelled());
  EXPECT(save->checksums().empty());
  EXPECT(pool.cpu_seconds() >= 0.0);
  pool.stop();
}

TEST(many_callers_share_the_threads) {
  const uint64_t seed = testing::seed();
  CopyPool pool(2);
  std::vector<std::thread> callers;
  for (uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, caller, seed] {
      std::mt19937_64 random(seed + caller);
      CopySetting setting(16, 3, 7000, seed);
      CopySetting saved(16, 3, 7000, seed);
      for (int round = 0; round < 40; ++round) {
        const auto load = start_load(pool, setting.load_plan());
        if (random() % 3 == 0) {
          load->cancel();
        } else {
          EXPECT(load->wait_extent(static_cast<uint32_t>(random() % 3), LONG_S) == ExtentState::IN_PLACE);
        }
        EXPECT(load->wait(LONG_S));
        EXPECT(load->chunks() == 16 || load->reason() == LoadReason::CANCELLED);
        const auto save = std::make_shared<SaveJob>(saved.save_plan());
        static_cast<void>(announce(pool, save, 2));
        static_cast<void>(announce(pool, save, 0));
        if (random() % 3 == 0) {
          save->cancel();
        }
        EXPECT(save->wait(LONG_S));
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_waits_for_no_thread_of_its_parent) {
  CopySetting setting(2000, 4, 30000, testing::seed());
  CopyPool pool(2);
  const auto job = start_load(pool, setting.load_plan());
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    job->cancel();
    pool.stop();
    _exit(0);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(job->wait(LONG_S));
  EXPECT(job->chunks() == 2000);
}
#endif
