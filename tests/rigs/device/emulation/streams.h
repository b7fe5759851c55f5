// Devices, streams and events: work that is queued now and done later, each stream on a thread of its own.
//
// Work of one stream is done in its order; between streams the order is as the dice fall, and every copy may wait before it begins. A copy
// beyond what its device may touch ends the device: every call on its context answers ILLEGAL_ADDRESS from then on. So does a copy whose
// memory was freed before it was done, also where other memory has its addresses since: it is nobody's who frees too early.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "faults.h"
#include "memory.h"

namespace emulated {

struct Copy {
  CUdeviceptr target;
  CUdeviceptr source;
  size_t size;
};

// A copy and the memory that its addresses were in when it was queued: 0 for the host's.
struct QueuedCopy {
  Copy copy;
  uint64_t target_memory = 0;
  uint64_t source_memory = 0;
};

#if defined(__SANITIZE_THREAD__)
// Unseen by ThreadSanitizer: streams of one device race in its memory where a program lets them, as hardware does.
[[gnu::no_sanitize_thread, gnu::noinline]] inline void copy_unseen(uint8_t* target, const uint8_t* source, size_t size) {
  auto* const to = static_cast<volatile uint8_t*>(target);
  const auto* const from = static_cast<const volatile uint8_t*>(source);
  for (size_t at = 0; at < size; ++at) {
    to[at] = from[at];
  }
}

// What is the host's is seen, so that a program which uses it too early is found.
inline void copy_bytes(const Place& target, const Place& source, size_t begin, size_t size) {
  std::vector<uint8_t> piece(size);
  uint8_t* const to = target.bytes + begin;
  const uint8_t* const from = source.bytes + begin;
  if (source.held) {
    copy_unseen(piece.data(), from, size);
  } else {
    std::memcpy(piece.data(), from, size);
  }
  if (target.held) {
    copy_unseen(to, piece.data(), size);
  } else {
    std::memcpy(to, piece.data(), size);
  }
}
#else
inline void copy_bytes(const Place& target, const Place& source, size_t begin, size_t size) {
  std::memcpy(target.bytes + begin, source.bytes + begin, size);
}
#endif

struct Device {
  int physical = 0;
  std::atomic<int> retained = 0;
  std::atomic<CUresult> failure = SUCCESS;  // once it has one, it keeps it
};

// Marks of all events: guarded by one lock.
struct Marks {
  std::mutex lock;
  std::condition_variable changed;
};

struct Event {
  Device* device = nullptr;
  uint64_t recorded = 0;   // guarded by the lock of Marks
  uint64_t completed = 0;  // guarded by the lock of Marks
};

class Stream {
 public:
  using Work = std::function<void(Stream&)>;

  Stream(Device& device, Memory& memory, Faults& faults, uint64_t seed)
      : device_(device), memory_(memory), faults_(faults), dice_(seed) {}

  static std::shared_ptr<Stream> start(Device& device, Memory& memory, Faults& faults, uint64_t seed) {
    auto stream = std::make_shared<Stream>(device, memory, faults, seed);
    std::thread([stream] { stream->run(); }).detach();
    return stream;
  }

  void add(Work work) {
    const std::lock_guard guard(lock_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  // The thread ends when it has done what is queued.
  void end() {
    const std::lock_guard guard(lock_);
    is_ending_ = true;
    changed_.notify_all();
  }

  // Copies in any order.
  template <typename One>
  void copy_all(std::vector<One> copies) {
    std::shuffle(copies.begin(), copies.end(), dice_);
    for (const One& copy : copies) {
      copy_one(copy);
    }
  }

  void copy_one(const QueuedCopy& queued) {
    const Copy& copy = queued.copy;
    const Place target = memory_.find(copy.target, copy.size, WRITES, device_.physical, false);
    const Place source = memory_.find(copy.source, copy.size, READS, device_.physical, false);
    if (target.memory() != queued.target_memory || source.memory() != queued.source_memory) {
      std::fprintf(stderr, "emulated device: memory was freed before a copy of it was done\n");
      device_.failure = ILLEGAL_ADDRESS;
    }
    move_checked(target, source, copy.size);
  }

  // One of a kernel's.
  void copy_one(const Copy& copy) {
    const Place target = memory_.find(copy.target, copy.size, WRITES, device_.physical, true);
    const Place source = memory_.find(copy.source, copy.size, READS, device_.physical, true);
    move_checked(target, source, copy.size);
  }

  void move_checked(const Place& target, const Place& source, size_t size) {
    if (target.bytes == nullptr || source.bytes == nullptr) {
      device_.failure = ILLEGAL_ADDRESS;
    }
    if (device_.failure == SUCCESS) {
      move(target, source, size);
    }
  }

  void pause() {
    const uint64_t longest = faults_.delay_us();
    if (longest > 0 && dice_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(dice_() % (longest + 1)));
    }
  }

  [[nodiscard]] Device& device() { return device_; }
  [[nodiscard]] Memory& memory() { return memory_; }

 private:
  void run() {
    while (true) {
      Work work;
      {
        std::unique_lock guard(lock_);
        changed_.wait(guard, [this] { return !queue_.empty() || is_ending_; });
        if (queue_.empty()) {
          return;
        }
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      while (faults_.hangs()) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
      pause();
      work(*this);
    }
  }

  // Sometimes in three parts, the last one first: who looks too early sees neither the old bytes nor the new ones.
  void move(const Place& target, const Place& source, size_t size) {
    if (size < 64 || dice_() % 4 != 0) {
      copy_bytes(target, source, 0, size);
      return;
    }
    const size_t third = size / 3;
    for (const size_t part : {size_t{2}, size_t{0}, size_t{1}}) {
      const size_t begin = part * third;
      copy_bytes(target, source, begin, part == 2 ? size - begin : third);
      std::this_thread::yield();
    }
  }

  Device& device_;
  Memory& memory_;
  Faults& faults_;
  std::mt19937_64 dice_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Work> queue_;  // guarded by lock_
  bool is_ending_ = false;  // guarded by lock_
};

}  // namespace emulated
