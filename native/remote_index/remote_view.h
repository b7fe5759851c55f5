// A reader's view of the remote index, in any process: whether a live owner of a chunk is known.
//
// What it is: a hint without a round trip. What it is not: a right, or the word of the owner, who may have dropped the chunk long
// ago. Everything read is untrusted: the header is read once and checked, and each number that is read later is in range by its
// width alone, so that a table of any content is answered from, and nothing outside of it is read.
//
// Reading while the writer writes: an entry is one word and never moves, so there is no state between two; a chunk whose entry is
// not itself being inserted, removed or evicted is found.
// Shares itself, as a Mapping does. Threads: any.
#pragma once

#include <memory>
#include <string>

#include "base/memory.h"
#include "base/shared_words.h"
#include "remote_index/remote_format.h"

namespace kvpool {

class RemoteView : public std::enable_shared_from_this<RemoteView> {
 public:
  // Returns nothing if the region is not a remote index of this version, or is too small for the size in its header.
  [[nodiscard]] static std::shared_ptr<const RemoteView> attach(std::shared_ptr<const Mapping> mapping);

  [[nodiscard]] RemotePlace place_of(const ChunkKey& key) const noexcept { return remote_place(key, seed_, bucket_count_); }
  void prefetch(const RemotePlace& place) const noexcept {
    __builtin_prefetch(&buckets_[place.buckets[0]]);
    __builtin_prefetch(&buckets_[place.buckets[1]]);
  }
  // Whether some live owner has the chunk, as far as is known.
  [[nodiscard]] bool has(const RemotePlace& place) const noexcept {
    return has_in(buckets_[place.buckets[0]], place.tag) || has_in(buckets_[place.buckets[1]], place.tag);
  }

  // The pace of the fastest live owner of the chunk whose pace is known; all 0 where none is.
  [[nodiscard]] RemotePace pace_of(const RemotePlace& place) const noexcept;

  [[nodiscard]] std::string epoch() const;  // 16 bytes

 private:
  RemoteView(std::shared_ptr<const Mapping> mapping, const RemoteHeader& header) noexcept;
  [[nodiscard]] bool has_in(const RemoteBucket& bucket, uint64_t tag) const noexcept {
    for (const uint64_t& word : bucket.entries) {
      const uint64_t entry = load_acquire(word);
      if (has_tag(entry, tag) && is_live(owner_of(entry))) {
        return true;
      }
    }
    return false;
  }
  [[nodiscard]] bool is_live(uint32_t owner) const noexcept {
    return owner != 0 && (load_acquire(header_->live[owner / 64]) >> owner % 64 & 1) != 0;
  }

  const std::shared_ptr<const Mapping> mapping_;
  const RemoteHeader* const header_;
  const RemoteBucket* const buckets_;
  const uint64_t* const paces_;
  const uint64_t bucket_count_;
  const HashSeed seed_;
};

}  // namespace kvpool
