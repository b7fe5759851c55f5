// A line of jobs: every chunk is reported once, whatever is full, cancelled, held back or stopped under way.
#include "threads/job_line.h"

#include <poll.h>

#include <map>
#include <set>
#include <thread>

#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr std::chrono::milliseconds LONG{60'000};

enum class End { DONE, CANCELLED, DROPPED };

struct ChunkEnd {
  uint64_t job;
  uint32_t chunk;
  End end;
};

// A chunk for each part, which waits in its thread until the job is let go or is to end.
struct GateJob : LineJob {
  explicit GateJob(uint32_t parts_wanted) : parts(parts_wanted) {}
  const uint32_t parts;
  std::atomic<bool> is_open = false;
  std::atomic<uint32_t> begun = 0;
};

class GateLine final : public JobLine<GateJob, ChunkEnd> {
 public:
  GateLine(unsigned threads, size_t jobs_max, size_t urgencies = 1) : JobLine("kvpool-test", urgencies, jobs_max) {
    start(threads, [this](unsigned) {
      while (const auto task = next([this](const GateJob& job) { return job.urgency() != held_back; })) {
        ++task->job->begun;
        while (!task->job->is_open && !task->job->has_ended()) {
          std::this_thread::yield();
        }
        end(*task->job, task->part, task->job->has_ended() ? End::CANCELLED : End::DONE);
      }
    });
  }
  ~GateLine() { stop(ThreadGroup::FOR_GOOD); }

  uint64_t add(const std::shared_ptr<GateJob>& job, size_t urgency = 0) { return JobLine::add(job, urgency, job->parts, job->parts); }
  bool add_first(const std::shared_ptr<GateJob>& job) { return JobLine::add_first(job, 0, job->parts); }
  bool end(GateJob& job, uint32_t chunk, End how) {
    const std::lock_guard guard(order_lock_);
    order.push_back(job.number());
    return job.number() != 0 && report(job, chunk, {job.number(), chunk, how});
  }
  void hold_back(size_t urgency) {
    change([&] { held_back = urgency; });
  }
  size_t waiting_parts() const {
    const Guard guard = lock();
    size_t parts = 0;
    each_waiting([&](const Rest& rest) { parts += rest.parts - rest.next; });
    return parts;
  }

  // Ends by job and chunk, once so many have come by way of the descriptor; each may come once.
  using Ends = std::map<std::pair<uint64_t, uint32_t>, End>;
  Ends collect(size_t count, size_t limit = SIZE_MAX) {
    Ends ends;
    pollfd readable{event_fd(), POLLIN, 0};
    while (ends.size() < count && poll(&readable, 1, static_cast<int>(LONG.count())) > 0) {
      const auto taken = take_outcomes(limit);
      EXPECT(taken.size() <= limit);
      for (const ChunkEnd& end : taken) {
        EXPECT(ends.emplace(std::pair(end.job, end.chunk), end.end).second);
      }
    }
    EXPECT(ends.size() == count && take_outcomes().empty());
    return ends;
  }

  std::vector<uint64_t> order;  // of jobs whose parts have ended

 private:
  void drop(const Rest& rest) override {
    for (uint32_t part = rest.next; part < rest.parts; ++part) {
      end(*rest.job, part, End::DROPPED);
    }
  }

  std::mutex order_lock_;
  size_t held_back = SIZE_MAX;  // guarded by the line's lock
};

std::shared_ptr<GateJob> gate(uint32_t parts, bool is_open = false) {
  auto job = std::make_shared<GateJob>(parts);
  job->is_open = is_open;
  return job;
}

void wait_for_begun(const GateJob& job, uint32_t parts) {
  while (job.begun < parts) {
    std::this_thread::yield();
  }
}

size_t count(const GateLine::Ends& ends, End how) {
  return static_cast<size_t>(std::count_if(ends.begin(), ends.end(), [how](const auto& end) { return end.second == how; }));
}

}  // namespace

TEST(every_part_of_every_job_is_done_once_by_any_number_of_threads) {
  for (const unsigned threads : {1U, 4U}) {
    GateLine line(threads, 100);
    std::set<uint64_t> numbers;
    for (uint32_t parts = 1; parts <= 20; ++parts) {
      numbers.insert(line.add(gate(parts, true)));
    }
    EXPECT(numbers.size() == 20 && *numbers.begin() == 1 && *numbers.rbegin() == 20);
    EXPECT(count(line.collect(210), End::DONE) == 210);
    EXPECT(line.jobs() == 0);
    line.verify();
  }
}

TEST(a_full_line_refuses_until_a_job_has_been_reported_and_each_urgency_has_its_own_bound) {
  GateLine line(1, 2, 2);
  const auto first = gate(2);
  EXPECT(line.add(first) == 1 && line.add(gate(1, true)) == 2 && line.add(gate(1)) == 0);
  EXPECT(line.add(gate(1, true), 1) == 3);
  line.verify();
  wait_for_begun(*first, 1);
  EXPECT(line.jobs(0) == 2 && line.jobs(1) == 1 && line.waiting_parts() == 3);
  first->is_open = true;
  EXPECT(count(line.collect(4), End::DONE) == 4);
  EXPECT(line.jobs(0) == 0 && line.jobs(1) == 0);
  EXPECT(line.add(gate(1, true)) == 4);
  line.collect(1);
}

TEST(the_more_urgent_job_goes_first_then_the_older_one_and_the_owners_own_before_them) {
  GateLine line(1, 8, 2);
  const auto blocker = gate(1);
  EXPECT(line.add(blocker) == 1);
  wait_for_begun(*blocker, 1);
  EXPECT(line.add(gate(2, true), 1) == 2 && line.add(gate(2, true)) == 3 && line.add(gate(1, true)) == 4);
  EXPECT(line.add_first(gate(1, true)));
  blocker->is_open = true;
  line.collect(6);
  EXPECT(line.order == std::vector<uint64_t>({1, 0, 3, 3, 4, 2, 2}));
}

TEST(what_is_held_back_waits_for_the_change_and_lets_others_through) {
  GateLine line(1, 8, 2);
  line.hold_back(0);
  EXPECT(line.add(gate(1, true)) == 1 && line.add(gate(1, true), 1) == 2);
  EXPECT(line.collect(1).begin()->first.first == 2);
  line.hold_back(SIZE_MAX);
  EXPECT(line.collect(1).begin()->first.first == 1);
}

TEST(a_cancelled_job_has_its_waiting_parts_dropped_and_the_others_ended) {
  GateLine line(2, 8);
  const auto job = gate(5);
  const uint64_t number = line.add(job);
  wait_for_begun(*job, 2);
  const uint64_t other = line.add(gate(1, true));
  EXPECT(line.cancel(number));
  const auto ends = line.collect(6);
  EXPECT(count(ends, End::CANCELLED) == 2 && count(ends, End::DROPPED) == 3 && ends.at({other, 0}) == End::DONE);
  EXPECT(!line.cancel(number) && !line.cancel(99));
  line.verify();
}

TEST(a_stopped_line_has_reported_everything_and_takes_nothing) {
  GateLine line(2, 8);
  const auto running = gate(2);
  EXPECT(line.add(running) != 0);
  wait_for_begun(*running, 2);
  EXPECT(line.add(gate(3)) != 0 && line.add(gate(1)) != 0);
  EXPECT(line.stop(LONG));
  EXPECT(line.add(gate(1)) == 0 && !line.add_first(gate(1)));
  const auto ends = line.collect(6);
  EXPECT(count(ends, End::CANCELLED) == 2 && count(ends, End::DROPPED) == 4);
  EXPECT(line.jobs() == 0 && line.stop(LONG));
  line.verify();
}

TEST(a_chunk_that_is_reported_again_does_not_count) {
  GateLine line(1, 8);
  const auto job = gate(2);
  EXPECT(line.add(job) == 1);
  wait_for_begun(*job, 1);
  EXPECT(line.end(*job, 0, End::CANCELLED) && !line.end(*job, 0, End::DONE));
  job->is_open = true;
  const auto ends = line.collect(2);
  EXPECT(ends.at({1, 0}) == End::CANCELLED && ends.at({1, 1}) == End::DONE);
}

TEST(outcomes_come_a_few_at_a_time_and_the_descriptor_stays_readable) {
  GateLine line(2, 8);
  EXPECT(line.add(gate(50, true)) == 1);
  EXPECT(line.collect(50, 7).size() == 50);
  pollfd readable{line.event_fd(), POLLIN, 0};
  EXPECT(poll(&readable, 1, 0) == 0);
}

TEST(jobs_that_come_end_and_are_cancelled_at_once_are_all_reported_once) {
  const uint64_t seeded = seed();
  for (int round = 0; round < 20; ++round) {
    GateLine line(3, 1000, 3);
    std::atomic<size_t> accepted = 0;
    std::vector<std::thread> callers;
    for (uint64_t caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        std::mt19937_64 dice(seeded + caller);
        for (int job = 0; job < 50; ++job) {
          const auto parts = static_cast<uint32_t>(1 + dice() % 4);
          const uint64_t number = line.add(gate(parts, true), dice() % 3);
          accepted += number != 0 ? parts : 0;
          if (dice() % 3 == 0) {
            static_cast<void>(line.cancel(number));
          }
        }
      });
    }
    const bool stops_early = round % 2 == 1;
    if (stops_early) {
      EXPECT(line.stop(LONG));
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    line.verify();
    line.collect(accepted);
    EXPECT(line.jobs(0) + line.jobs(1) + line.jobs(2) == 0);
  }
}
