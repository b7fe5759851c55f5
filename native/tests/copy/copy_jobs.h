// What the tests of jobs on threads share: starting them, and what a load must have come to.
#pragma once

#include <algorithm>
#include <memory>

#include "tests/copy/copy_setting.h"
#include "tests/harness.h"
#include "copy/copy_pool.h"

namespace kvpool::testing {

inline std::shared_ptr<LoadJob> start_load(CopyPool& pool, LoadPlan plan) {
  auto job = std::make_shared<LoadJob>(std::move(plan));
  if (!pool.queue()->add(job)) {
    job->cancel();
  }
  return job;
}

inline bool announce(CopyPool& pool, const std::shared_ptr<SaveJob>& job, uint32_t extent) {
  const bool is_new = job->announce(extent);
  if (is_new && !pool.queue()->add(job)) {
    job->cancel();
  }
  return is_new;
}

inline void expect_loaded(CopySetting& setting, const LoadJob& job, size_t chunks, LoadReason reason) {
  EXPECT(job.wait(LONG_S));
  EXPECT(job.chunks() == chunks);
  EXPECT(job.reason() == reason);
  for (size_t chunk = 0; chunk < std::min<size_t>(chunks, job.chunks()); ++chunk) {
    for (uint32_t extent = 0; extent < setting.extents; ++extent) {
      EXPECT(setting.holds(chunk, extent));
    }
  }
}

}  // namespace kvpool::testing
