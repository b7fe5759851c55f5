// Some of a chunk's extents, padded ones, and runs of a head group inside an engine's blocks, against byte-by-byte models.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "checksum/crc32c.h"
#include "copy/copy_checks.h"
#include "copy/plain_copy.h"
#include "tests/copy/copy_jobs.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr size_t CHUNKS = 7;

// Two planes of blocks of `tokens` tokens with `heads` heads each; the view is of the heads from `first` on, `count` of them.
struct HeadsOfTokens {
  HeadsOfTokens(size_t tokens, size_t heads, size_t bytes_of_head, std::mt19937_64& random)
      : tokens_(tokens), heads_(heads), head_bytes_(bytes_of_head), memory(2 * BLOCKS * tokens * heads * bytes_of_head) {
    std::generate(memory.begin(), memory.end(), [&] { return static_cast<uint8_t>(random()); });
  }

  [[nodiscard]] CacheView view(size_t first, size_t count) {
    const size_t token_bytes = heads_ * head_bytes_;
    return {{memory.data() + first * head_bytes_}, 2, BLOCKS, tokens_ * count * head_bytes_, BLOCKS * tokens_ * token_bytes,
            tokens_ * token_bytes, tokens_, token_bytes};
  }
  // Where byte i of the extent of these heads lies.
  [[nodiscard]] size_t place_of(const std::vector<int64_t>& ids, size_t first, size_t count, size_t i) const {
    const size_t run = count * head_bytes_;
    const size_t token = i / run % tokens_;
    const size_t block = i / (run * tokens_);
    const size_t plane = block / ids.size();
    const auto id = static_cast<size_t>(ids[block % ids.size()]);
    return ((plane * BLOCKS + id) * tokens_ + token) * heads_ * head_bytes_ + first * head_bytes_ + i % run;
  }

  static constexpr size_t BLOCKS = 5;

 private:
  const size_t tokens_;
  const size_t heads_;
  const size_t head_bytes_;

 public:
  std::vector<uint8_t> memory;
};

template <typename Check>
void for_every_group(Check check) {
  std::mt19937_64 random(testing::seed());
  for (const size_t bytes_of_head : std::initializer_list<size_t>{1, 33, 64, 256}) {
    for (const size_t count : std::initializer_list<size_t>{1, 2}) {
      HeadsOfTokens engine(3, 4, bytes_of_head, random);
      for (size_t first = 0; first + count <= 4; first += count) {
        check(engine, first, count, random);
      }
    }
  }
}

std::string_view text_of(const char* fault) { return fault == nullptr ? "" : fault; }

}  // namespace

TEST(a_group_is_gathered_out_of_all_heads_and_the_rest_of_its_extent_is_zero) {
  for_every_group([](HeadsOfTokens& engine, size_t first, size_t count, std::mt19937_64&) {
    const CacheView view = engine.view(first, count);
    const std::vector<int64_t> ids = {3, 0, 4};
    const size_t filled = view.payload_bytes(ids.size());
    for (const size_t size : {filled, filled + 77}) {
      std::vector<uint8_t> extent(size + 1, 0xEE);
      const uint32_t crc = gather_extent(view, 0, ids, extent.data(), size);
      for (size_t i = 0; i < size; ++i) {
        EXPECT(extent[i] == (i < filled ? engine.memory[engine.place_of(ids, first, count, i)] : 0));
      }
      EXPECT(extent[size] == 0xEE);
      EXPECT(crc == crc32c(0, extent.data(), size));
    }
  });
}

TEST(a_group_is_scattered_among_the_others_heads_which_stay) {
  for_every_group([](HeadsOfTokens& engine, size_t first, size_t count, std::mt19937_64& random) {
    const CacheView view = engine.view(first, count);
    const std::vector<int64_t> ids = {2, 4, 1};
    std::vector<uint8_t> extent(view.payload_bytes(ids.size()) + 50);
    std::generate(extent.begin(), extent.end(), [&] { return static_cast<uint8_t>(random()); });
    const size_t skipped = random() % ids.size();
    std::vector<uint8_t> expected = engine.memory;
    for (size_t i = 0; i < extent.size() - 50; ++i) {
      if (i / view.plane_block_bytes % ids.size() != skipped) {
        expected[engine.place_of(ids, first, count, i)] = extent[i];
      }
    }
    std::vector<int64_t> partly = ids;
    partly[skipped] = SKIP_BLOCK;
    EXPECT(scatter_extent(view, 0, partly, extent.data(), extent.size()) == crc32c(0, extent.data(), extent.size()));
    EXPECT(engine.memory == expected);
  });
}

TEST(a_plain_copy_of_runs_gives_what_a_gather_gives) {
  for_every_group([](HeadsOfTokens& engine, size_t first, size_t count, std::mt19937_64&) {
    const CacheView view = engine.view(first, count);
    const std::vector<int64_t> ids = {1, 3};
    std::vector<uint8_t> plain(view.payload_bytes(ids.size()));
    std::vector<uint8_t> gathered(plain.size());
    EXPECT(plain_fault(view, ids, ids.size(), plain.size()) == nullptr);
    copy_blocks_plain(PlainCopy::GATHER, view, ids, ids.size(), plain.data());
    static_cast<void>(gather_payload(view, 0, ids, gathered.data()));
    EXPECT(plain == gathered);
  });
}

TEST(a_load_of_some_extents_brings_these_and_no_others) {
  for (const unsigned threads : {1U, 3U}) {
    for (const uint64_t payload : std::initializer_list<uint64_t>{100, 4096, 90000}) {
      CopySetting setting(CHUNKS, 6, payload + 200, testing::seed());
      const std::vector<uint32_t> numbers = {1, 2, 5};
      CopyPool pool(threads);
      const auto job = start_load(pool, setting.load_plan_of(numbers, payload));
      EXPECT(job->wait(LONG_S));
      EXPECT(job->chunks() == CHUNKS && job->reason() == LoadReason::COMPLETE && job->extents() == 3);
      for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
        for (uint32_t extent = 0; extent < 6; ++extent) {
          const bool is_asked = std::find(numbers.begin(), numbers.end(), extent) != numbers.end();
          const std::vector<uint8_t> zeros(payload + 200);
          const uint8_t* got = setting.block(chunk, extent);
          EXPECT(std::memcmp(got, is_asked ? setting.extent(chunk, extent) : zeros.data(), payload) == 0);
          EXPECT(std::memcmp(got + payload, zeros.data(), 200) == 0);
        }
      }
    }
  }
}

TEST(a_flipped_bit_counts_in_an_extent_that_is_asked_for_to_its_last_byte) {
  CopySetting setting(CHUNKS, 4, 5000, testing::seed());
  setting.extent(2, 0)[7] ^= 1;     // nobody asks for it
  setting.extent(5, 3)[4999] ^= 1;  // behind the payload
  CopyPool pool(2);
  const auto job = start_load(pool, setting.load_plan_of({1, 3}, 4000));
  EXPECT(job->wait(LONG_S));
  EXPECT(job->chunks() == 5 && job->reason() == LoadReason::CHECKSUM);
}

TEST(an_extent_is_copied_once_it_has_landed_whatever_its_place_in_the_load) {
  CopySetting setting(CHUNKS, 4, 5000, testing::seed());
  for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
    setting.table->set_landed(setting.slot(chunk), 3);
  }
  CopyPool pool(2);
  const auto job = start_load(pool, setting.load_plan_of({0, 2, 3}, 5000));
  EXPECT(job->wait_extent(1, LONG_S) == ExtentState::IN_PLACE);
  EXPECT(job->wait_extent(2, 0.0) == ExtentState::TIMED_OUT);
  for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
    setting.table->set_landed(setting.slot(chunk), 4);
  }
  EXPECT(job->wait(LONG_S));
  EXPECT(job->chunks() == CHUNKS);
}

TEST(a_save_of_some_extents_writes_these_and_no_others) {
  CopySetting setting(CHUNKS, 5, 3000, testing::seed());
  std::mt19937_64 random(testing::seed());
  std::generate(setting.engine.begin(), setting.engine.end(), [&] { return static_cast<uint8_t>(random()); });
  const std::vector<uint8_t> before(setting.arena->data(), setting.arena->data() + setting.arena->size());
  SavePlan plan = setting.save_plan();
  plan.view = setting.view_of({0, 2, 4}, 2500);
  plan.first_extent = 1;
  plan.extents = 2;
  plan.payload_bytes = 2500;
  plan.map = {{1, 3}, 3000};
  EXPECT(save_fault(plan) == nullptr);
  CopyPool pool(2);
  const auto job = std::make_shared<SaveJob>(plan);
  EXPECT(announce(pool, job, 1) && announce(pool, job, 0));
  EXPECT(job->wait(LONG_S));
  const std::vector<uint32_t> sums = job->checksums();
  for (size_t chunk = 0; chunk < CHUNKS; ++chunk) {
    for (uint32_t extent = 0; extent < 5; ++extent) {
      const uint8_t* there = setting.extent(chunk, extent);
      if (extent % 2 == 0) {
        EXPECT(std::memcmp(there, &before[setting.offset(chunk) + extent * 3000], 3000) == 0);
        continue;
      }
      const uint32_t own = extent / 2;
      EXPECT(std::memcmp(there, setting.block(chunk, 2 * own + 2), 2500) == 0);
      EXPECT(std::all_of(there + 2500, there + 3000, [](uint8_t byte) { return byte == 0; }));
      EXPECT(sums[chunk * 2 + own] == crc32c(0, there, 3000));
    }
  }
}

TEST(extents_that_are_not_there_are_refused) {
  CopySetting setting(CHUNKS, 4, 4096, testing::seed());
  const auto fault_of = [&](const std::vector<uint32_t>& numbers, uint64_t bytes, uint32_t extents) {
    LoadPlan plan = setting.load_plan_of({0, 1}, 4096);
    plan.extents = extents;
    plan.map = {numbers, bytes};
    SavePlan save = setting.save_plan();
    save.extents = extents;
    save.map = plan.map;
    EXPECT((save_fault(save) == nullptr) == (load_fault(plan) == nullptr));
    return text_of(load_fault(plan));
  };
  EXPECT(fault_of({1, 3}, 4096, 2).empty());
  EXPECT(fault_of({1, 3}, 0, 2).empty());
  EXPECT(fault_of({}, 8192, 2).empty());
  EXPECT(fault_of({1, 4}, 4096, 2) == "an extent lies outside the arena");
  EXPECT(fault_of({1, UINT32_MAX - 1}, UINT64_MAX / 2, 2) != "");
  EXPECT(fault_of({1, UINT32_MAX}, 4096, 2) == "expected a number below 2^32 - 1 for each extent of the view");
  EXPECT(fault_of({1}, 4096, 2) == "expected a number below 2^32 - 1 for each extent of the view");
  EXPECT(fault_of({3, 1}, 4096, 2) == "the numbers of the extents do not rise");
  EXPECT(fault_of({2, 2}, 4096, 2) == "the numbers of the extents do not rise");
  EXPECT(fault_of({1, 2}, 4095, 2) == "payload_bytes must be positive, and an extent have as many");
}

TEST(runs_divide_what_a_block_has_of_a_plane) {
  CacheView view{{}, 1, 3, 12, 0, 12};
  for (const uint64_t runs : std::initializer_list<uint64_t>{1, 3, 12}) {
    view.runs = runs;
    EXPECT(view_fault(view) == nullptr);
  }
  for (const uint64_t runs : std::initializer_list<uint64_t>{0, 5, 24}) {
    view.runs = runs;
    EXPECT(text_of(view_fault(view)) == "runs must be positive and divide plane_block_bytes");
  }
}
