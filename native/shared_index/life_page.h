// The life page: one word of shared memory that says which life of the daemon may give the arena's slots away.
//
// What it is: how readers of an index learn that it is no longer the arena's. An index that its writer has left stands as it was, while
// a later life that has taken the arena over writes to another index. A life therefore puts its number here before it gives a slot
// away, and who has read bytes looks here afterwards. What it is not: a sign that a daemon lives.
// Invariant: no number is given twice.
// Threads: `begin` on the daemon's control thread; the rest from any thread of any process.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/memory.h"
#include "base/shared_words.h"

namespace kvpool {

class LifePage {
 public:
  // REQUIRES: mapping->size() >= sizeof(uint64_t).
  explicit LifePage(std::shared_ptr<const Mapping> mapping) : mapping_(std::move(mapping)) {}

  // 0: no life has begun.
  [[nodiscard]] uint64_t life() const noexcept { return load_acquire(*word()); }

  [[nodiscard]] bool is_writable() const noexcept { return mapping_->is_writable(); }
  // REQUIRES: is_writable(); no life has had the number.
  void begin(uint64_t life) const noexcept { store_release(*word(), life); }

 private:
  [[nodiscard]] uint64_t* word() const noexcept { return reinterpret_cast<uint64_t*>(mapping_->data()); }

  std::shared_ptr<const Mapping> mapping_;
};

}  // namespace kvpool
