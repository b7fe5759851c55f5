#include "directory/flush_walk.h"

#include "base/check.h"

namespace kvpool {
namespace {

// Records looked at for each one that may be removed: a look takes a hundredth of the time of a removal.
constexpr size_t LOOKS = 64;

}  // namespace

FlushWalk::FlushWalk(Directory& directory, const std::optional<std::vector<NamespaceId>>& owners, uint64_t before_ns)
    : directory_(directory), is_all_(!owners), before_ns_(before_ns), generation_(directory.last_generation_) {
  if (owners) {
    chosen_.resize(directory.namespaces());
    for (const NamespaceId owner : *owners) {
      if (owner.value() < chosen_.size()) {
        chosen_[owner.value()] = true;
      }
    }
  }
}

bool FlushWalk::can_go(RecordId id) const noexcept {
  const ChunkRecord& record = directory_.records_[id];
  return !record.first_child.valid() && record.is_listed() && record.last_access_ns < before_ns_ && is_chosen(record.owner);
}

bool FlushWalk::advance(size_t limit) noexcept {
  KVPOOL_CHECK(limit > 0);
  directory_.departure_ = Cause::FLUSHED;
  size_t looks = limit > SIZE_MAX / LOOKS ? SIZE_MAX : limit * LOOKS;
  while (limit > 0 && looks > 0) {
    if (!climbing_.valid()) {
      if (next_ >= directory_.records_.end()) {
        count_skipped();
        return false;
      }
      climbing_ = RecordId(next_++);
    }
    --looks;
    if (!can_go(climbing_)) {
      climbing_ = RecordId();
      continue;
    }
    const RecordId id = climbing_;
    climbing_ = directory_.records_[id].parent;
    ++result_.chunks;
    result_.bytes += directory_.chunk_bytes(directory_.records_[id]);
    ++directory_.stats_.flushed_chunks;
    directory_.remove_subtree(id);
    --limit;
  }
  return true;
}

void FlushWalk::count_skipped() noexcept {
  result_.skipped = 0;
  for (uint32_t index = 0; index < directory_.namespaces(); ++index) {
    result_.skipped += is_chosen(NamespaceId(index)) ? directory_.namespace_counts(NamespaceId(index)).held : 0;
  }
}

FlushResult flush(Directory& directory, std::optional<NamespaceId> owner, uint64_t before_ns) {
  FlushWalk walk(directory, owner ? std::optional(std::vector<NamespaceId>{*owner}) : std::nullopt, before_ns);
  while (walk.advance(SIZE_MAX)) {
  }
  return walk.result();
}

}  // namespace kvpool
