// A flush in parts: what nobody holds and was last used before a time leaves a directory, of some namespaces or of all.
//
// What it is: a walk over the records, each looked at once more than it has children: a chunk goes when nothing follows it any
// more, and then what precedes it is looked at. What it is not: an eviction; nothing is learned from it.
//
// Between two parts the directory may change. What is stored or used after the time that the walk was given stays; what was
// released behind the walk stays too.
// Threads: the control thread only. O(limit) each part.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "directory/directory.h"

namespace kvpool {

class FlushWalk {
 public:
  // Of these namespaces, or (absent) of all. REQUIRES: the directory lives as long as this.
  FlushWalk(Directory& directory, const std::optional<std::vector<NamespaceId>>& owners, uint64_t before_ns);

  // Removes `limit` chunks at most, and looks at no more than a bounded number for each. False at the end. REQUIRES: limit > 0.
  bool advance(size_t limit) noexcept;
  // The latest generation when the walk began: what it does not meet was stored after that.
  [[nodiscard]] uint64_t generation() const noexcept { return generation_; }
  // What has gone so far; at the end also what is held, in all of these namespaces.
  [[nodiscard]] const FlushResult& result() const noexcept { return result_; }

 private:
  [[nodiscard]] bool is_chosen(NamespaceId owner) const noexcept {
    return is_all_ || (owner.value() < chosen_.size() && chosen_[owner.value()]);
  }
  [[nodiscard]] bool can_go(RecordId id) const noexcept;
  void count_skipped() noexcept;

  Directory& directory_;
  const bool is_all_;
  std::vector<bool> chosen_;  // by namespace
  const uint64_t before_ns_;
  const uint64_t generation_;
  uint32_t next_ = 0;
  RecordId climbing_;  // what preceded the chunk that went last
  FlushResult result_;
};

// All parts of one at once.
FlushResult flush(Directory& directory, std::optional<NamespaceId> owner, uint64_t before_ns);

}  // namespace kvpool
