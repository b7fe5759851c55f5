// Copies between chunks and an engine's blocks, by all three methods: which bytes move, in which order, and what fails how.
#include "device/device_stream.h"

#include "tests/device/engine_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr std::array<Shape, 5> SHAPES = {{
    {1, 1, 0, 1, 1},
    {2, 37, 5, 3, 4},
    {2, 4096, 0, 4, 8},
    {1, 1024, 1024, 2, 16},
    {2, 20'003, 13, 2, 3},
}};

template <typename Test>
void with_each_method(Test test) {
  for (const CopyMethod method : METHODS) {
    for (const Shape& shape : SHAPES) {
      for (const bool on_device : {false, true}) {
        const auto device = open_device(method);
        const auto stream = make_stream(device);
        Engine engine(device, *stream, shape);
        Chunks chunks(device, *stream, engine, on_device);
        test(*stream, engine, chunks);
      }
    }
  }
}

std::string text_of(const Device& device, DeviceStatus status) { return status.ok() ? "" : device.text(status); }

}  // namespace

TEST(blocks_get_their_chunks_bytes_and_nothing_else_changes) {
  std::mt19937 dice(static_cast<unsigned>(seed()));
  with_each_method([&](DeviceStream& stream, Engine& engine, Chunks& chunks) {
    const auto ids = some_ids(engine.shape.chunks * engine.shape.chunk_blocks, dice);
    const ExtentCopy copy{engine.view, 1, ids, chunks.addresses, engine.payload_bytes()};
    EXPECT(extent_fault(copy) == nullptr);
    EXPECT(stream.scatter(copy).ok());
    finish(stream);
    engine.visit(ids, [&](uint8_t* block, uint64_t offset, size_t chunk) {
      std::memcpy(block, chunks.model(chunk) + offset, engine.shape.plane_block_bytes);
    });
    EXPECT(engine.holds() && chunks.holds());
  });
}

TEST(chunks_get_their_blocks_bytes_and_nothing_else_changes) {
  std::mt19937 dice(static_cast<unsigned>(seed()));
  with_each_method([&](DeviceStream& stream, Engine& engine, Chunks& chunks) {
    const auto ids = some_ids(engine.shape.chunks * engine.shape.chunk_blocks, dice);
    EXPECT(stream.gather({engine.view, 1, ids, chunks.addresses, engine.payload_bytes()}).ok());
    finish(stream);
    engine.visit(ids, [&](const uint8_t* block, uint64_t offset, size_t chunk) {
      std::memcpy(chunks.model(chunk) + offset, block, engine.shape.plane_block_bytes);
    });
    EXPECT(engine.holds() && chunks.holds());
  });
}

TEST(rows_are_copied_whatever_their_sizes) {
  for (const CopyMethod method : METHODS) {
    const auto device = open_device(method);
    const auto stream = make_stream(device);
    const auto memory = allocate(device, 4 << 20);
    const auto bytes = random_bytes(600'000, 3);
    const auto pinned = PinnedMemory::allocate(*device, bytes.size());
    std::memcpy(pinned.memory->data(), bytes.data(), bytes.size());
    std::vector<uint64_t> targets;
    std::vector<uint64_t> sources;
    std::vector<uint64_t> sizes;
    uint64_t at = 0;
    for (const uint64_t size : {1ULL, 0ULL, 15ULL, 16ULL, 17ULL, 4095ULL, 100'000ULL, 400'001ULL}) {
      targets.push_back(memory->address() + 2 * at + 3);
      sources.push_back(address_of(pinned.memory->data()) + at);
      sizes.push_back(size);
      at += size;
    }
    EXPECT(stream->copy(targets, sources, sizes).ok());
    finish(*stream);
    for (size_t row = 0; row < sizes.size(); ++row) {
      const uint64_t from = sources[row] - address_of(pinned.memory->data());
      const auto begin = bytes.begin() + static_cast<int64_t>(from);
      const std::vector<uint8_t> expected(begin, begin + static_cast<int64_t>(sizes[row]));
      EXPECT(sizes[row] == 0 || read_from(*stream, targets[row], sizes[row]) == expected);
    }
  }
}

TEST(neighbours_are_copied_as_one) {
  const auto device = open_device(CopyMethod::SINGLE);
  const auto stream = make_stream(device);
  Engine engine(device, *stream, {2, 512, 0, 2, 4});
  Chunks chunks(device, *stream, engine, true);
  const std::vector<int64_t> ids = {3, 4, 5, 6, 10, 11, 20, 21};
  const uint64_t before = calls("cuMemcpyAsync");
  EXPECT(stream->scatter({engine.view, 1, ids, chunks.addresses, engine.payload_bytes()}).ok());
  EXPECT(calls("cuMemcpyAsync") - before == 2 * (1 + 2));
  finish(*stream);
}

TEST(what_does_not_fit_is_refused_before_anything_is_copied) {
  CacheView view{{nullptr, nullptr}, 2, 10, 64, 640, 64};
  const std::vector<int64_t> ids = {0, 9, SKIP_BLOCK, 3};
  const std::vector<uint64_t> chunks = {4096, 8192};
  EXPECT(extent_fault({view, 1, ids, chunks, 256}) == nullptr);
  EXPECT(extent_fault({view, 2, ids, chunks, 256}) != nullptr);
  EXPECT(extent_fault({view, 1, ids, chunks, 255}) != nullptr);
  EXPECT(extent_fault({view, 1, std::vector<int64_t>{0, 1, 2}, chunks, 256}) != nullptr);
  EXPECT(extent_fault({view, 1, std::vector<int64_t>{0, 10, 2, 3}, chunks, 256}) != nullptr);
  EXPECT(extent_fault({view, 1, std::vector<int64_t>{0, -2, 2, 3}, chunks, 256}) != nullptr);
  EXPECT(extent_fault({view, 1, ids, {}, 256}) != nullptr);
  EXPECT(extent_fault({view, 1, {}, {}, 256}) == nullptr);
  view.planes = 0;
  EXPECT(extent_fault({view, 1, ids, chunks, 256}) != nullptr);
}

TEST(a_stream_goes_on_only_behind_the_event_that_it_waits_for) {
  for (const CopyMethod method : METHODS) {
    const auto device = open_device(method);
    const auto engine = make_stream(device);
    const auto stream = make_stream(device);
    const auto first = allocate(device, 1 << 20);
    const auto second = allocate(device, 1 << 20);
    for (uint64_t round = 0; round < 30; ++round) {
      const auto bytes = random_bytes(200'000, round);
      const auto pinned = PinnedMemory::allocate(*device, bytes.size());
      std::memcpy(pinned.memory->data(), bytes.data(), bytes.size());
      EXPECT(copy_one(*engine, first->address(), address_of(pinned.memory->data()), bytes.size()).ok());
      const DeviceEventResult marked = DeviceEvent::record(device, engine->get());
      EXPECT(marked.status.ok());
      EXPECT(stream->wait_for(*marked.event).ok());
      EXPECT(copy_one(*stream, second->address(), first->address(), bytes.size()).ok());
      EXPECT(read_from(*stream, second->address(), bytes.size()) == bytes);
    }
  }
}

TEST(an_event_is_done_when_what_was_given_before_it_is) {
  const auto device = open_device();
  const auto stream = make_stream(device);
  const auto memory = allocate(device, 1 << 20);
  const std::vector<uint8_t> bytes(1000, 7);
  order("hang 1");
  EXPECT(copy_one(*stream, memory->address(), address_of(bytes.data()), bytes.size()).ok());
  const DeviceEventResult recorded = stream->record();
  bool is_done = true;
  EXPECT(recorded.event->query(is_done).ok() && !is_done);
  EXPECT(recorded.event->wait(0.02, is_done).ok() && !is_done);
  EXPECT(recorded.event->wait(-1, is_done).ok() && !is_done);
  order("clear 1");
  EXPECT(recorded.event->wait(LONG_S, is_done).ok() && is_done);
  EXPECT(recorded.event->query(is_done).ok() && is_done);
}

TEST(each_call_that_fails_is_named) {
  const auto pairs = std::vector<std::pair<CopyMethod, std::vector<const char*>>>{
      {CopyMethod::BATCH, {"cuMemcpyBatchAsync", "cuCtxPushCurrent_v2"}},
      {CopyMethod::SINGLE, {"cuMemcpyAsync", "cuCtxPushCurrent_v2"}},
      {CopyMethod::KERNEL, {"cuMemHostAlloc", "cuEventCreate", "cuEventQuery", "cuLaunchKernel", "cuEventRecord"}},
  };
  for (const auto& [method, names] : pairs) {
    const auto device = open_device(method);
    const auto stream = make_stream(device);
    const auto memory = allocate(device, 1 << 20);
    const cuda::Address from = memory->address();
    for (const char* const name : names) {
      order(std::string("fail ") + name + " 1 999");
      EXPECT(text_of(*device, copy_one(*stream, from + 4096, from, 100)) == std::string(name) + " failed: CUDA_ERROR_UNKNOWN (999)");
    }
    for (size_t launch = 0; launch <= DescriptorRing::LAUNCHES; ++launch) {
      EXPECT(copy_one(*stream, from + 4096, from, 100).ok());
    }
    finish(*stream);
  }
}

TEST(events_and_streams_that_cannot_be_had_are_named) {
  const auto device = open_device();
  const auto stream = make_stream(device);
  order("fail cuStreamCreate 1 2\nfail cuEventCreate 1 2");
  EXPECT(text_of(*device, DeviceStream::make(device).status) == "cuStreamCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
  EXPECT(text_of(*device, stream->record().status) == "cuEventCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
  order("fail cuEventRecord 1 999");
  EXPECT(text_of(*device, stream->record().status) == "cuEventRecord failed: CUDA_ERROR_UNKNOWN (999)");
  finish(*stream);
  const auto event = stream->record().event;
  order("fail cuEventQuery 1 999\nfail cuStreamWaitEvent 1 999");
  bool is_done = true;
  EXPECT(text_of(*device, event->query(is_done)) == "cuEventQuery failed: CUDA_ERROR_UNKNOWN (999)" && !is_done);
  EXPECT(text_of(*device, stream->wait_for(*event)) == "cuStreamWaitEvent failed: CUDA_ERROR_UNKNOWN (999)");
  EXPECT(text_of(*device, DeviceEvent::record(device, reinterpret_cast<cuda::Stream>(uintptr_t{0xBAD0})).status) ==
         "cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE (400)");
  EXPECT(DeviceEvent::record(device, nullptr).status.ok());  // the default stream
}

TEST(threads_share_a_stream) {
  for (const CopyMethod method : METHODS) {
    const auto device = open_device(method);
    const auto stream = make_stream(device);
    const auto memory = allocate(device, 4 << 20);
    std::vector<std::thread> threads;
    for (uint64_t number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        const cuda::Address own = memory->address() + number * 4096;
        const auto bytes = random_bytes(4096, number);
        for (int round = 0; round < 10; ++round) {
          write_to(*stream, own, bytes);
          EXPECT(read_from(*stream, own, 4096) == bytes);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(everything_was_given_back) { EXPECT(live_sum() == 0); }
