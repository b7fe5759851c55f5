// Loads of chunks that are still on their way into the arena: layer by layer, and their failures.
#include "copy_jobs.h"
#include "harness.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(layers_are_copied_as_they_land_and_others_are_served_meanwhile) {
  CopySetting setting(4, 3, 4096, 11);
  for (size_t chunk = 2; chunk < 4; ++chunk) {
    setting.table->set_landed(setting.page(chunk), 0);
  }
  CopyPool pool(1);
  const auto job = start_load(pool, setting.load_plan());
  EXPECT(job->wait_layer(0, 0.02) == LayerState::TIMED_OUT);
  CopySetting other(2, 3, 4096, 12);
  const auto quick = start_load(pool, other.load_plan());
  expect_loaded(other, *quick, 2, LoadReason::COMPLETE);
  CopySetting third(2, 3, 4096, 13);
  const auto save = std::make_shared<SaveJob>(third.save_plan());
  for (uint32_t layer = 0; layer < 3; ++layer) {
    EXPECT(announce(pool, save, layer));
  }
  EXPECT(save->wait(LONG_S));
  for (uint32_t layer = 0; layer < 3; ++layer) {
    for (size_t chunk = 2; chunk < 4; ++chunk) {
      setting.table->set_landed(setting.page(chunk), layer + 1);
    }
    EXPECT(job->wait_layer(layer, LONG_S) == LayerState::IN_PLACE);
    EXPECT(layer == 2 || job->wait_layer(layer + 1, 0.01) == LayerState::TIMED_OUT);
  }
  expect_loaded(setting, *job, 4, LoadReason::COMPLETE);
}

TEST(a_landing_that_fails_or_a_slot_that_goes_ends_the_load_there) {
  for (const bool goes : {false, true}) {
    CopySetting setting(4, 2, 4096, 21);
    setting.table->set_landed(setting.page(2), 1);
    CopyPool pool(1);
    const auto job = start_load(pool, setting.load_plan());
    EXPECT(job->wait_layer(0, LONG_S) == LayerState::IN_PLACE);
    EXPECT(!job->wait(0.01));
    if (goes) {
      setting.table->set_generation(setting.page(2), 0);
    } else {
      setting.table->set_landed(setting.page(2), LANDING_FAILED);
    }
    expect_loaded(setting, *job, 2, goes ? LoadReason::GONE : LoadReason::IO);
  }
}
