#include "base/process_life.h"

#include <pthread.h>

#include <atomic>

namespace kvpool {
namespace {

std::atomic<uint32_t> life = 0;

// Registered when the library is loaded, before any object of it can be forked.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { life.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint32_t process_life() noexcept { return life.load(std::memory_order_relaxed); }

}  // namespace kvpool
