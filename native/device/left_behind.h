// Objects that a device may still use when their owner goes: they stay until the process ends.
//
// What it is: a list that only grows, by one object for each owner whose device did not answer. What it is not: a leak that nobody sees:
// what is in it can be found. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace kvpool {

template <typename Object>
void leave_behind(std::unique_ptr<Object> object) {
  static std::mutex lock;
  static auto& left = *new std::vector<std::unique_ptr<Object>>;  // guarded by lock; never destroyed
  const std::lock_guard guard(lock);
  left.push_back(std::move(object));
}

}  // namespace kvpool
