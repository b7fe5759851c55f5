// Everything of the emulated driver that a process has one of, and how its calls begin.
//
//   KVPOOL_EMULATED_DEVICES   how many (default 2)      KVPOOL_EMULATED_ORDER    "1,0": which device each ordinal is
//   KVPOOL_EMULATED_BYTES     memory of each (1 GiB)    KVPOOL_EMULATED_VERSION  13000: from 12080 on there is the batch call
//   KVPOOL_EMULATED_JIT       0: no PTX is compiled     KVPOOL_EMULATED_SEED     of all dice; printed, like one that is drawn
//
// Version and JIT are read at each call, the others once.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "streams.h"

namespace emulated {

struct World {
  World() {
    const uint64_t given = number_of("KVPOOL_EMULATED_SEED", 0);
    seed = given != 0 ? given : std::random_device{}();
    std::fprintf(stderr, "emulated device: KVPOOL_EMULATED_SEED=%llu\n", static_cast<unsigned long long>(seed));
    count = static_cast<int>(std::min<uint64_t>(number_of("KVPOOL_EMULATED_DEVICES", 2), DEVICES_MAX));
    const char* const order = std::getenv("KVPOOL_EMULATED_ORDER");
    std::istringstream listed(order != nullptr ? order : "");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      std::string word;
      devices[ordinal].physical = std::getline(listed, word, ',') && !word.empty() ? std::stoi(word) : ordinal;
    }
  }

  // -1: none of this process's devices is this physical one.
  [[nodiscard]] int ordinal_of(int physical) const {
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      if (devices[ordinal].physical == physical) {
        return ordinal;
      }
    }
    return -1;
  }

  // nullptr: no such stream of this process. The three names of a default stream are one.
  std::shared_ptr<Stream> find(CUstream handle, Device* current) {
    const std::lock_guard guard(lock);
    if (reinterpret_cast<uintptr_t>(handle) <= 2) {
      if (current == nullptr) {
        return nullptr;
      }
      auto& stream = defaults[current];
      if (stream == nullptr) {
        stream = Stream::start(*current, memory, faults, seed + 1000);
      }
      return stream;
    }
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
  }
  std::shared_ptr<Event> find(CUevent handle) {
    const std::lock_guard guard(lock);
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
  }

  Faults faults;
  Memory memory;
  Marks marks;
  uint64_t seed = 0;
  int count = 0;
  Device devices[DEVICES_MAX];
  std::atomic<bool> is_initialized = false;
  std::mutex lock;
  std::map<CUstream, std::shared_ptr<Stream>> streams;  // what follows is guarded by lock
  std::map<Device*, std::shared_ptr<Stream>> defaults;
  std::map<CUevent, std::shared_ptr<Event>> events;
  std::set<CUmodule> modules;
  uint64_t last_handle = 0x1000;  // of streams, events and modules: no two are ever the same
};

// Never destroyed: its threads run until the process ends.
inline World& world() {
  static World* const made = new World;
  return *made;
}

inline std::vector<Device*>& contexts() {
  thread_local std::vector<Device*> pushed;
  return pushed;
}

inline Device* current() { return contexts().empty() ? nullptr : contexts().back(); }

inline CUresult begin(const char* name) {
  const CUresult ordered = world().faults.on_call(name);
  return ordered != SUCCESS ? ordered : world().is_initialized ? SUCCESS : NOT_INITIALIZED;
}

// For calls that need a context.
inline CUresult begin_in_context(const char* name) {
  if (const CUresult failed = begin(name); failed != SUCCESS) {
    return failed;
  }
  Device* const device = current();
  return device == nullptr ? INVALID_CONTEXT : device->failure.load();
}

inline bool is_device(int ordinal) { return ordinal >= 0 && ordinal < world().count; }

}  // namespace emulated
