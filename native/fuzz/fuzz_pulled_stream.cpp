// What an owner sends, which may be anything and cut anywhere: each chunk ends once, a chunk that is done has the bytes of its
// checksums, and nothing is written outside the slots.
#include <map>
#include <set>
#include <span>

#include "checksum/crc32c.h"
#include "fuzz_input.h"
#include "net/extent_receiver.h"
#include "shared_index/chunk_table.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

constexpr uint32_t CHUNKS = 3;
constexpr uint8_t GUARD = 0xA5;

// Gives its bytes in pieces, then ends.
class InputStream final : public ByteStream {
 public:
  InputStream(std::vector<uint8_t> bytes, size_t piece) : bytes_(std::move(bytes)), piece_(piece) {}
  void end() noexcept override {}

 protected:
  Step send_some(std::span<const iovec> parts, std::chrono::nanoseconds) override {
    size_t bytes = 0;
    for (const iovec& part : parts) {
      bytes += part.iov_len;
    }
    return {bytes, StreamFault::NONE};
  }
  Step receive_some(std::span<const iovec> parts, bool, std::chrono::nanoseconds) override {
    size_t given = 0;
    for (const iovec& part : parts) {
      const size_t count = std::min({part.iov_len, bytes_.size() - at_, piece_ - given});
      std::memcpy(part.iov_base, bytes_.data() + at_, count);
      at_ += count;
      given += count;
    }
    return given > 0 ? Step{given, StreamFault::NONE} : Step{0, StreamFault::CLOSED};
  }

 private:
  const std::vector<uint8_t> bytes_;
  const size_t piece_;
  size_t at_ = 0;
};

void append(std::vector<uint8_t>& bytes, const StreamMark& mark) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(&mark);
  bytes.insert(bytes.end(), begin, begin + sizeof(mark));
}

// Runs behind one mark, and the bytes of their extents.
void append(std::vector<uint8_t>& bytes, const std::vector<StreamRun>& runs, const std::vector<uint32_t>& crcs,
            const std::vector<uint8_t>& data, uint64_t size) {
  std::vector<uint8_t> mark(MARK_BYTES_MAX);
  mark.resize(write_extents_mark(mark.data(), runs, crcs, size));
  bytes.insert(bytes.end(), mark.begin(), mark.end());
  bytes.insert(bytes.end(), data.begin(), data.end());
}

// Steps of an owner that mostly keeps to the format: marks with their extents, and other bytes between them.
std::vector<uint8_t> stream_of(Input& input, uint32_t extents, uint64_t extent_bytes) {
  std::vector<uint8_t> bytes;
  std::map<uint32_t, uint32_t> next;
  while (!input.is_empty() && bytes.size() < (1U << 20)) {
    const auto step = input.number<uint8_t>();
    if (step < 200) {
      std::vector<StreamRun> runs;
      std::vector<uint32_t> crcs;
      std::vector<uint8_t> data;
      for (uint64_t left = 1 + input.up_to(4); left > 0; --left) {
        const auto chunk = static_cast<uint32_t>(input.up_to(CHUNKS));
        const uint32_t most = extents - std::min(extents, next[chunk]);
        const auto count = static_cast<uint32_t>(input.up_to(most));
        const uint32_t first = step % 16 == 0 ? static_cast<uint32_t>(input.awkward()) : count == 0 ? 0 : next[chunk];
        runs.push_back({chunk, first, count});
        next[chunk] += count;
        for (uint32_t extent = 0; extent < count; ++extent) {
          const std::vector<uint8_t> some(extent_bytes, input.number<uint8_t>());
          crcs.push_back(step % 10 == 3 ? step : crc32c(0, some.data(), some.size()));
          data.insert(data.end(), some.begin(), some.end());
        }
      }
      append(bytes, runs, crcs, data, step % 32 == 0 ? input.awkward() : extent_bytes);
    } else if (step < 220) {
      const auto chunk = static_cast<uint32_t>(input.up_to(CHUNKS));
      append(bytes, {{chunk, 0, step < 210 ? 0 : static_cast<uint32_t>(input.awkward())}}, {}, {}, 0);
    } else if (step < 240) {
      append(bytes, make_waiting_mark());
    } else {
      const auto noise = input.bytes(static_cast<size_t>(input.up_to(64)));
      bytes.insert(bytes.end(), noise.begin(), noise.end());
    }
  }
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const uint32_t extents = 1 + static_cast<uint32_t>(input.up_to(3));
  const uint64_t extent_bytes = input.number<uint8_t>() % 8 == 0 ? 140'000 : 1 + input.up_to(300);
  const uint64_t slot_bytes = round_up(extents * extent_bytes, PAGE_BYTES) + PAGE_BYTES;
  const auto arena = Mapping::create("fuzz-arena", CHUNKS * slot_bytes, false).mapping;
  const IndexShape shape{64, {{arena->size(), CHUNKS, uint64_t{CHUNKS} * extents}}};
  const auto words = Mapping::create("fuzz-index", shape.total_bytes(), false).mapping;
  const uint8_t epoch[16] = {1};
  ChunkTable table(words, shape, epoch);
  LandingBoard board(words);
  PullPlan plan;
  plan.extents = extents;
  plan.extent_bytes = extent_bytes;
  plan.stall = std::chrono::seconds(60);
  plan.deadline = StreamClock::now() + plan.stall;
  for (uint32_t slot = 0; slot < CHUNKS; ++slot) {
    table.open_slot({DRAM_REGION, slot}, slot * extents);
    table.set_landed({DRAM_REGION, slot}, 0);
    plan.rows.push_back({slot * slot_bytes, {DRAM_REGION, slot}});
  }
  std::memset(arena->data(), GUARD, arena->size());
  const size_t piece = 1 + static_cast<size_t>(input.awkward() % 300'000);
  InputStream stream(stream_of(input, extents, extent_bytes), piece);
  std::map<uint32_t, PullStatus> ended;
  std::set<uint32_t> unmarked;
  plan.may_come_again = true;
  SlotLanding landing(plan, 0, *arena, board, [&](std::span<const PullOutcome> outcomes) {
    for (const PullOutcome& outcome : outcomes) {
      FUZZ_EXPECT(ended.emplace(outcome.chunk, outcome.status).second);
      FUZZ_EXPECT(!outcome.is_unmarked || (outcome.status == PullStatus::FAILED && unmarked.insert(outcome.chunk).second));
    }
  });
  ExtentReceiver(plan, 0, landing).run(stream);
  FUZZ_EXPECT(ended.size() == CHUNKS);
  for (uint32_t slot = 0; slot < CHUNKS; ++slot) {
    const uint8_t* const chunk = arena->data() + slot * slot_bytes;
    const uint32_t mark = unmarked.contains(slot) ? 0 : LANDING_FAILED;
    FUZZ_EXPECT(table.landed({DRAM_REGION, slot}) == (ended[slot] == PullStatus::DONE ? extents : mark));
    for (uint32_t extent = 0; ended[slot] == PullStatus::DONE && extent < extents; ++extent) {
      FUZZ_EXPECT(crc32c(0, chunk + extent * extent_bytes, extent_bytes) == table.checksum({DRAM_REGION, slot}, extent));
    }
    FUZZ_EXPECT(std::all_of(chunk + extents * extent_bytes, chunk + slot_bytes, [](uint8_t byte) { return byte == GUARD; }));
  }
  return 0;
}
