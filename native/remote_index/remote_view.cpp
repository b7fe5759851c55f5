// The one look that a reader takes at the header of a remote index. See remote_view.h.
#include "remote_index/remote_view.h"

#include <cstring>

namespace kvpool {

std::shared_ptr<const RemoteView> RemoteView::attach(std::shared_ptr<const Mapping> mapping) {
  if (mapping == nullptr || mapping->size() < PAGE_BYTES) {
    return nullptr;
  }
  RemoteHeader header{};
  // Not the words behind it, which change.
  std::memcpy(static_cast<void*>(&header), mapping->data(), offsetof(RemoteHeader, live));
  if (std::memcmp(header.magic, REMOTE_MAGIC, sizeof(REMOTE_MAGIC)) != 0 || header.version != REMOTE_VERSION ||
      header.buckets < MIN_REMOTE_BUCKETS || header.buckets > MAX_REMOTE_BUCKETS ||
      remote_bytes(header.buckets) > mapping->size()) {
    return nullptr;
  }
  return std::shared_ptr<const RemoteView>(new RemoteView(std::move(mapping), header));
}

RemoteView::RemoteView(std::shared_ptr<const Mapping> mapping, const RemoteHeader& header) noexcept
    : mapping_(std::move(mapping)),
      header_(reinterpret_cast<const RemoteHeader*>(mapping_->data())),
      buckets_(reinterpret_cast<const RemoteBucket*>(mapping_->data() + PAGE_BYTES)),
      paces_(reinterpret_cast<const uint64_t*>(mapping_->data() + paces_at(header.buckets))),
      bucket_count_(header.buckets),
      seed_(header.seed) {}

RemotePace RemoteView::pace_of(const RemotePlace& place) const noexcept {
  RemotePace best{};
  for (const uint64_t bucket : place.buckets) {
    for (const uint64_t& word : buckets_[bucket].entries) {
      const uint64_t entry = load_acquire(word);
      if (!has_tag(entry, place.tag) || !is_live(owner_of(entry))) {
        continue;
      }
      const RemotePace pace = pace_in(load_acquire(paces_[owner_of(entry)]));
      if (pace.ns_per_mib != 0 && (best.ns_per_mib == 0 || pace.ns_per_mib < best.ns_per_mib)) {
        best = pace;
      }
    }
  }
  return best;
}

std::string RemoteView::epoch() const {
  return {reinterpret_cast<const char*>(header_->epoch), sizeof(header_->epoch)};
}

}  // namespace kvpool
