// Plans of loads and saves with any numbers: what the checks let through, the jobs can run; the rest never runs.
#include "tests/copy/copy_setting.h"
#include "fuzz_input.h"
#include "copy/copy_checks.h"

using namespace kvpool;
using kvpool::fuzzing::Input;
using kvpool::testing::CopySetting;

namespace {

constexpr size_t CHUNKS = 6;
constexpr uint32_t EXTENTS = 5;
constexpr uint64_t EXTENT_BYTES = 1536;

__extension__ using Wide = unsigned __int128;  // exact products

// Numbers that are right, off by little, or anything.
uint64_t bend(Input& input, uint64_t right) {
  const auto choice = input.number<uint8_t>();
  return choice < 200 ? right : choice < 220 ? right + input.number<uint8_t>() - 128 : input.awkward();
}

// Some of a chunk's extents, out of a view of as many; of a view with gaps between runs, where that fits the bytes.
void bend_extents(Input& input, LoadPlan& plan) {
  plan.map.bytes = bend(input, plan.payload_bytes);
  for (uint32_t number = 0; number < EXTENTS; ++number) {
    if (input.number<uint8_t>() < 150) {
      plan.map.numbers.push_back(static_cast<uint32_t>(bend(input, number)));
    }
  }
  plan.extents = static_cast<uint32_t>(bend(input, plan.map.numbers.size()));
  plan.view.bases.resize(std::min<size_t>(plan.extents, EXTENTS));
  if (input.number<uint8_t>() < 60) {
    plan.view.runs = std::min<uint64_t>(bend(input, 4), 8);
    plan.view.run_stride = plan.view.plane_block_bytes / 8;  // they overlap, inside the block
  }
}

LoadPlan bent_plan(Input& input, CopySetting& setting) {
  LoadPlan plan = setting.load_plan();
  const uint64_t chunks = input.up_to(CHUNKS);
  plan.offsets.resize(chunks);
  plan.slots.resize(bend(input, chunks) % 64);
  plan.generations.resize(bend(input, chunks) % 64);
  plan.block_ids.resize(chunks);
  for (uint64_t& offset : plan.offsets) {
    offset = bend(input, offset);
  }
  for (SlotAddress& slot : plan.slots) {
    slot = SlotAddress::unpacked(bend(input, slot.packed()));
  }
  for (int64_t& id : plan.block_ids) {
    id = static_cast<int64_t>(bend(input, static_cast<uint64_t>(id)));
  }
  if (input.number<uint8_t>() < 20) {
    plan.block_ids.resize(input.up_to(40));
  }
  plan.extents = static_cast<uint32_t>(bend(input, plan.extents));
  plan.payload_bytes = bend(input, plan.payload_bytes);
  if (input.number<uint8_t>() < 100) {
    bend_extents(input, plan);
  }
  return plan;
}

void run_load(const LoadPlan& plan) {
  LoadJob job(plan);
  while (job.run_piece() > 0) {
  }
  // An extent that no chunk has never lands, and the job waits for it.
  const auto& numbers = plan.map.numbers;
  FUZZ_EXPECT(job.is_done() || (!numbers.empty() && numbers.back() >= EXTENTS));
  FUZZ_EXPECT(job.chunks() <= plan.offsets.size());
  FUZZ_EXPECT(job.chunks() == plan.offsets.size() || job.reason() != LoadReason::COMPLETE);
}

void run_save(Input& input, const SavePlan& plan) {
  FUZZ_EXPECT(uint64_t{plan.first_extent} + plan.extents <= plan.view.bases.size());
  SaveJob job(plan);
  for (uint32_t count = 0; count < plan.extents; ++count) {
    static_cast<void>(job.announce(static_cast<uint32_t>(input.up_to(plan.extents - 1))));
    while (job.run_piece() > 0) {
    }
  }
  const auto sums = job.checksums();
  FUZZ_EXPECT(sums.empty() || sums.size() == plan.offsets.size() * plan.extents);
}

// Views that only the checks ever see: nothing is copied with them.
void check_arithmetic(Input& input, const CopySetting& setting) {
  LoadPlan plan{{}, setting.arena, setting.index, {}, {}, {}, {}, 1, 0, true};
  plan.view.bases.push_back(nullptr);
  plan.view.planes = static_cast<uint32_t>(input.awkward());
  plan.view.blocks = input.awkward();
  plan.view.plane_block_bytes = input.awkward();
  plan.offsets.assign(1, 0);
  plan.slots.assign(1, setting.slot(0));
  plan.generations.assign(1, 1);
  plan.block_ids.assign(1 + input.up_to(200), 0);
  plan.payload_bytes = bend(input, plan.view.payload_bytes(plan.block_ids.size()));
  if (load_fault(plan) == nullptr) {
    const Wide exact = Wide{plan.view.planes} * plan.block_ids.size() * plan.view.plane_block_bytes;
    FUZZ_EXPECT(exact == plan.payload_bytes);
    FUZZ_EXPECT(exact <= setting.arena->size());
    FUZZ_EXPECT(plan.view.blocks > 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static CopySetting setting(CHUNKS, EXTENTS, EXTENT_BYTES, 1);
  Input input(data, size);
  check_arithmetic(input, setting);
  const LoadPlan plan = bent_plan(input, setting);
  for (const uint64_t offset : plan.offsets) {
    static_cast<void>(extents_fault(*setting.arena, {offset}, static_cast<uint32_t>(input.awkward()), input.awkward()));
  }
  if (load_fault(plan) == nullptr) {
    run_load(plan);
  }
  SavePlan saved{plan.view, plan.arena, plan.offsets, plan.block_ids, plan.extents, plan.payload_bytes, 0, plan.map};
  saved.extents = static_cast<uint32_t>(bend(input, saved.extents));
  saved.first_extent = static_cast<uint32_t>(bend(input, 0));
  if (save_fault(saved) == nullptr) {
    run_save(input, saved);
  }
  return 0;
}
