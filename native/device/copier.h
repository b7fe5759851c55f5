// Copies on one stream, by the device's method.
//
//   BATCH    cuMemcpyBatchAsync, BATCH_COPIES_MAX at once; one by one where it takes no such memory
//   KERNEL   the gather kernel, with descriptors in pinned memory; a piece is PIECE_BYTES at most, so that a long run is many threads' work
//   SINGLE   cuMemcpyAsync for each run
//
// All three copy the same bytes. A kernel that touched an address which the device cannot reach would end the context, and the engine
// with it: where the caller does not vouch for the addresses, KERNEL copies one by one.
// A failure leaves some of the copies queued: what they write to must not be used for anything else before the stream is through them.
// Threads: one at a time.
#pragma once

#include <array>
#include <memory>

#include "device/copy_runs.h"
#include "device/device_event.h"
#include "device/pinned_memory.h"

namespace kvpool {

struct CopyDescriptor {
  cuda::Address target;
  cuda::Address source;
  uint64_t size;
};
static_assert(sizeof(CopyDescriptor) == 24);

// The descriptors of the last LAUNCHES launches of one stream.
//
//   free ─claim─► being filled ─commit─► read by a launch ─its event─► free
//
// Bounded: who claims more than there are waits for the oldest launch. One that goes while the device does not answer leaves its memory
// behind: a launch may still read it.
class DescriptorRing {
 public:
  static constexpr size_t LAUNCHES = 8;
  static constexpr size_t DESCRIPTORS = 4096;

  // REQUIRES: the device outlives the ring.
  [[nodiscard]] static std::unique_ptr<DescriptorRing> make(const Device& device, DeviceStatus& status);

  ~DescriptorRing();
  DescriptorRing(const DescriptorRing&) = delete;
  DescriptorRing& operator=(const DescriptorRing&) = delete;

  // Room for DESCRIPTORS of the next launch; nullptr, and why, where the launch that has it does not end.
  [[nodiscard]] CopyDescriptor* claim(cuda::Stream stream, DeviceStatus& status);
  // The stream was given a launch that reads what was claimed last.
  [[nodiscard]] DeviceStatus commit(cuda::Stream stream);
  // Whether another stream may use it: an event stands behind every launch.
  [[nodiscard]] bool is_recorded() const noexcept;

 private:
  struct Launch {
    std::unique_ptr<EventHandle> event;
    bool is_recorded = true;
  };
  explicit DescriptorRing(std::unique_ptr<PinnedMemory> memory) noexcept : memory_(std::move(memory)) {}

  std::array<Launch, LAUNCHES> launches_;
  std::unique_ptr<PinnedMemory> memory_;
  size_t next_ = 0;
};

class Copier {
 public:
  static constexpr size_t BATCH_COPIES_MAX = 8192;  // guess: bounds what one call takes of the driver's memory
  static constexpr uint64_t PIECE_BYTES = 32 << 10;  // guess: 8 loads of 16 bytes for each of 256 threads

  explicit Copier(std::shared_ptr<Device> device) noexcept : device_(std::move(device)) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Gives the stream all runs. `is_reachable`: the device's kernels reach every address. REQUIRES: the context is current.
  [[nodiscard]] DeviceStatus copy_many(CopyRuns& runs, bool is_reachable, cuda::Stream stream);

 private:
  DeviceStatus copy_batches(CopyRuns& runs, cuda::Stream stream) const;
  DeviceStatus copy_pieces(const CopyRuns& runs, cuda::Stream stream);
  DeviceStatus copy_singly(const CopyRuns& runs, cuda::Stream stream) const;
  DeviceStatus launch(CopyDescriptor* descriptors, unsigned count, cuda::Stream stream);

  const std::shared_ptr<Device> device_;
  std::unique_ptr<DescriptorRing> ring_;
};

}  // namespace kvpool
