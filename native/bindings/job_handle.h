// What Python holds of a job of a copy pool.
#pragma once

#include <memory>
#include <utility>

#include "copy/copy_pool.h"

namespace kvpool {

// When it goes, the copying has stopped, so the engine's arrays may go after it.
template <typename Job>
struct Handle {
  std::shared_ptr<Job> job;
  std::shared_ptr<CopyQueue> queue;
  Handle(std::shared_ptr<Job> made, std::shared_ptr<CopyQueue> where) : job(std::move(made)), queue(std::move(where)) {}
  Handle(Handle&&) = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (job != nullptr) {
      job->cancel();
    }
  }
};

}  // namespace kvpool
