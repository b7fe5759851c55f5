// An emulated device for native tests: how it is opened, ordered about, and counted. `tests/rigs/device/emulation` has the driver.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/types.h"
#include "device/device.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "device/pinned_memory.h"
#include "tests/harness.h"

namespace kvpool::testing {

inline constexpr const char* EMULATED = KVPOOL_EMULATED_DRIVER;
inline constexpr double LONG_S = 60.0;

inline constexpr std::array<const char*, 9> LIVE_KINDS = {"contexts",      "memory",  "reservations", "mappings", "host",
                                                          "registrations", "streams", "events",       "modules"};

template <typename Function>
Function* emulated_symbol(const char* name) {
  static void* const library = dlopen(EMULATED, RTLD_NOW | RTLD_LOCAL);
  KVPOOL_CHECK(library != nullptr);
  void* const found = dlsym(library, name);
  KVPOOL_CHECK(found != nullptr);
  return reinterpret_cast<Function*>(found);
}

inline void order(const std::string& text) { emulated_symbol<void(const char*)>("kvpool_emulated_control")(text.c_str()); }
inline uint64_t live(const char* kind) { return emulated_symbol<uint64_t(const char*)>("kvpool_emulated_live")(kind); }
inline uint64_t calls(const char* name) { return emulated_symbol<uint64_t(const char*)>("kvpool_emulated_calls")(name); }

inline uint64_t live_sum() {
  uint64_t sum = 0;
  for (const char* const kind : LIVE_KINDS) {
    sum += live(kind);
  }
  return sum;
}

// Has the driver offer one method to devices that are opened from now on.
inline void offer(CopyMethod method) {
  setenv("KVPOOL_EMULATED_VERSION", method == CopyMethod::BATCH ? "13000" : "12040", 1);
  setenv("KVPOOL_EMULATED_JIT", method == CopyMethod::SINGLE ? "0" : "1", 1);
}

inline constexpr std::array<CopyMethod, 3> METHODS = {CopyMethod::BATCH, CopyMethod::KERNEL, CopyMethod::SINGLE};

inline std::shared_ptr<Device> open_device(CopyMethod method = CopyMethod::BATCH, int ordinal = 0) {
  offer(method);
  DeviceResult opened = Device::open(EMULATED, ordinal);
  KVPOOL_CHECK(opened.device != nullptr);
  KVPOOL_CHECK(opened.device->copy_method() == method);
  return opened.device;
}

inline std::shared_ptr<DeviceMemory> allocate(const std::shared_ptr<Device>& device, uint64_t size) {
  DeviceMemoryResult made = DeviceMemory::allocate(device, size);
  KVPOOL_CHECK(made.memory != nullptr);
  return made.memory;
}

inline std::shared_ptr<DeviceStream> make_stream(const std::shared_ptr<Device>& device) {
  DeviceStreamResult made = DeviceStream::make(device);
  KVPOOL_CHECK(made.stream != nullptr);
  return made.stream;
}

// Waits for everything that the stream was given.
inline void finish(DeviceStream& stream) {
  const DeviceEventResult recorded = stream.record();
  KVPOOL_CHECK(recorded.status.ok());
  bool is_done = false;
  KVPOOL_CHECK(recorded.event->wait(LONG_S, is_done).ok());
  KVPOOL_CHECK(is_done);
}

inline cuda::Address address_of(const void* bytes) { return reinterpret_cast<uintptr_t>(bytes); }

inline DeviceStatus copy_one(DeviceStream& stream, cuda::Address target, cuda::Address source, uint64_t size) {
  return stream.copy(std::span(&target, 1), std::span(&source, 1), std::span(&size, 1));
}

inline void write_to(DeviceStream& stream, cuda::Address target, const std::vector<uint8_t>& bytes) {
  KVPOOL_CHECK(copy_one(stream, target, address_of(bytes.data()), bytes.size()).ok());
  finish(stream);
}

inline std::vector<uint8_t> read_from(DeviceStream& stream, cuda::Address source, uint64_t size) {
  std::vector<uint8_t> bytes(size);
  KVPOOL_CHECK(copy_one(stream, address_of(bytes.data()), source, size).ok());
  finish(stream);
  return bytes;
}

inline std::vector<uint8_t> random_bytes(uint64_t size, uint64_t seed) {
  std::mt19937_64 dice(seed);
  std::vector<uint8_t> bytes(size);
  for (uint64_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t word = dice();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), size - at));
  }
  return bytes;
}

// Until the condition holds, a minute at most.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvpool::testing
