// The gather kernel's descriptors, and what the kernel is not given.
#include "device/copier.h"

#include "tests/device/engine_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(kernels_are_not_given_what_they_cannot_reach) {
  const auto device = open_device(CopyMethod::KERNEL);
  const auto stream = make_stream(device);
  Engine engine(device, *stream, {2, 100, 0, 1, 2});
  auto chunk = random_bytes(engine.payload_bytes(), 4);
  const std::vector<uint64_t> addresses = {address_of(chunk.data())};
  const std::vector<int64_t> ids = {4, 9};
  const uint64_t before = calls("cuLaunchKernel");
  EXPECT(stream->scatter({engine.view, 1, ids, addresses, engine.payload_bytes()}).ok());
  finish(*stream);
  EXPECT(calls("cuLaunchKernel") == before);
  std::memcpy(engine.model(0, 4), chunk.data(), 100);
  std::memcpy(engine.model(0, 9), chunk.data() + 100, 100);
  std::memcpy(engine.model(1, 4), chunk.data() + 200, 100);
  std::memcpy(engine.model(1, 9), chunk.data() + 300, 100);
  EXPECT(engine.holds());
}

TEST(descriptors_are_bounded_and_no_launch_reads_those_of_another) {
  constexpr uint64_t COPIES = DescriptorRing::LAUNCHES * DescriptorRing::DESCRIPTORS * 2 + 5;
  const auto device = open_device(CopyMethod::KERNEL);
  const auto stream = make_stream(device);
  const auto memory = allocate(device, COPIES * 16);
  const auto pinned = PinnedMemory::allocate(*device, COPIES * 8);
  const auto bytes = random_bytes(COPIES * 8, 9);
  std::memcpy(pinned.memory->data(), bytes.data(), bytes.size());
  std::vector<uint64_t> targets(COPIES);
  std::vector<uint64_t> sources(COPIES);
  const std::vector<uint64_t> sizes(COPIES, 8);
  for (uint64_t copy = 0; copy < COPIES; ++copy) {
    targets[copy] = memory->address() + copy * 16;
    sources[copy] = address_of(pinned.memory->data()) + copy * 8;
  }
  EXPECT(stream->copy(targets, sources, sizes).ok());
  EXPECT(live("host") == 2);  // the source, and the descriptors
  finish(*stream);
  const auto found = read_from(*stream, memory->address(), COPIES * 16);
  bool same = true;
  for (uint64_t copy = 0; copy < COPIES; ++copy) {
    same = same && std::memcmp(&found[copy * 16], &bytes[copy * 8], 8) == 0;
  }
  EXPECT(same);
}

TEST(streams_pass_their_descriptors_on) {
  const auto device = open_device(CopyMethod::KERNEL);
  const auto memory = allocate(device, 1 << 20);
  for (int round = 0; round < 3; ++round) {
    const auto stream = make_stream(device);
    EXPECT(copy_one(*stream, memory->address(), memory->address() + 4096, 100).ok());
    finish(*stream);
  }
  EXPECT(live("host") == 1 && live("events") == DescriptorRing::LAUNCHES);
}

TEST(everything_was_given_back) { EXPECT(live_sum() == 0); }

// Descriptors that a launch may still read are never given back: the last test.
TEST(a_launch_without_an_event_behind_it_is_marked_before_its_descriptors_are_used_again) {
  const auto device = open_device(CopyMethod::KERNEL);
  const auto memory = allocate(device, 1 << 20);
  {
    const auto stream = make_stream(device);
    order("fail cuEventRecord 1 999");
    EXPECT(!copy_one(*stream, memory->address(), memory->address() + 4096, 100).ok());
    finish(*stream);
  }
  EXPECT(live("host") == 1);
  const auto stream = make_stream(device);
  EXPECT(copy_one(*stream, memory->address(), memory->address() + 4096, 100).ok());
  EXPECT(live("host") == 2);  // those of the first stream are not used again
  order("fail cuEventRecord 1 999");
  EXPECT(!copy_one(*stream, memory->address(), memory->address() + 4096, 100).ok());
  for (size_t launch = 0; launch < 2 * DescriptorRing::LAUNCHES; ++launch) {
    EXPECT(copy_one(*stream, memory->address(), memory->address() + 4096, 100).ok());
  }
  finish(*stream);
}
